"""The measurements of `plan`: a loader's seconds per sample, plain, storing and from the cache.

The user's kind of loader runs over a few batches without a cache, over a few in which every sample is a miss that is
stored, and over hits in a full cache. The three take turns in three rounds, which differ by the noise of the machine. A
loader delivers in waves of one batch per worker, and counting starts after the first wave. Samples are drawn at random:
the page cache holds the files of an earlier round, but of a large dataset hardly any is drawn again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import clear_frames
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

import torch
from torch.utils.data import Dataset, RandomSampler, Subset

from lightning_stocache.cache.codec import Codec
from lightning_stocache.loading.dataset import CachedDataset, cached_source, dataset_over
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.errors import text_of
from lightning_stocache.setup.allocation import largest_grant
from lightning_stocache.setup.find import SourceReader, parts_of
from lightning_stocache.setup.request import CacheRequest, LoaderSettings
from lightning_stocache.source.access import check_source
from lightning_stocache.source.transform_split import Tail
from lightning_stocache.source.transforms import reading

__all__ = [
    "Arm",
    "Curves",
    "Data",
    "Kind",
    "Paces",
    "PlanError",
    "Spread",
    "Steps",
    "Swept",
    "endless_loader",
    "measure",
    "measure_curves",
]

Kind: TypeAlias = Literal["plain", "stored", "hit"]
Swept: TypeAlias = Literal["num_workers", "batch_size", "pin_memory"]
_LARGE = 256 * 2**20  # bytes of the full cache that hits are measured in: larger than the processor's caches
_ROUNDS = 3
_ENDLESS = 2**40  # samples of a loader that runs until enough was measured
_READING = 1.0  # seconds in which samples are read to find out their pace; at least one sample is read


class PlanError(Exception):
    """A plan is impossible. The message says why, in one sentence."""


class Spread(NamedTuple):
    """Several measurements of one quantity."""

    low: float
    median: float
    high: float
    deviation: float = 0.0

    @classmethod
    def across(cls, values: Sequence[float]) -> Self:
        """The spread of these measurements. The standard deviation of a single one is 0."""
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(min(values), statistics.median(values), max(values), deviation)


@dataclass(frozen=True)
class Data:
    """The training data, how each rank loads it, and the ranks of the job. All nodes are alike."""

    source: Dataset[Any]
    batch_size: int  # of one rank
    num_workers: int = 0  # of one rank
    transform: Callable[[Any], Any] | None = None  # per sample, after the cache
    settings: Mapping[str, Any] = field(default_factory=dict)  # further arguments of DataLoader
    freeze_random: bool = False  # a random source is cached as it is
    nodes: int = 1
    ranks: int = 1  # on each node

    @property
    def samples(self) -> int:
        """The number of samples in the source."""
        return len(cast(Sized, self.source))

    def arm(self, kind: Kind, batch_size: int | None = None) -> Arm:
        """The data's own loader."""
        pins = bool(self.settings.get("pin_memory", False))
        return Arm(kind, self.batch_size if batch_size is None else batch_size, self.num_workers, pins)

    @property
    def reader(self) -> LoaderSettings:
        """The loader of one rank."""
        return LoaderSettings(self.batch_size, self.num_workers, self.settings.get("prefetch_factor"))

    def safe_bytes(self, codec: Codec | None) -> int:
        """The largest safe cache on this node, beside the batches of all its ranks."""
        return largest_grant(codec, self.reader, self.ranks)[0]


@dataclass(frozen=True)
class Paces:
    """Seconds per sample of one rank's loader, and the sizes that a plan needs."""

    plain: Spread  # without a cache
    stored: Spread  # every sample is loaded and stored
    hit: Spread  # every sample comes from the cache
    codec: Codec | None  # how a sample lies in the cache; None if it cannot be cached
    reason: str | None = None  # why it cannot be cached
    safe_bytes: int = 0  # the largest safe cache on this node
    threads: int = 1  # of torch in this process


@dataclass(frozen=True)
class Steps:
    """Seconds a batch of a real training, with all of the Trainer's work around its steps."""

    alone: Spread  # the batch is in memory
    uncached: Spread  # the batch comes from a plain loader
    start: float = 0.0  # from the start of that loader to its first batch


class Arm(NamedTuple):
    """One of the loaders whose paces are compared."""

    kind: Kind
    batch_size: int
    num_workers: int
    pin_memory: bool


@dataclass(frozen=True)
class Curves:
    """Samples per second of loaders that differ in one argument from the data's own."""

    data: Data
    rates: Mapping[Arm, Spread]  # in rising order of their arguments
    left_out: Sequence[str]  # what was not measured and why, in sentences

    def over(self, name: Swept, kind: Kind) -> list[tuple[int, Spread]]:
        """The curve over one argument, where the others are the data's own."""
        own = self.data.arm(kind)
        return [
            (getattr(arm, name), rates)
            for arm, rates in self.rates.items()
            if arm._replace(**{name: getattr(own, name)}) == own
        ]


def measure(data: Data, *, seconds: float = 3.0) -> Paces:
    """Measure the three paces.

    Args:
        data: the training data, and how one rank loads it.
        seconds: about the time that each pace may take. A slow source is read in smaller batches.

    Raises:
        PlanError: a dataset is empty, iterable-style or raises, or there is no memory for a sample.
    """
    with _trial(data) as trial:
        kinds: tuple[Kind, ...] = ("plain",) if trial.full is None else ("plain", "stored", "hit")
        quick = int(seconds / _ROUNDS / max(trial.read_seconds, 1e-9))
        few = max(min(data.batch_size, quick, data.samples // (3 * max(data.num_workers, 1))), 1)
        arms = [data.arm(kind, None if kind == "hit" else few) for kind in kinds]
        found: dict[Arm, list[float]] = {arm: [] for arm in arms}
        for arm in arms * _ROUNDS:
            found[arm].append(trial.pace(arm, seconds / _ROUNDS))
    plain, *cached = map(Spread.across, found.values())
    stored, hit = cached or (plain, plain)
    return Paces(plain, stored, hit, trial.codec, trial.reason, trial.safe_bytes, torch.get_num_threads())


def measure_curves(
    data: Data,
    workers: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    pin_memory: Sequence[bool] = (),
    *,
    seconds: float = 60.0,
    limit: float = 120.0,
    progress: Callable[[str], object] = lambda words: None,
) -> Curves:
    """Measure loading over the number of workers, the batch size and `pin_memory`; the others are the data's own.

    Args:
        data: the training data, and how one rank loads it.
        workers: numbers of workers; 0 loads in this process.
        batch_sizes: in samples.
        pin_memory: whether batches are copied to page-locked memory.
        seconds: about the time of all measurements together.
        limit: seconds after which no measurement begins.
        progress: called with a line about each measurement when it is done.

    Raises:
        PlanError: the dataset raises, or there is no memory for a sample.
    """
    own = data.arm("plain")
    loaders = {own._replace(num_workers=number) for number in workers}
    loaders |= {own._replace(batch_size=size) for size in batch_sizes}
    loaders |= {own._replace(pin_memory=pins) for pins in pin_memory}
    rates: dict[Arm, list[float]] = {}
    with _trial(data) as trial:
        left_out = [] if trial.full is not None else [f"Nothing can be cached: {trial.reason}"]
        for arm in sorted(loaders):
            rates[arm] = []
            if trial.full is not None:
                rates[arm._replace(kind="hit")] = []
        begin, count = time.perf_counter(), _ROUNDS * len(rates)
        for done, arm in enumerate([*rates] * _ROUNDS):
            if (spent := time.perf_counter() - begin) > limit:
                left_out.append(f"{spent:.0f} s were over after {done} of {count} measurements.")
                break
            rate = 1 / trial.pace(arm, seconds / count)
            rates[arm].append(rate)
            whence = "cache" if arm.kind == "hit" else "source"
            loader = f"num_workers={arm.num_workers}, batch_size={arm.batch_size}, pin_memory={arm.pin_memory}"
            progress(f"{done + 1} of {count}: {loader}, batches from the {whence}: {rate:,.0f} samples/s")
    return Curves(data, {arm: Spread.across(values) for arm, values in rates.items() if values}, left_out)


def endless_loader(data: Data, dataset: CachedDataset, arm: Arm) -> CachedLoader:
    """A loader with the data's settings over a dataset, on shuffled indices. Only the "stored" arm ends."""
    of_workers = () if arm.num_workers else ("multiprocessing_context", "prefetch_factor", "timeout")
    settings = {name: value for name, value in data.settings.items() if name not in of_workers}
    settings |= {"batch_size": arm.batch_size, "num_workers": arm.num_workers, "pin_memory": arm.pin_memory}
    sampler: RandomSampler = RandomSampler(dataset)
    if arm.kind != "stored":
        sampler = RandomSampler(dataset, replacement=True, num_samples=_ENDLESS)
    return CachedLoader(dataset, sampler=sampler, drop_last=True, **settings)


class Trial:
    """Loaders over the source and over a full cache, on shuffled indices.

    Args:
        data: the training data, and how one rank loads it.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        request = CacheRequest(data.source, freeze_random=data.freeze_random, reader=data.reader)
        with closing(SourceReader(request)) as reader:
            found = reader.look()
        self.codec, self.reason = found.codec, found.reason
        self.head, self.tail = parts_of(data.source, found)
        indices = torch.randperm(data.samples)[: 2 * data.batch_size].tolist()
        samples = list[Any]()
        begin = time.perf_counter()
        with reading(getattr(self.tail, "heads", ())):
            for index in indices:
                samples.append(self.head[index])
                if time.perf_counter() - begin > _READING:
                    break
        self.read_seconds = (time.perf_counter() - begin) / len(samples)
        self.safe_bytes = data.safe_bytes(self.codec)
        self.full = None if self.codec is None else self._full(indices, samples, self.codec.slot_bytes)

    def pace(self, arm: Arm, seconds: float) -> float:
        """Run a loader for some seconds, and for two waves at least. Returns seconds per sample after the first wave.

        The "stored" arm ends with the dataset, because its samples would be hits in a second pass.
        """
        if arm.kind == "hit":
            dataset = cast(CachedDataset, self.full)
        elif arm.kind == "stored":
            dataset = self._finishing(
                CachedDataset(self.head, self.safe_bytes, spec=self.codec), self.tail, self.data.source
            )
        else:
            dataset = CachedDataset(self.data.source, 0, transform=self.data.transform)
        loader = endless_loader(self.data, dataset, arm)
        wave = max(arm.num_workers, 1)
        ends = list[float]()
        begin = time.perf_counter()
        try:
            for _ in loader:
                ends.append(time.perf_counter() - begin)
                if len(ends) % wave == 0 and len(ends) > wave and ends[-1] - ends[wave - 1] > seconds:
                    break
        finally:
            loader.close()
            if dataset is not self.full:
                dataset.close()
        waves = ends[wave - 1 :: wave]
        if len(waves) < 2:
            return ends[-1] / len(ends) / arm.batch_size
        return (waves[-1] - waves[0]) / (len(waves) - 1) / wave / arm.batch_size

    def _full(self, indices: Sequence[int], samples: Sequence[Any], slot_bytes: int) -> CachedDataset:
        """A full cache of these samples, repeated up to the length of the dataset or up to `_LARGE` bytes."""
        if self.safe_bytes < slot_bytes:
            raise PlanError(
                f"there is no memory for one sample of {format_bytes(slot_bytes)}: {format_bytes(self.safe_bytes)} may "
                "safely be taken here; what limits it: stocache doctor"
            )
        length = min(self.data.samples, max(self.data.batch_size, _LARGE // slot_bytes), self.safe_bytes // slot_bytes)
        repeated = Subset(cast(Any, samples), [number % len(samples) for number in range(length)])
        dataset = CachedDataset(repeated, spec=self.codec)
        for number in range(length):
            cast(Any, dataset.cache).fill(number, repeated[number])
        tail = None if self.tail is None else partial(_finished, self.tail, indices[: len(samples)])
        return self._finishing(dataset, tail, repeated)

    def _finishing(self, dataset: CachedDataset, tail: Callable[[Any, int], Any] | None, whole: Any) -> CachedDataset:
        """A dataset whose samples are finished by a tail and by the data's transform.

        Args:
            dataset: the dataset of unfinished samples.
            tail: the random part of the source, or the decoder of its files; None if the samples need neither.
            whole: the source with both parts.
        """
        opened = cached_source(dataset).opened
        opened = replace(opened, request=replace(opened.request, source=whole), tail=tail)
        return dataset_over(CachedSource(opened, self.data.transform))


@contextmanager
def _trial(data: Data) -> Iterator[Trial]:
    """A trial, whose cache is closed at the end. An error of the dataset, here or in a worker, becomes one sentence.

    Raises:
        PlanError: the dataset is empty, iterable-style or raises, or there is no memory for a sample.
    """
    source = data.source
    try:
        check_source(source, CachedDataset)
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from error
    try:
        trial = Trial(data)
        try:
            yield trial
        finally:
            if trial.full is not None:
                trial.full.close()
    except PlanError:
        raise
    except Exception as error:  # the user's code may raise anything
        clear_frames(error.__traceback__)  # the frames hold the loader's iterator, which holds its workers
        text = text_of(error)
        lines = text.strip().splitlines() or [""]  # the last line of a worker's error is the original message
        words = lines[-1].strip() if "Traceback" in text else f"{type(error).__name__}: {lines[0]}"
        raise PlanError(f"a sample of {type(source).__name__} cannot be loaded: {words}") from error


def _finished(tail: Tail, indices: Sequence[int], sample: Any, number: int) -> Any:
    """Finish a repeated sample with the index from which it was read."""
    return tail(sample, indices[number % len(indices)])
