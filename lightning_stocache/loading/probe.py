"""Reading a source under given seeds, and comparing what came, bit for bit.

A `Probe` reads one index at a time. Before each read it seeds every process-wide generator (torch, CUDA if it runs,
NumPy, Python); it notes the bits of the sample and the state of the generators before and after. `sign` compares two
reads of an index under different seeds: unequal bits or a generator that moved show that the source is random
(RandomErasing(p=0.1) seldom changes bits, but always draws).

Whoever makes a Probe puts the generators back at the end: `probe.generators.restore(probe.before)`. A generator that
belongs to the source is moved by the reads, and nothing here can see it.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset

__all__ = ["Generators", "Path", "Probe", "Read", "bits", "is_pil", "sign", "walk"]

Path = tuple[Any, ...]
"""Where an object lies in a sample: one key or position per level, () for the sample itself."""


class Generators:
    """The process-wide generators. A state is a dict of values that `==` compares."""

    def __init__(self) -> None:
        # Looked at once: a generator that is born during the probe has no state to return to.
        self._cuda = bool(cast(Any, torch.cuda).is_initialized())

    def state(self) -> dict[str, Any]:
        """The state of every generator, by name."""
        state = {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "numpy.random": pickle.dumps(np.random.get_state(legacy=False)),
            "random": random.getstate(),
        }
        if self._cuda:
            state["torch.cuda"] = [one.numpy().tobytes() for one in torch.cuda.get_rng_state_all()]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Put every generator back to a state."""
        torch.set_rng_state(_as_tensor(state["torch"]))
        np.random.set_state(pickle.loads(state["numpy.random"]))
        random.setstate(state["random"])
        if self._cuda:
            torch.cuda.set_rng_state_all([_as_tensor(one) for one in state["torch.cuda"]])

    def seed(self, seed: int) -> None:
        """Seed every generator."""
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would queue the seed for a CUDA that starts later
        np.random.seed(seed)
        random.seed(seed)
        if self._cuda:
            torch.cuda.manual_seed_all(seed)


@dataclass(frozen=True)
class Read:
    """One read of an index: the sample, its bits, and the generators before and after."""

    index: int
    sample: Any
    bits: dict[Path, Any]
    before: dict[str, Any]
    after: dict[str, Any]


class Probe:
    """Reads under given seeds, and counts them.

    Args:
        indices: The indices that are to be probed.
    """

    def __init__(self, indices: tuple[int, ...]) -> None:
        self.indices = indices
        self.generators = Generators()
        self.before = self.generators.state()
        self.reads = 0

    def read(self, source: Dataset[Any], index: int, seed: int) -> Read:
        """Read an index under a seed. What the source raises comes through."""
        self.generators.seed(seed)
        before = self.generators.state()
        self.reads += 1
        sample = source[index]
        return Read(index, sample, bits(sample), before, self.generators.state())

    def read_twice(self, source: Dataset[Any], index: int) -> tuple[Read, Read]:
        """Read an index under two seeds, which no other index has."""
        return self.read(source, index, 2 * index), self.read(source, index, 2 * index + 1)


def sign(first: Read, second: Read) -> str | None:
    """What shows that two reads of an index are random, in words; None if nothing does."""
    for read in (first, second):
        if moved := [name for name in read.before if read.before[name] != read.after[name]]:
            return f"reading index {read.index} moves the generator of {' and '.join(moved)}"
    for path in {**first.bits, **second.bits}:
        if path not in first.bits or first.bits[path] != second.bits.get(path):
            where = "".join(f"[{key!r}]" for key in path)
            return f"two reads of index {first.index} differ in sample{where}"
    return None


def walk(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every container and leaf of a sample with its path."""
    yield path, node
    if isinstance(node, Mapping):
        for key in node:
            yield from walk(node[key], (*path, key))
    elif isinstance(node, (list, tuple)):
        for position, inner in enumerate(node):
            yield from walk(inner, (*path, position))


def bits(sample: Any) -> dict[Path, Any]:
    """A sample as values that `==` compares bit for bit, by path; copies, which no later read can overwrite."""
    return {path: _leaf_bits(node) for path, node in walk(sample)}


def _leaf_bits(node: Any) -> Any:
    kind: Any = type(node)
    if isinstance(node, Mapping):
        return kind, tuple(node)
    if isinstance(node, (list, tuple)):
        return kind, len(node)
    if isinstance(node, torch.Tensor):
        if node.layout is not torch.strided or node.is_meta or node.is_nested or node.is_quantized:
            return kind, node.dtype, node.layout  # no plain bytes; a cache refuses these anyway
        plain = node.as_subclass(torch.Tensor).detach()
        flat = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return kind, plain.dtype, tuple(plain.shape), flat.view(torch.uint8).numpy().tobytes(), bits(vars(node))
    if isinstance(node, (np.ndarray, np.generic, float, complex)):  # by bits: NaN equals itself, 0.0 is not -0.0
        array = np.asarray(node)
        return kind, array.dtype, array.shape, bits(array.tolist()) if array.dtype.hasobject else array.tobytes()
    if is_pil(node):
        return kind, node.mode, node.size, node.getpalette(), node.tobytes()
    # Other objects by their own ==, if they have one and are safe to keep; of the rest only the type can be compared.
    return (kind, node) if kind.__eq__ is not object.__eq__ and kind.__hash__ is not None else kind


def is_pil(node: Any) -> bool:
    """Whether an object is an image of PIL, without importing it."""
    module = sys.modules.get("PIL.Image")  # never imported: then nobody made one
    return module is not None and isinstance(node, module.Image)


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
