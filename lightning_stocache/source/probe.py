"""Reading a source under given seeds, and comparing what came, bit for bit.

A `Probe` reads one index at a time. Before each read it seeds every process-wide generator (torch, CUDA if it runs,
NumPy, Python); it notes the bits of the sample and the state of the generators before and after. `sign` compares two
reads of an index under different seeds: unequal bits or a generator that moved show that the source is random
(RandomErasing(p=0.1) seldom changes bits, but always draws).

The generators that belong to the source (`generators`) cannot be seeded: they go on from read to read, which does as
well, and start a seed's second read where they started its first.

Whoever makes a Probe puts the generators back at the end: `probe.generators.restore(probe.before)`.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from lightning_stocache.cache.records import canonical_bytes
from lightning_stocache.source.generators import ENTROPY, Generators, owned_generators

_PLAIN = (str, bytes, int, bool, type(None))
_DICTS = (dict, UserDict)  # other mappings may not be iterated, or make their values anew

__all__ = ["Path", "Probe", "Read", "bits", "is_pil", "sign", "walk"]

Path = tuple[Any, ...]
"""Where an object lies in a sample: one key or position per level, () for the sample itself."""


@dataclass(frozen=True)
class Read:
    """One read of an index: the sample, its bits, and the generators before and after."""

    index: int
    sample: Any
    bits: dict[Path, Any]
    before: dict[str, Any]
    after: dict[str, Any]


class Probe:
    """Reads of one source under given seeds, counted.

    Args:
        source: The source, whose own generators are watched.
        indices: The indices that are to be probed.
        told: Called with each index before it is read.
    """

    def __init__(
        self, source: Dataset[Any], indices: tuple[int, ...], told: Callable[[int], None] | None = None
    ) -> None:
        self.indices = indices
        self._told = told
        self.generators = Generators(owned_generators(source))
        self.before = self.generators.state()
        self.reads = 0
        self._source = source
        self._started: dict[int, dict[str, Any]] = {}  # by seed

    def read(self, source: Dataset[Any], index: int, seed: int) -> Read:
        """Read an index of the source, or of a copy with another transform, under a seed; what it raises comes through.

        A generator that the first read has made is watched from then on.
        """
        self.generators.seed(seed)
        if seed in self._started:
            self.generators.restore_owned(self._started[seed])
        before = self._started[seed] = self.generators.state()
        self.reads += 1
        if self._told is not None:
            self._told(index)
        with _worker_of(seed):
            sample = source[index]
        read = Read(index, sample, bits(sample), before, self.generators.state())
        if self.reads == 1:
            made = owned_generators(self._source)
            self.generators.owned = made | self.generators.owned
        return read

    def read_twice(self, source: Dataset[Any], index: int) -> tuple[Read, Read]:
        """Read an index under two seeds, which no other index has."""
        return self.read(source, index, 2 * index), self.read(source, index, 2 * index + 1)


@contextmanager
def _worker_of(seed: int) -> Iterator[None]:
    """In a worker: have another seed and number for a while, because what is drawn from them is random."""
    info: Any = get_worker_info()
    if info is None:
        yield
        return
    before = info.seed, info.id
    try:
        object.__setattr__(info, "seed", seed)  # it refuses to be changed
        object.__setattr__(info, "id", seed % 2)
        yield
    finally:
        object.__setattr__(info, "seed", before[0])
        object.__setattr__(info, "id", before[1])


def sign(first: Read, second: Read) -> str | None:
    """What shows that two reads of an index are random, in words; None if nothing does."""
    for read in (first, second):
        if moved := [name for name in read.before if read.before[name] != read.after[name]]:
            if moved == [ENTROPY]:
                return f"reading index {read.index} makes a generator with a seed of the system's"
            return f"reading index {read.index} moves the generator of {' and '.join(moved)}"
    for path in {**first.bits, **second.bits}:
        if path not in first.bits or first.bits[path] != second.bits.get(path):
            where = "".join(f"[{key!r}]" for key in path)
            return f"two reads of index {first.index} differ in sample{where}"
    return None


def walk(node: Any, path: Path = (), above: tuple[int, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """Every container and leaf of a sample with its path; a container inside itself is not gone into again.

    Args:
        node: the sample, or a part of it.
        path: where that lies.
        above: the containers around it, by their `id`.
    """
    yield path, node
    if isinstance(node, (*_DICTS, list, tuple)) and id(node) not in above:
        inside = (*above, id(node))
        for key in node if isinstance(node, _DICTS) else range(len(node)):
            yield from walk(node[key], (*path, key), inside)


def bits(sample: Any) -> dict[Path, Any]:
    """A sample as values that `==` compares bit for bit, by path; copies, which no later read can overwrite."""
    return {path: _leaf_bits(node) for path, node in walk(sample)}


def _leaf_bits(node: Any) -> Any:
    kind: Any = type(node)
    if isinstance(node, _DICTS):
        return kind, tuple(node)
    if isinstance(node, (list, tuple)):
        return kind, len(node)
    if isinstance(node, torch.Tensor):
        if node.layout is not torch.strided or node.is_meta or node.is_nested or node.is_quantized:
            return kind, node.dtype, node.layout  # no plain bytes; a cache refuses these anyway
        plain = node.as_subclass(torch.Tensor).detach()
        flat = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return kind, plain.dtype, tuple(plain.shape), flat.view(torch.uint8).numpy().tobytes(), _attribute_bits(node)
    if isinstance(node, (np.ndarray, np.generic, float, complex)):  # by bits: NaN equals itself, 0.0 is not -0.0
        array = np.asarray(node)
        return kind, array.dtype, array.shape, bits(array.tolist()) if array.dtype.hasobject else array.tobytes()
    if is_pil(node):
        return kind, node.mode, node.size, node.getpalette(), node.tobytes()
    if kind in _PLAIN:
        return kind, node
    if isinstance(node, set | frozenset):  # in no order: that of strings is another one in each process
        with suppress(TypeError):  # of what has no hash
            return kind, frozenset(tuple(bits(item).items()) for item in node)
    if (content := canonical_bytes(node)) is not None:
        return kind, content
    # What cannot be pickled by its own ==, if it has one and is safe to keep; of the rest only the type counts.
    return (kind, node) if kind.__eq__ is not object.__eq__ and kind.__hash__ is not None else kind


def _attribute_bits(tensor: torch.Tensor) -> dict[Path, Any]:
    """Those of a tensor's attributes. MONAI notes the addresses of its transforms there, some of which live shortly."""
    return {
        path: content
        for path, content in bits(vars(tensor)).items()
        if path[:1] != ("_applied_operations",) or path[-1] != "id"
    }


def is_pil(node: Any) -> bool:
    """Whether an object is an image of PIL, without importing it."""
    module = sys.modules.get("PIL.Image")  # never imported: then nobody made one
    return module is not None and isinstance(node, module.Image)
