"""The trial: what one sample costs, in the source, in the cache, in the transform, and in the loader as a whole.

The source is read in this process, each sample several times: the first read may come from the disk (the kernel says
how many bytes did), later ones come from the page cache. What the loader makes of it, with its workers, its transport
and its cores, is not put together from parts but watched: the user's kind of loader runs over a few batches,

- uncached, as with `budget=0`;
- with every sample a miss that is stored, as in epoch one;
- with every sample a hit: samples that were read before, over and over, in a real cache as long as the dataset if that
  is small, else too large for the processor's own caches.

All of this is done in turn, and then again: what differs from round to round is the noise of the machine, and each cost
is the spread of all rounds. Nothing here knows what a budget is: that is `planner`'s.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from traceback import clear_frames
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from lightning_stocache.cache.field import UnsupportedSampleError
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.insight.costs import Costs, Loading, PlanError, Reads, Spread
from lightning_stocache.insight.pace import Pace, epoch_seconds, pace
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.source import check_source
from lightning_stocache.loading.split import split
from lightning_stocache.node.budget import format_bytes

__all__ = ["measure"]

_LARGE = 256 * 2**20  # bytes of the cache that hits are measured in: more than the processor's caches hold
_ROUNDS = 3


def measure(
    source: Dataset[Any],
    loading: Loading,
    room: int,
    transform: Callable[[Any], Any] | None = None,
    *,
    allow_random: bool = False,
    seconds: float = 3.0,
) -> Costs:
    """Measure what a sample of this source costs.

    Args:
        source: the user's dataset.
        loading: how it is loaded.
        room: bytes that a cache for the measurement may take for a moment.
        transform: per sample, after the cache.
        allow_random: whether a random source is cached as it is.
        seconds: what the rounds of each measurement may take together; where a batch of a slow source takes longer,
            smaller ones are loaded, three per worker in each round.

    Raises:
        PlanError: the source is empty, iterable-style or raises, or there is no memory for a few samples.

    Example:
        >>> squares = [torch.tensor([i, i * i]) for i in range(64)]
        >>> costs = measure(squares, Loading(batch_size=8), room=2**20, seconds=0.01)
        >>> costs.spec.nbytes, costs.hit.low > 0
        (16, True)
    """
    try:
        check_source(source, CachedDataset)
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from error
    name = type(source).__name__
    try:
        tail, reason, inner, spec = None, None, source, None
        if not allow_random:
            parts = split(source)
            inner, tail, reason = parts.source, parts.tail, parts.reason
        try:
            spec = None if reason else SampleSpec.infer(inner[0])
        except UnsupportedSampleError as error:
            reason = str(error)
        return _Trial(inner, _after(tail, transform), loading, seconds, spec, reason).costs(room)
    except PlanError:
        raise
    except Exception as error:  # code of the user's, here or in a worker: it may raise anything
        clear_frames(error.__traceback__)  # they hold the loader's iterator, and that its workers
        raise PlanError(f"a sample of {name} cannot be had: {_words(error)}") from error


class _Trial:
    """The measurements, on shuffled indices: each takes others as long as there are enough."""

    def __init__(
        self,
        source: Dataset[Any],
        transform: Callable[[Any], Any] | None,
        loading: Loading,
        seconds: float,
        spec: SampleSpec | None,
        reason: str | None,
    ) -> None:
        self.source, self.transform, self.loading, self.seconds = source, transform, loading, seconds / _ROUNDS
        self.spec, self.reason = spec, reason
        self.length = len(cast(Sized, source))
        generator = torch.Generator().manual_seed(0)
        self.order: list[int] = torch.randperm(self.length, generator=generator).tolist()

    def costs(self, room: int) -> Costs:
        first, samples, fetched = self._first_reads()
        transform = self._transformed(samples)
        indices, spec = self.order[: len(samples)], self.spec
        again, uncached, missed, hit = list[tuple[float, float]](), list[Pace](), list[Pace](), list[float]()
        dataset = self._filled(samples, room)
        full = self.loading.whole(dataset) if spec else None
        try:
            for _ in range(_ROUNDS):
                again.append(self._read(indices))
                uncached.append(self._watch(0, first))
                missed.append(self._watch(min(self.length * spec.slot_bytes, room), first) if spec else uncached[-1])
                hit.append(epoch_seconds(full, self.seconds) / len(dataset) if full else uncached[-1].batch)
        finally:
            if full is not None:
                full.close()
            dataset.close()
        repeated, cpu = (Spread.of(values) for values in zip(*again, strict=True))
        return Costs(
            spec,
            Reads(first, repeated, cpu.median, fetched),
            transform,
            Spread.of(pace.batch for pace in uncached),
            Spread.of(pace.batch for pace in missed),
            Spread.of(hit),
            statistics.median(pace.start for pace in missed),
            self.transform is not None and self.loading.num_workers > 0,
            self.reason,
        )

    def _first_reads(self) -> tuple[float, list[Any], float | None]:
        """Read a few samples one by one: at least two, at most two batches. Seconds and bytes from disk per sample."""
        begin, disk, samples = time.perf_counter(), _from_disk(), list[Any]()
        for index in self.order[: 2 * self.loading.batch_size]:
            samples.append(self.source[index])
            if len(samples) > 1 and time.perf_counter() - begin > self.seconds:
                break
        seconds, disk_after = time.perf_counter() - begin, _from_disk()
        fetched = None if disk is None or disk_after is None else (disk_after - disk) / len(samples)
        return seconds / len(samples), samples, fetched

    def _read(self, indices: list[int]) -> tuple[float, float]:
        """Read samples again: seconds, and seconds of the processor, per sample."""
        begin, cpu = time.perf_counter(), time.process_time()
        for index in indices:
            self.source[index]
        return (time.perf_counter() - begin) / len(indices), (time.process_time() - cpu) / len(indices)

    def _transformed(self, samples: list[Any]) -> float:
        if self.transform is None:
            return 0.0
        copies = copy.deepcopy(samples)  # it may work in place
        begin = time.perf_counter()
        for sample in copies:
            self.transform(sample)
        return (time.perf_counter() - begin) / len(copies)

    def _watch(self, budget: int, read: float) -> Pace:
        """The loader over indices that were not read before, where there are enough; a read takes so many seconds."""
        size = min(self.loading.batch_size, self.length // (3 * max(self.loading.num_workers, 1)))
        size = max(min(size, int(self.seconds / read)), 1)
        moved = self.length // (2 * _ROUNDS + 1)
        self.order = self.order[moved:] + self.order[:moved]
        batches = [self.order[begin : begin + size] for begin in range(0, self.length - size + 1, size)]
        dataset = CachedDataset(self.source, budget, spec=self.spec, transform=self.transform, on_error="disable")
        loader = self.loading.few(dataset, batches)
        try:
            batch, start = pace(loader, self.seconds)
        finally:
            loader.close()
            dataset.close()
        return Pace(batch / size, start)

    def _filled(self, samples: list[Any], room: int) -> CachedDataset:
        """A dataset of which all is cached; nothing, if these samples cannot be."""
        if self.spec is None:
            return CachedDataset(_Repeated(samples, 1), 0)
        if room < self.spec.slot_bytes:
            raise PlanError(
                f"there is no memory for one sample of {format_bytes(self.spec.slot_bytes)}: {format_bytes(room)} may "
                "safely be taken here; what limits it: python -m lightning_stocache doctor"
            )
        wanted = min(self.length, max(self.loading.batch_size, _LARGE // self.spec.slot_bytes))
        length = min(wanted, room // self.spec.slot_bytes)
        dataset = CachedDataset(
            _Repeated(samples, length), length * self.spec.slot_bytes, spec=self.spec, transform=self.transform
        )
        assert dataset.cache is not None
        for index in range(length):
            dataset.cache.fill(index, samples[index % len(samples)])
        return dataset


class _Repeated(Dataset[Any]):
    """A few samples over and over."""

    def __init__(self, samples: Sequence[Any], length: int) -> None:
        self.samples, self.length = samples, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return copy.deepcopy(self.samples[index % len(self.samples)])


def _after(tail: Callable[[Any], Any] | None, transform: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """What comes after the cache, as one function."""
    return _Both(tail, transform) if tail is not None and transform is not None else tail or transform


@dataclass(frozen=True)
class _Both:
    """One function after the other; a class, because workers may have to be sent it."""

    tail: Callable[[Any], Any]
    transform: Callable[[Any], Any]

    def __call__(self, sample: Any) -> Any:
        return self.transform(self.tail(sample))


def _from_disk() -> int | None:
    """Bytes that this process has caused to be fetched from a disk; None where the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def _words(error: Exception) -> str:
    """An exception in one line; of one that came from a worker the last, which has the original's words."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[-1] if "Traceback" in str(error) else f"{type(error).__name__}: {lines[0]}"
    return text.strip()
