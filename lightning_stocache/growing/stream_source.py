"""A stream as a process serves it: read and kept, or from what is kept.

Epoch one is the stream: each process reads what it would read without a cache, at the same moments, hands it on as it
is, and keeps a copy. A sample that is kept is a miss, and a fill; one that is not is a bypass; one that comes from
memory is a hit.

When an epoch has ended in every shard of every rank of the node, and all of it was kept, later epochs come from memory:
a permutation of all samples by `seed` and the number of the epoch, dealt to the ranks, and to the workers of each. What
an epoch comes from is decided before it begins:

    stream   it is read, and kept
      -> stream   the epoch was broken off, or raised: from nothing, for no sample may come twice
      -> cache    all of it was kept, and its first samples, read again, are among them
      -> pass     anything else
    cache    all comes from memory
    pass     it is read, and nothing is kept

A stream passes for good when it does not fit, is random, another one in every epoch, or never read to its end: three
epochs that were broken off one after the other.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.stream import MOST_WORKERS, Mode, Shard, StreamStore
from lightning_stocache.growing.rolling_cache import dataset_in
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.grows import Kept
from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.sampling.stream_deal import StreamBatches, batches_in_turn, batches_of, deal, permutation
from lightning_stocache.setup.first_samples import difference
from lightning_stocache.setup.open_stream import OpenStream, open_stream
from lightning_stocache.setup.request import BackendChoice, Layout
from lightning_stocache.source.access import draws_shards
from lightning_stocache.source.guards import StreamReader
from lightning_stocache.source.samples import mark_of

__all__ = ["StreamSource"]

log = logging.getLogger(__name__)

BY_HAND = "Give its deterministic part to CachedStream, and the random rest as transform=; or allow_random=True"
_MOST_BROKEN = 3

_AT_ONCE, _AT_ONCE_BYTES = 64, 4 << 20  # samples that are read from memory together


class StreamSource:
    """Serves the samples of a stream.

    Args:
        source: the user's stream.
        opened: the memory for it.
        transform: what is done to each sample after the cache.
        layout: how samples are to lie.
        allow_random: whether a random stream is kept as it is.
        seed: of the permutations.
        shuffle: whether later epochs have another order than the stream.
    """

    def __init__(
        self,
        source: Any,
        opened: OpenStream,
        transform: Callable[[Any], Any] | None = None,
        layout: Layout = "auto",
        allow_random: bool = False,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.source, self.opened, self.transform = source, opened, transform
        self.layout, self.allow_random, self.seed = layout, allow_random, seed
        self.shuffle = shuffle
        self._kept: CachedDataset | None = None  # all of the stream

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}

    def open(
        self,
        budget: Budget,
        group: NodeGroup,
        backend: BackendChoice = "auto",
        *,
        strict: bool = False,
        kept_back: int = 0,
    ) -> None:
        """Open the memory, in place of what was open before; arguments and errors are those of `open_stream`."""
        self.close()
        if not budget.off and not self.allow_random and draws_shards(self.source):
            budget = Budget.parse(0)
            self._tell(
                "it draws its shards anew in every epoch (resampled=True), and what is kept would be one draw of them. "
                "resampled=False reads each once; allow_random=True keeps the first draw"
            )
        self.opened = open_stream(self.source, budget, group, self.layout, backend, strict=strict, kept_back=kept_back)

    def close(self) -> None:
        """Give the memory up in this process."""
        self.opened.close()
        self.opened, self._kept = OpenStream(group=self.opened.group), None

    def begin(self) -> Iterator[Any]:
        """The next epoch of this process."""
        store, shard = self.opened.live, self._shard()
        if store is None:
            return StreamPass(self, None, shard, 0)
        if shard.workers > MOST_WORKERS:
            self.pass_by(store, f"its loader has {shard.workers} workers, more than {MOST_WORKERS}")
            return StreamPass(self, None, shard, 0)
        epoch = store.ledger.begin(shard)
        mode = self._mode(store, epoch)
        if mode == "cache":
            return self._from_memory(store, self._share(store.in_order(), shard, epoch))
        return StreamPass(self, None if mode == "pass" else store, shard, epoch)

    def announce(self, workers: int, batch_size: int, drop_last: bool) -> Kept | None:
        """In the process of a loader: the epoch that begins now, if all of it comes from memory."""
        store, opened = self.opened.live, self.opened
        if store is None:
            return None
        epoch = store.ledger.announce(opened.rank)
        if self._mode(store, epoch) != "cache":
            return None
        shards = store.in_order()
        if self._kept is None or self._kept.cache is not store:
            self._kept = dataset_in(opened, len(shards), self.transform)
        size, last = batch_size, drop_last
        batches = StreamBatches(lambda epoch: self._batches(epoch, shards, size, last), batch_size, drop_last)
        batches.epoch = epoch
        return Kept(self._kept, batches, self.source)

    def _batches(self, epoch: int, shards: Integers, size: int, drop_last: bool) -> list[Integers]:
        """The batches of this rank in an epoch that comes from memory, given the shard of every sample."""
        opened, samples = self.opened, len(shards)
        if self.shuffle:
            order = permutation(samples, self.seed, epoch)
            return list(batches_of(order, opened.rank, opened.ranks, size, drop_last=drop_last))
        return batches_in_turn(
            [np.flatnonzero(shards == number) for number in self._numbers(shards)], size, drop_last=drop_last
        )

    def count(self, **counts: int) -> None:
        """Count what has been served or filled, by the names of `Counts`."""
        if self.opened.counters is not None:
            self.opened.counters.add(**counts)

    def finished(self, sample: Any) -> Any:
        """A sample as it is handed out."""
        return sample if self.transform is None else self.transform(sample)

    def pass_by(self, store: StreamStore, reason: str) -> None:
        """Keep nothing from now on, and say so once. What others are reading stays where it is."""
        before = store.ledger.pass_by()
        if before != "pass":
            self._tell(reason)
        if before == "stream":
            store.clear()

    def keep(self, store: StreamStore, shard: Shard, epoch: int, sample: Any, mark: int) -> int | None:
        """Keep a copy of a sample that has come, if that is possible; its bytes."""
        if store.ledger.mode == "stream":
            try:
                return store.append(shard, epoch, sample, mark)
            except (SampleMismatchError, UnsupportedSampleError) as error:
                self.pass_by(store, str(error))
        return None

    def _mode(self, store: StreamStore, epoch: int) -> Mode:
        return store.ledger.decide(epoch, lambda late: self._choose(store, epoch, late))

    def _choose(self, store: StreamStore, epoch: int, late: Sequence[int]) -> Mode:
        """What an epoch comes from that all ranks have begun but those that are late; whatever differs passes by."""
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
                f"{_MOST_BROKEN} epochs were broken off before it came to its end (limit_train_batches, break, an "
                "error), so nobody knows what is in it. Read it to its end once"
            )
        elif filled < passed:
            size = store.memory_bytes * passed // max(filled, 1)
            reason = (
                f"its {passed:,} samples take about {format_bytes(size)}, and its budget is "
                f"{format_bytes(self.opened.budget_bytes)}. A stream is kept whole or not at all"
            )
        elif not self.allow_random and (found := difference(self.source, store.marked)) is not None:
            reason = (
                f"{found}: it is random, or another one in every epoch, as batches are that it makes of shuffled "
                f"samples (make them in the loader).\n{BY_HAND}"
            )
        if reason is None:
            return "cache"
        self._tell(reason)
        store.clear()
        return "pass"

    def _length(self) -> int | None:
        try:
            return len(self.source)
        except Exception:  # whatever the user's code raises: most streams have none
            return None

    def _shard(self) -> Shard:
        info: Any = get_worker_info()
        if info is None:
            return Shard(self.opened.rank, key=os.getpid())
        return Shard(self.opened.rank, info.id, info.num_workers, (info.seed - info.id) % 2**62 + 1)

    def _numbers(self, shards: Integers) -> list[int]:
        """The numbers of those shards that are of this rank."""
        ours = range(Shard(self.opened.rank).number, Shard(self.opened.rank + 1).number)
        return [number for number in np.unique(shards).tolist() if number in ours]

    def _share(self, shards: Integers, shard: Shard, epoch: int) -> Integers:
        """What a shard serves of all that is kept: unshuffled, what it has read, where shards are the same."""
        if self.shuffle:
            mine = deal(permutation(len(shards), self.seed, epoch), self.opened.rank, self.opened.ranks)
            return mine[shard.worker :: shard.workers]
        ours = self._numbers(shards)
        if all(number - Shard(self.opened.rank).number < shard.workers for number in ours):
            return np.flatnonzero(shards == shard.number)
        return np.flatnonzero(np.isin(shards, ours))[shard.worker :: shard.workers]

    def _from_memory(self, store: StreamStore, mine: Integers) -> Iterator[Any]:
        step = max(min(_AT_ONCE_BYTES // max(store.codec.nbytes, 1), _AT_ONCE), 1)
        for first in range(0, len(mine), step):
            if store.closed:
                raise RuntimeError("the stream was closed while an epoch was served from what is kept of it")
            start = time.perf_counter_ns()
            places = store.lookup(mine[first : first + step])
            samples, nbytes = list(store.read(places)), store.stored_bytes(places)
            gather_ns = time.perf_counter_ns() - start
            for number, sample in enumerate(samples, 1):  # one by one: who stops in between has been served no more
                share = nbytes * number // len(samples) - nbytes * (number - 1) // len(samples)
                self.count(hits=1, bytes_from_cache=share, gather_ns=gather_ns // len(samples))
                yield self.finished(sample)

    def _tell(self, reason: str) -> None:
        name = getattr(self.source, "__name__", type(self.source).__name__)
        log.warning("%s passes through uncached: %s", name, reason)


class StreamPass:
    """One epoch of a stream that is read, in one process: handed on as it is, and kept.

    What the stream raises comes through, and a stream that goes on after an error may be asked again, as without a
    cache.

    Args:
        serving: what it belongs to.
        store: where samples are kept; None where they are not.
        shard: what this process reads.
        epoch: the number of the epoch.
    """

    def __init__(self, serving: StreamSource, store: StreamStore | None, shard: Shard, epoch: int) -> None:
        self._serving, self._store, self._shard, self._epoch = serving, store, shard, epoch
        self._reader = StreamReader(serving.source, watched=store is not None and not serving.allow_random)
        self._failed = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next sample of the stream."""
        try:
            sample = next(self._reader)
        except StopIteration:
            self._end()
            raise
        except BaseException:
            self._failed = True
            raise
        source_ns, begin = self._reader.source_ns, time.perf_counter_ns()
        nbytes = self._kept(sample)
        if nbytes is None:
            self._serving.count(bypasses=1, source_ns=source_ns)
        else:
            fill_ns = time.perf_counter_ns() - begin
            self._serving.count(misses=1, fills=1, bytes_from_source=nbytes, source_ns=source_ns, fill_ns=fill_ns)
        return self._serving.finished(sample)

    def _kept(self, sample: Any) -> int | None:
        store, moved = self._store, self._reader.moved
        if store is None:
            return None
        if not store.closed and moved is None:
            return self._serving.keep(store, self._shard, self._epoch, sample, mark_of(sample))
        self._store = None
        if not store.closed:
            reason = f"it moves the generators of {moved} while samples are read: it is random.\n{BY_HAND}"
            self._serving.pass_by(store, reason)
        return None

    def _end(self) -> None:
        """The stream has ended in this process."""
        store, self._store = self._store, None
        if store is not None and not store.closed and not self._failed:
            store.ledger.end(self._shard, self._epoch)
