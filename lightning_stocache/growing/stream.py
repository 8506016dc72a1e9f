"""`CachedStream`: stores the samples of a stream as they pass, and serves later epochs from memory.

Epoch one is the stream. Each process reads what it would read without a cache, at the same moments, hands each sample
on unchanged, and stores a copy. A sample that is stored counts as a miss and a fill, a sample that is not stored as a
bypass, and a sample from memory as a hit.

When every shard of every rank of the node has ended an epoch, and all of its samples were stored, later epochs come
from memory: a permutation of all samples by `seed` and the number of the epoch, dealt to the ranks, and to the workers
of each rank. The source of an epoch is decided before the epoch begins:

    stream   the stream is read, and stored
      -> stream   the epoch was broken off, or raised: storing begins anew, because no sample may come twice
      -> cache    all samples were stored, and the first samples, read again, are among them
      -> pass     anything else, or three epochs were broken off
    cache    all samples come from memory
    pass     the stream is read, and not stored
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.counters import count
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.stream import MOST_WORKERS, Mode, Shard, StreamStore
from lightning_stocache.growing.rolling_cache import dataset_in
from lightning_stocache.loading.dataset import Cached, CachedDataset
from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.locks import are_exclusive
from lightning_stocache.sampling.residents import StreamBatches, batches_in_turn, batches_of_rank, deal, permutation
from lightning_stocache.setup.find import WAY_OF_STREAMS, stream_difference
from lightning_stocache.setup.open import open_caches
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import BackendChoice, CacheRequest, Layout, check_choice, check_count, check_flag
from lightning_stocache.source.access import check_stream, draws_shards
from lightning_stocache.source.probe import StreamReader
from lightning_stocache.source.samples import mark_of

__all__ = ["CachedStream", "stream_for", "stream_source", "stream_with"]

_MOST_BROKEN = 3
_SETTINGS = ("apply_sharding", "set_seed", "set_shuffle")  # DataLoader calls these of the pipe itself
_AT_ONCE, _AT_ONCE_BYTES = 64, 4 << 20  # samples that are read from memory together


class CachedStream(Cached, IterableDataset[Any]):
    """An iterable-style dataset whose samples are stored as they pass, in memory that all processes of the node share.

    When the memory opens, another process reads the first sixteen samples, to learn what samples look like. Epoch one
    is the stream itself, in every worker: order, values, errors. When all workers have read the stream to its end, and
    all samples were stored, later epochs come from memory: every sample once, each epoch in another order.

    A stream passes through uncached, with one warning, if it does not fit into its budget, is random, has other samples
    in every epoch, is broken off in its first three epochs, or is read on several nodes; and if the first sixteen
    samples have one shape and a later sample has another. Shuffling is not random in this sense, with two exceptions:
    shuffling that draws from the process-wide generators with every sample, and batches that the stream makes of
    shuffled samples (`batched` of WebDataset after its `shuffle`). Let the loader make the batches.

    Give the stream to a CachedLoader, which makes the batches of later epochs in the main process, or to any
    DataLoader. The wrapper has the names `source`, `cache`, `counters`, `group`, `budget_bytes`, `share`, `close` and
    `describe`. All other names are those of the stream, to read, write and delete.

    The idea is that of `tf.data.Dataset.cache()`.

    Args:
        iterable: an IterableDataset, WebDataset, `datasets.IterableDataset`, any object with `__iter__`, or a function
            that makes an iterator.
        budget: memory per node: "8GiB", "60% of free" (memory), "auto" (as much as is safely free), bytes, or 0 (off).
            A share of the dataset ("60%") is refused, because the size of a stream is not known.
        transform: applied to each sample after the cache, on the CPU. The random part belongs here.
        freeze_random: store a random stream, too: its first draw is frozen.
        backend: where the memory lies: "tmpfile" (/dev/shm), "memfd", "file", or "auto".
        strict: raise an error without memory; else the stream passes through uncached, with one warning.
        defer: open no memory yet: samples pass through until `share` is called.
        layout: "rows" (samples of one shape, nothing but numbers), "records" (anything that can be pickled), or "auto":
            rows if the first sixteen samples allow it. If a later sample is no such row, the stream passes through.
        seed: seed of the order of later epochs; the same on all ranks.
        shuffle: whether each later epoch has another order. False: later epochs repeat epoch one, batch for batch.

    Raises:
        TypeError: `iterable` is no stream, or can be read only once.
        ValueError: the budget cannot be read, or an argument is none of its choices.
        CacheMemoryError: (`strict`) there is no memory.

    Example:
        >>> reads = []
        >>> def squares():
        ...     for number in range(4):
        ...         reads.append(number)
        ...         yield number * number
        >>> stream = CachedStream(squares, budget="1MiB")
        >>> list(stream), sorted(stream), sorted(stream)
        ([0, 1, 4, 9], [0, 1, 4, 9], [0, 1, 4, 9])
        >>> stream.counters.totals().hits, len(reads)  # the reads of the set-up process do not count here
        (8, 4)
        >>> stream.close()
    """

    __serving__: StreamSource

    def __init__(
        self,
        iterable: Any,
        budget: int | float | str = "auto",
        *,
        transform: Callable[[Any], Any] | None = None,
        freeze_random: bool = False,
        backend: BackendChoice = "auto",
        strict: bool = False,
        defer: bool = False,
        layout: Layout = "auto",
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        check_stream(iterable, CachedStream, in_pipe=isinstance(self, IterDataPipe))
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of a sample, got {transform!r}")
        check_choice("backend", backend, BackendChoice)
        check_count("seed", seed, 0)
        check_flag("shuffle", shuffle)
        check_flag("defer", defer)
        request = CacheRequest(
            iterable,
            "",
            Budget.parse(budget),
            freeze_random=freeze_random,
            strict=strict,
            layout=layout,
            as_stream=True,
        )
        super().__init__(iterable)
        self.__serving__ = StreamSource(OpenCache.without(request), transform, backend, seed, shuffle)
        if not defer:
            self.share(NodeGroup())

    def share(self, group: NodeGroup | None = None) -> None:
        """Replace the memory by memory that all ranks of the node share. Collective: every rank calls it.

        Samples that were stored before are lost, so call `share` before the first epoch, and make the stream with
        `defer=True`.

        Args:
            group: which ranks share memory; by default the running process group tells.
        """
        self.__serving__.open(NodeGroup.discover() if group is None else group)

    def close(self) -> None:
        """Close the memory in this process. From then on the stream passes through."""
        self.__serving__.close()

    def describe(self) -> str:
        """Describe the stored samples in one line."""
        name, cache = type(self.source).__name__, self.__serving__.store
        if cache is None or (mode := cache.ledger.mode) == "pass":
            return f"{name}: a stream that passes through uncached"
        state = "later epochs come from memory" if mode == "cache" else "it is being read"
        used = f"{format_bytes(cache.memory_bytes)} in use of {format_bytes(self.budget_bytes)}"
        return f"{name}: {cache.filled:,} samples of a stream are kept, {used}; {state}"

    def __iter__(self) -> Iterator[Any]:
        return self.__serving__.begin()

    def __len__(self) -> int:
        """The length of the stream, if it has one."""
        return len(self.source)

    def __kept__(self, batch_size: int, drop_last: bool) -> tuple[CachedDataset, StreamBatches] | None:
        return self.__serving__.announce(batch_size, drop_last)


def stream_source(stream: CachedStream) -> StreamSource:
    """The StreamSource of a stream. For the package; the attribute's name hides no name of the user's stream."""
    return stream.__serving__


class _CachedPipe(CachedStream, IterDataPipe[Any]):
    """The CachedStream of an IterDataPipe, which a DataLoader seeds and divides among workers as it does the pipe."""

    def __getattr__(self, name: str) -> Any:
        if name in _SETTINGS:
            raise AttributeError(name)
        return super().__getattr__(name)


def stream_for(iterable: Any, budget: int | float | str = "auto", **options: Any) -> CachedStream:
    """A CachedStream for a loader that a DataLoader's constructor has made. For the package."""
    return (_CachedPipe if isinstance(iterable, IterDataPipe) else CachedStream)(iterable, budget, **options)


def stream_with(stream: CachedStream, transform: Callable[[Any], Any] | None) -> CachedStream:
    """The same stream with another transform after the cache. For the package."""
    other = type(stream)(stream.source, 0, defer=True)
    other.__serving__ = replace(stream.__serving__, transform=transform, _samples=None)
    return other


@dataclass(eq=False)
class StreamSource:
    """Serves the samples of a stream in one process. The arguments are those of `CachedStream`.

    `opened` has the request for the stream and its memory.
    """

    opened: OpenCache
    transform: Callable[[Any], Any] | None
    backend: BackendChoice
    seed: int
    shuffle: bool
    _samples: tuple[CachedDataset, Integers, Integers] | None = None  # see `_in_memory`

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_samples": None}

    @property
    def source(self) -> Any:
        """The user's stream."""
        return self.opened.request.source

    @property
    def store(self) -> StreamStore | None:
        """The samples in memory; None while the stream passes through."""
        return cast("StreamStore | None", self.opened.live_cache)

    def open(self, group: NodeGroup, kept_back: int = 0) -> None:
        """Open the memory, in place of the memory that was open. Arguments and errors are those of `open_caches`."""
        self.close()
        request, reason = self.opened.request, None
        if not are_exclusive():
            reason = "a stream needs locks between processes, which this system does not have"
        elif len(group.nodes) > 1:
            reason = f"it is kept on one node only, and there are {len(group.nodes)}"
        elif not request.freeze_random and draws_shards(self.source):
            reason = (
                "it draws its shards anew in every epoch (resampled=True), and what is kept would be one draw of them. "
                "resampled=False reads each once; freeze_random=True keeps the first draw"
            )
        if reason is not None and not request.budget.off and group.rank == 0:
            request.pass_through(reason)
        budget = request.budget if reason is None else Budget.parse(0)
        [opened] = open_caches([request], {request.pot: budget}, group, self.backend, kept_back=kept_back)
        self.opened = replace(opened, request=request)  # which keeps its own budget
        if (store := self.store) is not None:
            store.stream_length = self._length()
        self.opened.tell()

    def close(self) -> None:
        """Close the memory in this process."""
        self.opened.close()
        self.opened, self._samples = OpenCache.without(self.opened.request, self.opened.group), None

    # ---- epochs ----

    def begin(self) -> Iterator[Any]:
        """Begin the next epoch in this process."""
        store, shard = self.store, self._shard()
        if store is None or shard.workers > MOST_WORKERS:
            return _Reading(self, None, shard, 0)
        epoch = store.ledger.begin(shard)
        mode = self._mode(store, epoch)
        if mode == "cache":
            return self._from_memory(store, self._share(store, shard, epoch))
        return _Reading(self, None if mode == "pass" else store, shard, epoch)

    def announce(self, batch_size: int, drop_last: bool) -> tuple[CachedDataset, StreamBatches] | None:
        """Begin the next epoch in the process of a loader.

        Returns:
            The samples in memory (the same object in each epoch) and this rank's batches. None if the epoch is read
            from the stream.
        """
        store, group = self.store, self.opened.group
        if store is None:
            return None
        epoch = store.ledger.announce(group.local_rank)
        if self._mode(store, epoch) != "cache":
            return None
        dataset, indices, shards = self._in_memory(store)
        if self.shuffle:
            order = indices[permutation(len(indices), self.seed, epoch)]
            batches = batches_of_rank(order, group.local_rank, len(group.members), batch_size, drop_last=drop_last)
        else:
            ours = np.unique(shards[shards // MOST_WORKERS == group.local_rank])
            batches = batches_in_turn([indices[shards == shard] for shard in ours], batch_size, drop_last=drop_last)
        return dataset, StreamBatches(batches, batch_size, drop_last)

    def _mode(self, store: StreamStore, epoch: int) -> Mode:
        return store.ledger.decide(epoch, lambda late: self._choose(store, epoch, late))

    def _choose(self, store: StreamStore, epoch: int, late: Sequence[int]) -> Mode:
        """Choose the source of an epoch that all ranks but `late` have begun."""
        ledger, reason = store.ledger, None
        passed, filled = ledger.passed(epoch - 1, self._length()), store.filled
        if late:
            reason = (
                f"rank(s) {', '.join(map(str, late))} of the node did not begin epoch {epoch} within "
                f"{ledger.patience:.0f} s. Every rank must read the stream as often"
            )
        elif epoch == 1:
            return "stream"
        elif passed is None:
            if ledger.count_broken() < _MOST_BROKEN:
                store.clear()
                return "stream"
            reason = (
                f"{_MOST_BROKEN} epochs were broken off before its end (limit_train_batches, break, an error), so "
                "nobody knows what is in it. Read it to its end once"
            )
        elif filled < passed:
            size = store.memory_bytes * passed // max(filled, 1)
            reason = (
                f"its {passed:,} samples take about {format_bytes(size)}, and its budget is "
                f"{format_bytes(self.opened.budget_bytes)}. A stream is kept whole or not at all"
            )
        elif not self.opened.request.freeze_random:
            reason = stream_difference(self.source, store.marked)
        if reason is None:
            return "cache"
        self.opened.request.pass_through(reason)
        store.clear()
        return "pass"

    def pass_by(self, store: StreamStore, reason: str) -> None:
        """Store nothing from now on, with one warning. Samples that other processes read from memory stay there."""
        before = store.ledger.pass_by()
        if before != "pass":
            self.opened.request.pass_through(reason)
        if before == "stream":
            store.clear()

    def _length(self) -> int | None:
        try:
            return len(self.source)
        except Exception:  # most streams have no length, and the user's code may raise anything
            return None

    # ---- shards ----

    def _shard(self) -> Shard:
        info: Any = get_worker_info()
        rank = self.opened.group.local_rank
        if info is None:
            return Shard(rank, key=os.getpid())
        return Shard(rank, info.id, info.num_workers, (info.seed - info.id) % 2**62 + 1)

    def _in_memory(self, store: StreamStore) -> tuple[CachedDataset, Integers, Integers]:
        """The dataset of the samples in memory, their indices sorted by shard, and the shard of each."""
        if self._samples is None:
            self._samples = dataset_in(self.opened, store.length, self.transform), *store.in_order()
        return self._samples

    def _share(self, store: StreamStore, shard: Shard, epoch: int) -> Integers:
        """The indices that a shard serves from memory. Without shuffling, these are the samples that it has read."""
        _, indices, shards = self._in_memory(store)
        if self.shuffle:
            order = indices[permutation(len(indices), self.seed, epoch)]
            return deal(order, shard.rank, len(self.opened.group.members))[shard.worker :: shard.workers]
        ranks, workers = np.divmod(shards, MOST_WORKERS)
        # By the remainder, all samples are served even if epoch one had more workers.
        is_mine = (ranks == shard.rank) & (workers % shard.workers == shard.worker)
        mine: Integers = indices[is_mine]
        return mine

    # ---- samples ----

    def _from_memory(self, store: StreamStore, mine: Integers) -> Iterator[Any]:
        step = max(min(_AT_ONCE_BYTES // max(store.codec.nbytes, 1), _AT_ONCE), 1)
        for first in range(0, len(mine), step):
            start = time.perf_counter_ns()
            slots = store.lookup(mine[first : first + step])
            samples = list(store.read(slots))
            gather_ns = time.perf_counter_ns() - start
            count(self.opened.counters, bytes_from_cache=store.stored_bytes(slots), gather_ns=gather_ns)
            for sample in samples:
                count(self.opened.counters, hits=1)  # one by one, because the consumer may stop in between
                yield self.finished(sample)

    def finished(self, sample: Any) -> Any:
        """A sample with its transform applied."""
        return sample if self.transform is None else self.transform(sample)


class _Reading(Iterator[Any]):
    """One epoch that one process reads from the stream. Samples are stored, unless `store` is None.

    Errors of the stream reach the caller. Afterwards the caller may go on reading, as without a cache, but no more
    samples of that epoch are stored.
    """

    def __init__(self, serving: StreamSource, store: StreamStore | None, shard: Shard, epoch: int) -> None:
        self._serving, self._store, self._shard, self._epoch = serving, store, shard, epoch
        is_watched = store is not None and not serving.opened.request.freeze_random
        self._reader = StreamReader(serving.source, watched=is_watched)

    def __next__(self) -> Any:
        store = self._store
        try:
            sample = next(self._reader)
        except BaseException as error:
            self._store = None
            if isinstance(error, StopIteration) and store is not None and not store.closed:
                store.ledger.end(self._shard, self._epoch)
            raise
        source_ns, begin = self._reader.source_ns, time.perf_counter_ns()
        nbytes = None if store is None or store.closed else self._stored(store, sample)
        if nbytes is None:
            count(self._serving.opened.counters, bypasses=1, source_ns=source_ns)
        else:
            fill_ns = time.perf_counter_ns() - begin
            counts = {"bytes_from_source": nbytes, "source_ns": source_ns, "fill_ns": fill_ns}
            count(self._serving.opened.counters, misses=1, fills=1, **counts)
        return self._serving.finished(sample)

    def _stored(self, store: StreamStore, sample: Any) -> int | None:
        """Store a copy of a sample. Returns its bytes, or None if it was not stored."""
        moved = self._reader.moved
        if moved is not None:
            self._store = None
            reason = f"it moves the generators of {moved} while samples are read: it is random.\n{WAY_OF_STREAMS}"
            self._serving.pass_by(store, reason)
        elif store.ledger.mode == "stream":
            try:
                return store.append(self._shard, self._epoch, sample, mark_of(sample))
            except (SampleMismatchError, UnsupportedSampleError) as error:
                self._serving.pass_by(store, str(error))
        return None
