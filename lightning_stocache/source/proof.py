"""The proof of a cut: head and tail together make the samples of the source.

Set-up proves it for the samples that it has read: under one seed both give the same bits and leave the generators in
the same state, and the head draws nothing. What the code behind the transforms may do in other samples is proved

- by construction, if it looks at none of their results. Some samples are read blindly at set-up, and each one while it
  is loaded (`opaque`);
- else by more comparisons: eight in any case, up to 32 within two seconds, the rest in epoch one, and again with each
  look (`looks`). Code that looks may wait for a rare result, such as an image without boxes. So seeds are searched for:
  the tail is run under many, and the source is read under those that give the rarest result, the shortest, or the one
  with the least or largest sum.

Where no code looks in the samples that set-up has read, it may look in a later one. Then this sample is compared eight
times, or once after four of this kind.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, get_worker_info

from lightning_stocache.cache.records import is_image
from lightning_stocache.source.access import load_one
from lightning_stocache.source.generators import are_draws_evidence
from lightning_stocache.source.opaque import LookedAtError, depends_on_none, read_blindly
from lightning_stocache.source.probe import MANY, SOME, Probe, Read, why_random
from lightning_stocache.source.samples import Bits, bits, node_at, walk
from lightning_stocache.source.transform_split import Tail, reads_as_library
from lightning_stocache.source.transforms import UncuttableError, reading
from lightning_stocache.source.walk import reachable

__all__ = ["PROVING_SECONDS", "Proof"]

log = logging.getLogger(__name__)

PROVING_SECONDS = 2.0
"""The time for more than the least comparisons; the rest is made in epoch one."""
_SHARE = 8  # of so many samples that epoch one loads, one is compared
_LOOKED = 3  # comparisons of a sample in a look
_TRIED = 64  # seeds under which the tail is run, for a comparison
_TRYING_SECONDS = 0.2  # for more than the least of these
_LEAST_TRIED = 16
_MIXED = "its transform holds a dataset, and makes each sample from other samples, too"
_UNEQUAL = (
    "its random steps, run after the dataset, do not give its sample again under the same seed (does a sample need "
    "their result?)"
)


class Proof:
    """Proves the cut of a source into head and tail, at set-up and while samples are served, in each process."""

    def __init__(self, source: Any, tail: Tail) -> None:
        self._source = source
        self._head = tail.head
        self._tail = tail
        self._unproved: int | None = None  # until the first samples are loaded
        self._looked_at = 0  # samples at whose results code has looked

    # ---- at set-up ----

    def prove_read(self, original: Read, probe: Probe) -> Read:
        """Prove the cut for a sample that was read, and that the head draws nothing. Returns a read of the head.

        Raises:
            UncuttableError: head and tail do not make the sample.
        """
        again = probe.read(self._head, original.index, original.seed + 1)  # the tail may change that of `once`
        once = probe.read(self._head, original.index, original.seed)
        if found := why_random(once, again):
            raise UncuttableError(f"its dataset is random outside the transform ({found})")
        self._compare(once.sample, original, probe)
        return again

    def prove_others(self, indices: Sequence[int], least: int, probe: Probe) -> int:
        """Prove the cut for more samples, of which `least` are compared in any case. Returns how many are left.

        Raises:
            UncuttableError: head and tail do not make one of them.
        """
        begin = time.perf_counter()
        for number, index in enumerate(indices):
            if number >= least and time.perf_counter() - begin > PROVING_SECONDS:
                return len(indices) - number
            try:
                self._prove(index, 2 * len(self._source) + number * _TRIED, 1, probe)
            except UncuttableError:
                raise
            except Exception:  # the source is the user's: no sampler may ever ask for the index
                continue
        return 0

    def is_blind(self, reads: Sequence[Read], probe: Probe) -> bool:
        """Whether the code behind the transforms looks at none of the results in some samples.

        Args:
            reads: reads of the head. Their samples are read blindly, as is the first of each part of a ConcatDataset.
            probe: reads them.

        Raises:
            UncuttableError: a result that is taken apart has another form under another seed.
        """
        if not self._tail.heads:  # the code behind a format is that of its library, if no subclass changes it
            return reads_as_library(self._source)
        with_none = [read.index for read in reads[:2]]
        for read in reads:
            if self._tail.takes_apart and read.index in with_none:
                self._telling_seeds(read.sample, read.index, 2 * len(self._source), 1, probe)
            if self._is_looked_at(read.index, read.bits, read.index in with_none, probe):
                return False
        parts = [0, *self._source.cumulative_sizes[:-1]] if type(self._source) is ConcatDataset else []
        try:
            return not any(self._is_looked_at(index, None, True, probe) for index in parts)
        except Exception:  # the source is the user's: no sampler may ever ask for the index
            return False

    def _is_looked_at(self, index: int, expected: Bits | None, with_none: bool, probe: Probe) -> bool:
        """Whether code looks at a result in a sample, whose bits may be known."""
        read = partial(probe.sample, self._head, index, 2 * index)
        try:
            [sample], objection = read_blindly(lambda: [read()], [index], self._tail)
        except LookedAtError:
            return True
        if expected is not None and bits(sample) != expected:  # the code asks for the type of a result
            return True
        if objection is not None:  # a sample of another form is served as the source reads it
            return expected is not None
        return with_none and depends_on_none(read, index, self._tail)

    # ---- while samples are served ----

    def __getitem__(self, index: int) -> Any:
        """A sample of the head, which is read blindly.

        Raises:
            UncuttableError: the tail cannot finish it.
        """
        [sample], objection = read_blindly(lambda: [self._head[index]], [index], self._tail)
        if objection is not None:
            raise UncuttableError(objection)
        return sample

    def read(self, read: Callable[[], Sequence[Any]], indices: Sequence[int]) -> tuple[list[Any], str | None]:
        """Samples of the head, which `read` reads, and why the tail cannot finish one of them.

        Raises:
            UncuttableError: head and tail do not make the samples of the source.
            Exception: an error of the source.
        """
        if self._tail.cut.is_blind:
            try:
                return read_blindly(read, indices, self._tail)
            except LookedAtError as looked:
                if self._tail.takes_apart:  # its head has no result that the code could look at
                    raise
                for index in indices:
                    is_new = self._looked_at * SOME < MANY
                    self._prove_served(index, SOME if is_new else 1, looked)
                    self._looked_at += 1
        before = self._calls
        samples = list(read())
        calls = self._calls - before
        expected = sum(len(self._tail.calls(index)) for index in indices)
        return samples, None if calls == expected else f"the transform is called {calls} times instead of {expected}"

    def go_on(self, indices: Sequence[int]) -> None:
        """Compare some of the samples that were just loaded, until 32 samples of the cut have been compared.

        Raises:
            UncuttableError: head and tail do not make a sample of the source.
        """
        if self._unproved is None:
            info = get_worker_info()
            self._unproved = -(-self._tail.cut.unproved // (1 if info is None else info.num_workers))
        if not self._unproved:
            return
        count = min(len(indices) // _SHARE + 1, self._unproved)
        for index in indices[:count]:
            self._unproved -= 1
            try:
                self._prove_served(index, 1)
            except UncuttableError:
                raise
            except Exception:  # the sample itself could be read
                log.debug("the cut could not be proved for sample %d", index, exc_info=True)

    def load(self, index: int) -> Any:
        """A sample of the head, for which the cut is proved once more.

        Raises:
            UncuttableError: head and tail do not make the sample of the source.
            Exception: an error of the source.
        """
        if not self._tail.cut.is_blind:
            self._prove_served(index, _LOOKED)
        [sample], _ = self.read(lambda: [load_one(self._head, index)], [index])
        return sample

    @property
    def _calls(self) -> int:
        return sum(head.thread.calls for head in self._tail.heads)

    def _prove_served(self, index: int, times: int, doubt: LookedAtError | None = None) -> None:
        if not are_draws_evidence():  # another thread may draw: nothing can be compared
            if doubt is not None:
                raise doubt
            return
        seed = random.Random().getrandbits(30)  # not of a process-wide generator, whose draws are the user's
        with Probe(self._source) as probe, reading(self._tail.heads):
            self._prove(index, seed, times, probe)

    # ---- one comparison ----

    def _prove(self, index: int, seed: int, times: int, probe: Probe) -> None:
        """Prove the cut for a sample, some times under seeds that are searched for."""
        sample = probe.read(self._head, index, seed).sample
        for chosen in self._telling_seeds(sample, index, seed, times, probe):
            original = probe.read(self._source, index, chosen)
            probe.generators.seed(chosen)
            self._compare(copy.deepcopy(sample), original, probe)

    def _compare(self, sample: Any, original: Read, probe: Probe) -> None:
        """Compare a sample of the head, finished from here on, with that of the source."""
        index, tail = original.index, self._tail
        whole = tail.finish_batch(sample, index) if isinstance(index, list) else tail(sample, index)
        if probe.generators.moved(original.after) or bits(whole) != original.bits:
            nodes = (node for step in tail.steps for _, node in reachable(step))
            holds_dataset = any(issubclass(type(node), Dataset) for node in nodes)
            raise UncuttableError(_MIXED if holds_dataset else _UNEQUAL)

    def _telling_seeds(self, sample: Any, index: int, seed: int, count: int, probe: Probe) -> list[int]:
        """Up to `count` of some seeds: those under which the tail gives the most unusual results first.

        Raises:
            UncuttableError: a result that is taken apart has another form under one of them.
        """
        begin = time.perf_counter()
        results = dict[int, list[_Leaf]]()
        for tried in range(seed, seed + _TRIED):
            probe.generators.seed(tried)
            try:
                whole = self._tail(copy.deepcopy(sample), index, has_usual_form=True)
                results[tried] = self._results(whole, index)
            except UncuttableError:
                raise
            except Exception:  # of the user's transform, or a class that cannot be copied
                log.debug("the tail cannot be run for sample %d", index, exc_info=True)
                break
            if len(results) >= _LEAST_TRIED and time.perf_counter() - begin > _TRYING_SECONDS:
                break
        if not results:
            return [seed]
        forms = {tried: tuple((leaf.kind, leaf.shape) for leaf in leaves) for tried, leaves in results.items()}
        seen = Counter(forms.values())
        chosen = [min(results, key=lambda tried: seen[forms[tried]])]
        for number in range(min(map(len, results.values()))):
            chosen.append(min(results, key=lambda tried: math.prod(results[tried][number].shape)))
            chosen.append(min(results, key=lambda tried: results[tried][number].total))
            chosen.append(max(results, key=lambda tried: results[tried][number].total))
        if count == 1:
            return [chosen[seed // _TRIED % len(chosen)]]  # another one for each sample
        return list(dict.fromkeys((*chosen, *results)))[:count]

    def _results(self, whole: Any, index: int) -> list[_Leaf]:
        paths = [path for _, call in self._tail.calls(index) for _, path in call.parts]
        parts = [node_at(whole, path) for path in dict.fromkeys(paths)] if paths else [whole]
        return [_leaf_of(node) for part in parts for _, node in walk(part)]


class _Leaf(NamedTuple):
    """The features of a result by which code might tell it from others."""

    kind: type
    shape: tuple[int, ...]
    total: float = 0.0


def _leaf_of(node: Any) -> _Leaf:
    kind = type(node)
    if issubclass(kind, int | float):
        return _Leaf(kind, (), float(node))
    if issubclass(kind, torch.Tensor | np.ndarray):
        is_number = not issubclass(kind, np.ndarray) or node.dtype.kind in "buif"
        return _Leaf(kind, tuple(node.shape), float(node.sum()) if is_number else 0.0)
    if is_image(kind):
        return _Leaf(kind, node.size)
    return _Leaf(kind, (len(node),) if hasattr(kind, "__len__") else ())
