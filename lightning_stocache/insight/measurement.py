"""The measurements of `plan`: seconds a sample that the loader takes uncached, with misses and with hits.

The user's kind of loader runs over a few batches without a cache, over a few in which every sample is a miss that is
stored, and over hits in a full cache. They take turns in three rounds; the differences between rounds are the noise of
the machine. A loader delivers in waves of one batch per worker; what counts begins after the first wave. Samples are
new in each round as long as there are enough, so that no round finds in the page cache what another has read.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from traceback import clear_frames
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

import torch
from torch.utils.data import Dataset, Subset

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.records import SampleCodec
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.sampling.locality_sampler import Mode
from lightning_stocache.setup.allocation import largest_grant
from lightning_stocache.setup.forms import choose_codec
from lightning_stocache.setup.request import LoaderSettings
from lightning_stocache.source.access import check_source
from lightning_stocache.source.random_split import split

__all__ = ["Curves", "Data", "Paces", "PlanError", "Spread", "Trial", "cached_bytes", "measure", "measure_curves"]

Kind: TypeAlias = Literal["uncached", "missed", "hit"]
_LARGE = 256 * 2**20  # bytes of the cache that hits are measured in: more than the processor's caches hold
_ROUNDS = 3
_READING = 1.0  # seconds in which samples are read, at least one
_QUICK = 28  # samples that are looked at besides the first four, where that is quick


class PlanError(Exception):
    """Nothing can be planned, and the message says why in one sentence."""


class Spread(NamedTuple):
    """Several measurements of one quantity."""

    low: float
    median: float
    high: float
    deviation: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of these measurements; of a single one the standard deviation is 0."""
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(min(values), statistics.median(values), max(values), deviation)


@dataclass(frozen=True)
class Data:
    """The training data, and how one rank loads it."""

    source: Dataset[Any]
    batch_size: int
    num_workers: int = 0
    transform: Callable[[Any], Any] | None = None  # per sample, after the cache
    settings: Mapping[str, Any] = field(default_factory=dict)  # further arguments of DataLoader
    others: Sequence[Dataset[Any]] = ()  # what shares the budget (validation); one sample of each is read
    allow_random: bool = False  # a random source is cached as it is
    mode: Mode = "locality"  # how samples are dealt to nodes

    def safe_bytes(self, codec: SampleCodec | None, ranks: int) -> int:
        """The largest safe cache here, beside the batches of so many ranks."""
        reader = LoaderSettings(self.batch_size, self.num_workers, self.settings.get("prefetch_factor"))
        return largest_grant(codec, reader, ranks)[0]


@dataclass(frozen=True)
class Paces:
    """Seconds a sample that the loader of one rank takes."""

    uncached: Spread  # without a cache
    missed: Spread  # every sample is loaded and stored
    hit: Spread  # every sample comes from the cache
    codec: SampleCodec | None  # how a sample lies in the cache; None if it cannot be cached
    reason: str | None = None  # why it cannot be cached


@dataclass(frozen=True)
class Curves:
    """Samples per second over `num_workers` and over `batch_size`, each from the "source" and from the "cache"."""

    lines: Mapping[str, Mapping[str, Sequence[tuple[int, Spread]]]]
    left_out: Sequence[str]  # what was not measured and why, in sentences


def measure(data: Data, *, ranks: int = 1, seconds: float = 3.0) -> Paces:
    """Measure the three paces.

    Args:
        data: the training data, and how one rank loads it.
        ranks: of this node, beside whose batches the cache must fit.
        seconds: that each pace may take, about; of a slow source smaller batches are loaded.

    Raises:
        PlanError: a dataset is empty, iterable-style or raises, or there is no memory for a sample.
    """
    with Trial.of(data, ranks) as trial:
        kinds: tuple[Kind, ...] = ("uncached",) if trial.full is None else ("uncached", "missed", "hit")
        found: dict[Kind, list[float]] = {kind: [] for kind in kinds}
        quick = int(seconds / _ROUNDS / max(trial.read_seconds, 1e-9))
        few = max(min(data.batch_size, quick, len(trial.order) // (3 * max(data.num_workers, 1))), 1)
        for _, kind in itertools.product(range(_ROUNDS), kinds):
            size = data.batch_size if kind == "hit" else few
            found[kind].append(trial.pace(kind, size, data.num_workers, seconds / _ROUNDS))
        uncached, *cached = map(Spread.of, found.values())
        missed, hit = cached or (uncached, uncached)
        return Paces(uncached, missed, hit, trial.codec, trial.reason)


def measure_curves(
    data: Data,
    workers: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    *,
    seconds: float = 60.0,
    limit: float = 120.0,
    progress: Callable[[str], object] = lambda words: None,
) -> Curves:
    """Measure loading over the number of workers, and over the batch size; the other of both is the data's own.

    Args:
        data: the training data, and how one rank loads it.
        workers: numbers of workers, 0 among them for loading in this process.
        batch_sizes: in samples.
        seconds: of all measurements together, about.
        limit: seconds after which no measurement begins; batches that take longer than a 16th of it are left out.
        progress: is told of each measurement when it is done.

    Raises:
        PlanError: the dataset raises, or there is no memory for a sample.
    """
    lines = {
        "num_workers": [(number, data.batch_size, number) for number in sorted(set(workers))],
        "batch_size": [(size, size, data.num_workers) for size in sorted(set(batch_sizes))],
    }
    rates = dict[tuple[int, int, str], list[float]]()
    with Trial.of(data) as trial:
        left_out = [] if trial.full is not None else [f"Nothing can be cached: {trial.reason}"]
        for size, number in sorted({arm[1:] for line in lines.values() for arm in line}):
            if (took := trial.read_seconds * size) > limit / 16:
                left_out.append(f"Batches of {size} from the source take {took:.0f} s each: left out.")
            else:
                rates[size, number, "source"] = []
            if trial.full is not None:
                rates[size, number, "cache"] = []
        begin, count = time.perf_counter(), _ROUNDS * len(rates)
        for done, (size, number, whence) in enumerate([*rates] * _ROUNDS):
            if (spent := time.perf_counter() - begin) > limit:
                left_out.append(f"{spent:.0f} s were over after {done} of {count} measurements.")
                break
            rate = 1 / trial.pace("hit" if whence == "cache" else "uncached", size, number, seconds / count)
            rates[size, number, whence].append(rate)
            arm = f"num_workers={number}, batch_size={size}, batches from the {whence}"
            progress(f"{done + 1} of {count}: {arm}: {rate:,.0f} samples/s")
    measured: dict[str, dict[str, list[tuple[int, Spread]]]] = {name: {} for name in lines}
    for name, whence in itertools.product(lines, ("source", "cache")):
        found = [(x, rates.get((size, number, whence))) for x, size, number in lines[name]]
        if points := [(x, Spread.of(values)) for x, values in found if values]:
            measured[name][whence] = points
    return Curves(measured, left_out)


class Trial:
    """Loaders over the source and over a full cache, on shuffled indices.

    Args:
        data: what is loaded, and how.
        ranks: of this node, beside whose batches the cache must fit.
    """

    def __init__(self, data: Data, ranks: int) -> None:
        self.data, self.source, self.transform = data, data.source, data.transform
        self.codec: SampleCodec | None = None
        self.reason: str | None = None
        indices: tuple[int, ...] = (0,)
        samples, cut = (data.source[0],) if data.allow_random else (), None
        if not data.allow_random:
            parts = split(data.source, quick=_QUICK)
            self.source, self.reason, cut = parts.source, parts.reason, parts.cut
            indices, samples = parts.indices, parts.samples
            if (tail := parts.tail) is not None:
                self.transform = tail if data.transform is None else partial(_both, tail, data.transform)
        try:
            self.codec = choose_codec(indices, samples, cut=cut).codec if self.reason is None else None
        except (UnsupportedSampleError, SampleMismatchError) as error:
            self.reason = str(error)
        generator = torch.Generator().manual_seed(0)
        self.order: list[int] = torch.randperm(len(cast(Sized, data.source)), generator=generator).tolist()
        begin, read = time.perf_counter(), list[Any]()
        for index in self.order[: 2 * data.batch_size]:
            read.append(self.source[index])
            if time.perf_counter() - begin > _READING:
                break
        self.read_seconds = (time.perf_counter() - begin) / len(read)
        self.room = data.safe_bytes(self.codec, ranks)
        self.full = None if self.codec is None else self._full(read, self.codec.slot_bytes)

    @classmethod
    @contextmanager
    def of(cls, data: Data, ranks: int = 1) -> Iterator[Self]:
        """A trial, whose cache is closed at the end; what the dataset raises is one sentence.

        Raises:
            PlanError: the dataset is empty, iterable-style or raises, or there is no memory for a sample.
        """
        try:
            check_source(data.source, CachedDataset)
        except (TypeError, ValueError) as error:
            raise PlanError(str(error)) from error
        with _reading(f"a sample of {type(data.source).__name__}"):
            trial = cls(data, ranks)
            try:
                yield trial
            finally:
                if trial.full is not None:
                    trial.full.close()

    def pace(self, kind: Kind, batch_size: int, num_workers: int, seconds: float) -> float:
        """Run a loader for so many seconds, and for two waves at least: seconds a sample after the first wave.

        Misses end with the dataset, whose samples would be hits then.
        """
        moved = len(self.order) // (2 * _ROUNDS + 1)
        order = self.order = self.order[moved:] + self.order[:moved]
        if kind == "hit":
            dataset = cast(CachedDataset, self.full)
            order = torch.randperm(len(dataset)).tolist()
        else:
            budget = self.room if kind == "missed" else 0
            dataset = CachedDataset(self.source, budget, spec=self.codec, transform=self.transform)
        of_workers = () if num_workers else ("multiprocessing_context", "prefetch_factor", "timeout")
        settings = {name: value for name, value in self.data.settings.items() if name not in of_workers}
        batches = cast(Any, _Batches(order, batch_size, endless=kind != "missed"))
        loader = CachedLoader(dataset, batch_sampler=batches, num_workers=num_workers, **settings)
        wave, begin, ends = max(num_workers, 1), time.perf_counter(), list[float]()
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
            return ends[-1] / len(ends) / batch_size
        return (waves[-1] - waves[0]) / (len(waves) - 1) / wave / batch_size

    def _full(self, samples: Sequence[Any], slot_bytes: int) -> CachedDataset:
        """A cache full of these samples, repeated: as long as the dataset, or larger than the processor's caches."""
        if self.room < slot_bytes:
            raise PlanError(
                f"there is no memory for one sample of {format_bytes(slot_bytes)}: {format_bytes(self.room)} may "
                "safely be taken here; what limits it: python -m lightning_stocache doctor"
            )
        length = min(len(self.order), max(self.data.batch_size, _LARGE // slot_bytes), self.room // slot_bytes)
        repeated = Subset(cast(Any, samples), [number % len(samples) for number in range(length)])
        dataset = CachedDataset(repeated, spec=self.codec, transform=self.transform)
        for index in range(length):
            cast(Any, dataset.cache).fill(index, repeated[index])
        return dataset


class _Batches:
    """Batches of these indices, once or over and over."""

    def __init__(self, order: Sequence[int], batch_size: int, *, endless: bool) -> None:
        self.order, self.batch_size, self.endless = order, batch_size, endless

    def __len__(self) -> int:
        return 2**40 if self.endless else max(len(self.order) // self.batch_size, 1)

    def __iter__(self) -> Iterator[list[int]]:
        indices = itertools.cycle(self.order)
        return (list(itertools.islice(indices, self.batch_size)) for _ in range(len(self)))


def cached_bytes(source: Dataset[Any]) -> int:
    """The bytes of a whole dataset in the cache; 0 if it is empty, iterable-style or of samples that cannot be cached.

    Raises:
        PlanError: the dataset raises.
    """
    try:
        check_source(source, CachedDataset)
        with _reading(f"sample 0 of {type(source).__name__}"):
            sample = source[0]
        return len(cast(Sized, source)) * choose_codec([0], [sample]).codec.slot_bytes
    except (TypeError, ValueError):
        return 0


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn whatever a dataset raises, here or in a worker, into one sentence.

    Raises:
        PlanError: with that sentence.
    """
    try:
        yield
    except PlanError:
        raise
    except Exception as error:  # the user's code may raise anything
        clear_frames(error.__traceback__)  # the frames hold the loader's iterator, which holds its workers
        lines = str(error).strip().splitlines() or [""]  # the last line of a worker's error is the original message
        words = lines[-1].strip() if "Traceback" in str(error) else f"{type(error).__name__}: {lines[0]}"
        raise PlanError(f"{what} cannot be had: {words}") from error


def _both(tail: Callable[[Any], Any], transform: Callable[[Any], Any], sample: Any) -> Any:
    return transform(tail(sample))
