"""What `plan` measures of the training data: the source by itself, and the loader uncached, missing and hitting.

The source is read in this process, each sample several times: the first read may come from the disk (the kernel says
how many bytes did), later ones come from the page cache. What the loader makes of it, with its workers, its transport
and its cores, is not put together from parts but watched: the user's kind of loader runs over a few batches uncached;
over a few with every sample a miss that is stored; and over whole epochs of hits, in a real cache as long as the
dataset if that is small, else too large for the processor's caches. All of this is done in turn, and then again: what
differs from round to round is the noise of the machine, and each cost is the spread of all rounds.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import Any, cast

import torch
from torch.utils.data import Dataset, Subset

from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.cache.field import UnsupportedSampleError
from lightning_stocache.cache.spec import SampleMismatchError, SampleSpec
from lightning_stocache.insight.planner import Costs, Job, PlanError, Reads, Spread
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import grant, loader_reserve
from lightning_stocache.sampling.locality_sampler import LocalitySampler, Mode
from lightning_stocache.setup.codec_choice import choose_codec
from lightning_stocache.setup.form_choice import EncodedForm, look_at_files
from lightning_stocache.source.access import check_source
from lightning_stocache.source.random_split import split

__all__ = ["Data", "Trial", "measure", "reading"]

_LARGE = 256 * 2**20  # bytes of the cache that hits are measured in: more than the processor's caches hold
_ROUNDS = 3
_QUICK = 28  # samples that are looked at besides the first four, where that is quick


@dataclass(frozen=True)
class Data:
    """The training data, and how one rank loads it."""

    source: Dataset[Any]
    batch_size: int
    num_workers: int = 0
    transform: Callable[[Any], Any] | None = None  # per sample, after the cache
    shuffle: bool = True
    persistent: bool = True  # the workers live on from epoch to epoch
    settings: Mapping[str, Any] = field(default_factory=dict)  # further arguments of DataLoader
    others: Sequence[Dataset[Any]] = ()  # what draws on the same budget (validation); one sample of each is read
    allow_random: bool = False  # a random source is cached as it is
    mode: Mode = "locality"  # how samples are dealt to nodes

    def safe_bytes(self, sample_bytes: int, ranks: int) -> int:
        """What a cache of any size may take here, in /dev/shm or in a memfd, beside the batches of so many ranks."""
        places = (memory_directory(), None) if hasattr(os, "memfd_create") else (memory_directory(),)
        frees = [FreeMemory.measure(place) for place in places]
        factor = self.settings.get("prefetch_factor")
        reserve = loader_reserve(self.batch_size * sample_bytes, self.num_workers, factor, ranks, own=frees[0].own)
        return max(grant(Budget.parse("auto"), 2**62, free, reserve, ranks).bytes for free in frees)


def measure(data: Data, *, nodes: int = 1, ranks: int = 1, epochs: int = 10, seconds: float = 3.0) -> tuple[Job, Costs]:
    """Measure what a `Planner` needs for training on a dataset, with this machine as one of the nodes.

    A measurement takes so many seconds; where a batch of a slow source takes longer, smaller ones are loaded.

    Raises:
        PlanError: a dataset is empty, iterable-style or raises, or there is no memory for a sample.

    Example:
        >>> job, costs = measure(Data([torch.zeros(100)] * 64, batch_size=8), nodes=2, seconds=0.01)
        >>> job.samples, job.rank_samples, costs.spec.nbytes, costs.hit.low > 0
        (64, 32.0, 400, True)
    """
    try:
        check_source(data.source, CachedDataset)
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from error
    with reading(f"a sample of {type(data.source).__name__}"):
        trial = Trial(data, seconds / _ROUNDS)
        costs = trial.costs(safe_bytes := data.safe_bytes(trial.spec.nbytes if trial.spec is not None else 0, ranks))
    samples, others = len(cast(Sized, data.source)), sum(map(_cached_bytes, data.others))
    loading = (samples, data.batch_size, data.num_workers, nodes, ranks, epochs, data.mode)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    hot = 0 < (costs.reads.from_disk or 0) * samples < FreeMemory.measure(None).bytes
    return Job(*loading, others, safe_bytes, cores, data.persistent, torch.get_num_threads(), hot), costs


class Trial:
    """The measurements, on shuffled indices: each takes others as long as there are enough.

    Args:
        data: what is loaded, and how.
        seconds: of one measurement.
    """

    def __init__(self, data: Data, seconds: float) -> None:
        self.data, self.seconds, self.source, self.transform = data, seconds, data.source, data.transform
        self.spec: SampleCodec | None = None
        self.reason: str | None = None
        self.encoded: EncodedForm | None = None
        indices: tuple[int, ...] = (0,)
        samples, cut = (data.source[0],) if data.allow_random else (), None
        if not data.allow_random:
            parts = split(data.source, quick=_QUICK)
            self.source, self.reason, cut = parts.source, parts.reason, parts.cut
            indices, samples = parts.indices, parts.samples
            if (tail := parts.tail) is not None:
                self.transform = tail if data.transform is None else partial(_both, tail, data.transform)
            files = look_at_files(data.source, parts.source, indices, lambda index: None)
            self.encoded = None if isinstance(files, str) else files
        try:
            self.spec = choose_codec(indices, samples, cut=cut).codec if self.reason is None else None
        except (UnsupportedSampleError, SampleMismatchError) as error:
            self.reason = str(error)
        length, generator = len(cast(Sized, data.source)), torch.Generator().manual_seed(0)
        self.order: list[int] = torch.randperm(length, generator=generator).tolist()

    def costs(self, room: int) -> Costs:
        """All costs; for a moment, a cache takes as many bytes as there is room for."""
        indices, disk = self.order[: 2 * self.data.batch_size], _from_disk()
        samples, first = self.read()
        from_disk = None if disk is None else ((_from_disk() or disk) - disk) / len(samples)
        transform = _calls(self.transform, copy.deepcopy(samples))[1] if self.transform is not None else 0.0
        again, uncached, missed, hit = [], [], [], []
        full = None if self.spec is None else self._loader(self.full(samples, self.spec.slot_bytes, room))
        try:
            for _ in range(_ROUNDS):
                again.append(_calls(self.source.__getitem__, indices[: len(samples)])[1:])
                uncached.append(self._pace(0, first))
                missed.append(uncached[-1] if full is None else self._pace(room, first))
                hit.append(uncached[-1][0] if full is None else _epoch_seconds(full, self.seconds))
        finally:
            if full is not None:
                full.close()
                cast(CachedDataset, full.dataset).close()
        repeated, cpu = (Spread.of(values) for values in zip(*again, strict=True))
        return Costs(
            self.spec,
            Reads(first, repeated, cpu.median, from_disk),
            transform,
            Spread.of(seconds for seconds, _ in uncached),
            Spread.of(seconds for seconds, _ in missed),
            Spread.of(hit),
            statistics.median(start for _, start in missed),
            (self.transform is not None or not isinstance(self.spec, SampleSpec)) and self.data.num_workers > 0,
            self.reason,
            self.encoded,
        )

    def _pace(self, budget: int, read: float) -> tuple[float, float]:
        """Load samples that were not read before, where there are enough: seconds per sample, and until workers began.

        With workers a loader delivers in waves of one batch per worker. Only whole waves after the first are counted,
        one at least; what the first took longer is what it costs to start the workers.
        """
        workers, wave, length = self.data.num_workers, max(self.data.num_workers, 1), len(self.order)
        size = max(min(self.data.batch_size, length // (3 * wave), int(self.seconds / read)), 1)
        moved = length // (2 * _ROUNDS + 1)
        self.order = self.order[moved:] + self.order[:moved]
        batches = [self.order[begin : begin + size] for begin in range(0, length - size + 1, size)]
        dataset = CachedDataset(self.source, budget, spec=self.spec, transform=self.transform)
        loader = CachedLoader(dataset, batch_sampler=batches, num_workers=workers, **self.data.settings)
        begin, ends = time.perf_counter(), list[float]()
        try:
            for _ in loader:
                ends.append(time.perf_counter() - begin)
                if len(ends) % wave == 0 and len(ends) > 2 * wave and ends[-1] > self.seconds:
                    break
        finally:
            loader.close()
            dataset.close()
        first, *later = ends[wave - 1 :: wave] or ends[-1:]
        if not later:
            return ends[-1] / len(ends) / size, 0.0
        seconds = (later[-1] - first) / len(later)
        return seconds / wave / size, max(first - seconds, 0.0) if workers else 0.0

    def read(self) -> tuple[list[Any], float]:
        """A few samples, and the seconds that each took."""
        samples, seconds, _ = _calls(self.source.__getitem__, self.order[: 2 * self.data.batch_size], self.seconds)
        return samples, seconds

    def full(self, samples: list[Any], slot_bytes: int, room: int) -> CachedDataset:
        """These samples, over and over, all of them in a cache."""
        if room < slot_bytes:
            raise PlanError(
                f"there is no memory for one sample of {format_bytes(slot_bytes)}: {format_bytes(room)} may safely be "
                "taken here; what limits it: python -m lightning_stocache doctor"
            )
        length = min(len(self.order), max(self.data.batch_size, _LARGE // slot_bytes), room // slot_bytes)
        repeated = Subset(cast(Any, samples), [number % len(samples) for number in range(length)])
        dataset = CachedDataset(repeated, spec=self.spec, transform=self.transform)
        assert dataset.cache is not None
        for index in range(length):
            dataset.cache.fill(index, repeated[index])
        return dataset

    def _loader(self, dataset: CachedDataset) -> CachedLoader:
        data = self.data
        size, more = data.batch_size, {**data.settings, "persistent_workers": data.num_workers > 0}
        sampler = LocalitySampler(dataset, 1, 0, data.shuffle, batch_size=size, ring=None, nodes=((0,),))
        return CachedLoader(dataset, size, sampler=sampler, num_workers=data.num_workers, **more)


def _both(tail: Callable[[Any], Any], transform: Callable[[Any], Any], sample: Any) -> Any:
    return transform(tail(sample))


def _calls(call: Callable[[Any], Any], items: list[Any], limit: float = 1e9) -> tuple[list[Any], float, float]:
    """What a function gives, and takes per call in seconds and in those of the processor; for two items at least."""
    begin, cpu, results = time.perf_counter(), time.process_time(), list[Any]()
    for item in items:
        results.append(call(item))
        if len(results) > 1 and time.perf_counter() - begin > limit:
            break
    return results, (time.perf_counter() - begin) / len(results), (time.process_time() - cpu) / len(results)


def _epoch_seconds(loader: CachedLoader, limit: float) -> float:
    """Seconds per sample of whole epochs, by their median: one to warm up, and more until so many seconds are over."""
    epochs, end = list[float](), time.perf_counter() + limit
    while len(epochs) < 2 or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in loader:
            pass
        epochs.append(time.perf_counter() - begin)
    return statistics.median(epochs[1:]) / len(cast(Sized, loader.dataset))


def _cached_bytes(source: Dataset[Any]) -> int:
    """What a whole dataset takes in the cache; 0 if it is empty, iterable-style or of samples that cannot be cached."""
    try:
        check_source(source, CachedDataset)
        with reading(f"sample 0 of {type(source).__name__}"):
            sample = source[0]
        return len(cast(Sized, source)) * choose_codec([0], [sample]).codec.slot_bytes
    except (TypeError, ValueError):
        return 0


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Make one sentence of whatever a dataset raises, here or in a worker.

    Raises:
        PlanError: with that sentence.
    """
    try:
        yield
    except PlanError:
        raise
    except Exception as error:  # code of the user's may raise anything
        clear_frames(error.__traceback__)  # they hold the loader's iterator, and that its workers
        lines = str(error).strip().splitlines() or [""]  # of a worker's error the last has the words of the original
        words = lines[-1].strip() if "Traceback" in str(error) else f"{type(error).__name__}: {lines[0]}"
        raise PlanError(f"{what} cannot be had: {words}") from error


def _from_disk() -> int | None:
    """Bytes that this process has caused to be fetched from a disk; None where the system does not say."""
    try:
        return int(Path("/proc/self/io").read_text().partition("\nread_bytes:")[2].split()[0])
    except (OSError, IndexError):
        return None
