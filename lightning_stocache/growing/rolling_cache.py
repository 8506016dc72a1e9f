"""`RollingCache`: a pool of samples in memory or on a disk, to which other processes append while training runs.

Fillers, or any process of the user's, append. When the budget is full, the oldest sample leaves. An epoch trains on the
samples that are resident when the epoch begins, in shuffled order, so all samples are hits. The sampler calls
`begin_epoch`, which gives all ranks of a node the same slots. A sample that leaves during an epoch is replaced by the
newer sample of its slot, so the number of batches stays; `stats().renewed` counts these samples.

The leader of a node takes the memory, starts the fillers and waits for samples; the other ranks attach. A loader sees a
map-style dataset. Its length is the number of samples that were resident when the epoch began. Behind it stands a
CachedDataset whose store is the pool, so a CachedLoader makes batches as from any full cache.

On a disk the pool outlives its job: the next job trains on what is resident at once.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, cast

from torch.utils.data import Dataset

from lightning_stocache.cache.placement import Arc, Integers, Ring
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.store import StoreHandle
from lightning_stocache.growing.fillers import Fillers
from lightning_stocache.loading.dataset import CachedDataset, cached_source, dataset_over
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.locks import are_exclusive
from lightning_stocache.node.processes import poll
from lightning_stocache.sampling.residents import RollingSampler
from lightning_stocache.setup.allocation import holds_all
from lightning_stocache.setup.open import open_caches
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import CacheRequest, Layout, LoaderSettings, check_count
from lightning_stocache.source.draws import Draws, is_iterable_style

__all__ = ["RollingCache", "RollingStats", "dataset_in", "share_pools"]

log = logging.getLogger(__name__)

_NODE_SEEDS = 1_000_003  # between the seeds of two nodes, whose fillers draw different permutations


@dataclass(frozen=True)
class RollingStats:
    """The contents of a rolling cache on this node, and its counts since it was opened.

    Args:
        resident: samples that can be read now.
        capacity: samples for which there is room.
        appended: samples that came.
        evicted: samples that left for newer samples.
        oldest_seconds: age of the oldest resident sample.
        times_seen: how often each sample that came, or was found on the disk, was served on average.
        renewed: samples that this process served in place of samples that had left during the epoch.
        substituted: samples that this process served in place of samples that were being replaced at that moment.
        failed: samples that the fillers could not load, or that do not match the first samples.
        restarts: how often a filler died and was started again.
        memory_bytes: memory in use.
        disk_bytes: bytes on the disk in use.
    """

    resident: int
    capacity: int
    appended: int
    evicted: int
    oldest_seconds: float
    times_seen: float
    renewed: int
    substituted: int
    failed: int
    restarts: int
    memory_bytes: int
    disk_bytes: int = 0


class RollingCache(Dataset[Any]):
    """A dataset that grows, and then rolls, while it is trained on.

    The pool opens at its first use, or by `share`. Random steps in the source are drawn when a sample is loaded. Give
    steps that should be drawn in every epoch as `transform`.

    Args:
        source: a map-style dataset, whose indices the fillers draw in shuffled order, epoch after epoch; or a stream of
            samples (an IterableDataset, a generator). None: only `RollingWriter`s append.
        budget: memory per node: "8GiB", "60%" (of a map-style source), "60% of free", bytes. When it is full, the
            oldest samples leave first. If the whole source has room, each sample is loaded once.
        fillers: processes per node that load samples and append them.
        minimum: samples for which an epoch waits; fewer if the source or the budget has fewer.
        indices: a stream of indices that the fillers load, in place of permutations.
        transform: applied to each sample after the cache, whenever the sample is served.
        spec: an example of a sample. With it, set-up reads no sample.
        layout: "rows" (samples of one shape, only numbers: a batch is one copy per field; other samples are left out),
            "records" (anything that can be pickled), or "auto": rows if the first two samples allow it.
        epoch_samples: samples per epoch and rank, however many are resident. None: each resident sample once. A Trainer
            counts the batches of such epochs only with StochasticCache or a cached DataModule; else all epochs are as
            long as the first.
        shuffle: whether fillers draw in shuffled order.
        seed: seed of the fillers' order and of the sampler's order.
        multiprocessing_context: how fillers are started: "fork", "spawn" or "forkserver"; None: the system's default.
        dir: a directory on a disk of this machine, where the pool lies and stays when the job ends. Needs `name`.
            `budget` limits its file.
        name: the name of the pool on the disk. The next job under this name trains on what is resident at once. One
            job at a time has the pool open. If a file under this name has other samples, or is none of these pools, the
            pool lies in memory for this job, with one warning.
        fingerprint: your version of the data. It must be equal in all jobs of this name. Samples of a stream are not
            compared, so give one for a stream.

    Raises:
        ValueError: an argument breaks its rule; (when the pool opens) the budget has no room for the least number of
            samples.
        TypeError: the source is cached already.
        FirstSampleError: (when the pool opens) no sample can be read, or samples cannot be stored.
        CacheInUseError: (when the pool opens) another job has the pool of this name open.
        RuntimeError: (when an epoch begins) no sample is resident and no filler is left. The message has the last error
            of the fillers.

    Example:
        >>> import torch
        >>> from lightning_stocache import CachedLoader, RollingWriter
        >>> pool = RollingCache(budget="1MiB", spec=torch.zeros(2), minimum=2)
        >>> with RollingWriter.attach(pool.handle) as writer:
        ...     for number in range(5):
        ...         writer.append(torch.full((2,), float(number)))
        >>> loader = CachedLoader(pool, batch_size=2, shuffle=True)
        >>> sorted(value for batch in loader for value in batch[:, 0].tolist())
        [0.0, 1.0, 2.0, 3.0, 4.0]
        >>> pool.close()
    """

    def __init__(
        self,
        source: Any = None,
        budget: int | float | str = "60% of free",
        *,
        fillers: int = 4,
        minimum: int = 256,
        indices: Iterable[int] | None = None,
        transform: Callable[[Any], Any] | None = None,
        spec: Any = None,
        layout: Layout = "auto",
        epoch_samples: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        multiprocessing_context: str | None = None,
        dir: str | None = None,
        name: str | None = None,
        fingerprint: str = "",
    ) -> None:
        if isinstance(source, CachedDataset | RollingCache):
            raise TypeError(f"source must be the dataset itself, got a {type(source).__name__} that is cached already")
        check_count("fillers", fillers, 0)
        check_count("minimum", minimum, 1)
        if epoch_samples is not None:
            check_count("epoch_samples", epoch_samples, 1)
        if (dir is None) != (name is None):
            raise ValueError(
                "a rolling cache on a disk needs dir= and name=; without both it lies in memory and ends with its job"
            )
        self._request = CacheRequest(
            source,
            "",
            Budget.parse(budget),
            spec,
            name=name,
            fingerprint=fingerprint,
            layout=layout,
            dir=dir,
            as_stream=source is None or is_iterable_style(source),
            reader=LoaderSettings(1, 1, start_method=multiprocessing_context),
            writers=1 if source is None else max(fillers, 1),
            draws=Draws(source, indices, seed, shuffle),
        )
        if source is None and spec is None:
            raise ValueError("without a source a rolling cache needs spec=, an example of a sample to come")
        if indices is not None and (source is None or is_iterable_style(source)):
            raise ValueError("indices needs a map-style source to load them from")
        self.source, self.budget = source, self._request.budget
        self.transform, self.epoch_samples = transform, epoch_samples
        self._seed, self._minimum = seed, minimum
        self._filler_count, self._method = fillers, multiprocessing_context
        self._fillers: Fillers | None = None  # of the leader of a node
        self._dataset: CachedDataset | None = None  # every slot by its number, once the pool is open
        self._length: int | None = None

    # ---- opening ----

    def share(self, group: NodeGroup | None = None) -> None:
        """Open one pool for all ranks of the node. Collective: every rank calls it, before any other use of the pool.

        Args:
            group: which ranks share memory; by default the running process group tells.
        """
        if sys.platform == "win32" or not are_exclusive():
            raise OSError(
                "a rolling cache needs memory and locks that processes share, which this system does not have"
            )
        self.close()
        group = NodeGroup.discover() if group is None else group
        assert self._request.draws is not None
        draws = replace(self._request.draws, seed=self._seed + _NODE_SEEDS * group.node)
        request = replace(self._request, draws=draws)
        [opened] = open_caches([request], {request.pot: request.budget}, group)
        store = cast(RollingStore, opened.cache)
        if holds_all(request, store.codec, store.granted_bytes):
            draws = replace(draws, passes=1)
        group.lead(lambda: self._start(draws, store))
        opened = replace(opened, budget_bytes=store.granted_bytes)
        self._dataset = dataset_in(opened, store.length, self.transform, borrowed=False)
        opened.tell()

    def _start(self, draws: Draws, store: RollingStore) -> None:
        if self.source is not None and self._filler_count:
            self._fillers = Fillers(draws, store, self._filler_count, self._method)

    @property
    def is_open(self) -> bool:
        """Whether the pool is open."""
        return self._dataset is not None

    @property
    def group(self) -> NodeGroup:
        """The ranks that share the pool."""
        return NodeGroup() if self._dataset is None else self._dataset.group

    @property
    def store(self) -> RollingStore:
        """The store of the pool. Opens the pool if necessary."""
        return cast(RollingStore, cached_source(self.dataset).opened.cache)

    @property
    def dataset(self) -> CachedDataset:
        """The cached dataset behind the pool: every slot by its number. Opens the pool if necessary."""
        if self._dataset is None:
            self.share(NodeGroup())
        assert self._dataset is not None
        return self._dataset

    @property
    def handle(self) -> StoreHandle:
        """The address of the pool for a `RollingWriter` in another process: plain values, to be sent in any way."""
        return self.store.handle

    def view(self, transform: Callable[[Any], Any] | None) -> RollingCache:
        """The same pool with another transform. Closing the view does not close the pool."""
        dataset = dataset_over(cached_source(self.dataset).view(transform))
        view = copy.copy(self)
        view.transform, view._dataset, view._fillers = transform, dataset, self._fillers
        return view

    def close(self) -> None:
        """End the fillers and close the pool in this process. The next use opens another pool."""
        if self._borrowed:
            return
        if self._fillers is not None:
            self._fillers.stop()
        if self._dataset is not None:
            self._dataset.close()
        self._fillers = self._dataset = self._length = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy, for instance in another process, reads the same memory, does not close it, and looks after no filler.
        return self.__dict__ | {"_fillers": None, "_dataset": copy.copy(self._dataset)}

    @property
    def _borrowed(self) -> bool:
        """Whether this is a view or a copy."""
        return self._dataset is not None and cached_source(self._dataset).opened.borrowed

    # ---- epochs ----

    def begin_epoch(self) -> Integers:
        """Begin an epoch: wait for the minimum, and return the resident slots, int64, equal on all ranks of the node.

        Their number is the length of this dataset until the next call. The sampler of `sampler` calls `begin_epoch`;
        with another sampler, call it before each epoch. Collective.
        """
        return self._resident_slots(begins=True)

    def resident(self) -> Integers:
        """The resident slots, as `begin_epoch` returns them, without a new epoch. Collective."""
        return self._resident_slots(begins=False)

    def sampler(self, *, shuffle: bool = True) -> RollingSampler:
        """Make a sampler that draws this rank's resident samples. CachedLoader makes one by itself. Collective."""
        self.resident()  # opens the pool, and with it its group
        return RollingSampler(self, shuffle=shuffle, seed=self._seed, epoch_samples=self.epoch_samples)

    def look_after(self) -> None:
        """Log the errors of the fillers, and start dead fillers again."""
        if self._fillers is not None:
            self._fillers.look()

    def stats(self) -> RollingStats:
        """The contents of the pool on this node, and its counts since it was opened."""
        store, fillers, counters = self.store, self._fillers, self.dataset.counters
        assert counters is not None
        return RollingStats(
            resident=store.filled,
            capacity=store.capacity,
            appended=store.appended,
            evicted=store.evicted,
            oldest_seconds=store.oldest_seconds,
            times_seen=counters.totals().hits / max(store.found + store.appended, 1),
            renewed=store.renewed,
            substituted=store.substituted,
            failed=0 if fillers is None else fillers.failed,
            restarts=0 if fillers is None else fillers.restarts,
            memory_bytes=store.memory_bytes,
            disk_bytes=store.disk_bytes,
        )

    def _resident_slots(self, *, begins: bool) -> Integers:
        """The resident slots, found by the leader, which begins an epoch before any rank of the node reads from it."""
        store = self.store

        def look() -> Integers:
            resident = self._wait(store)
            if begins:
                store.begin_epoch()
            return resident

        resident = self.group.lead(look)
        self._length = len(resident)
        return resident

    def _wait(self, store: RollingStore) -> Integers:
        """Wait for the minimum, and return the resident slots. If no more samples can come, fewer are enough.

        Raises:
            RuntimeError: no sample is resident, and no filler is left.
        """
        fillers, minimum = self._fillers, max(self._minimum, len(self.group.members))
        for seconds in poll(pause=0.005):
            is_over = fillers is not None and not fillers.are_at_work()
            resident = store.resident()
            # While this waits, memory may end, or larger records may come: when samples leave, there is no more room.
            count, least = len(resident), 1 if store.evicted else min(minimum, store.capacity)
            if count >= least or (count and is_over):
                break
            # With no sample resident, but samples appended, the only sample may be in replacement: look again.
            if fillers is not None and is_over and (seconds or not store.appended):
                raise RuntimeError(
                    "the rolling cache is empty and none of its fillers is left: "
                    f"{fillers.last_error or 'the source has given no samples'}"
                )
            if seconds:
                doing = "Only RollingWriters append to this cache" if fillers is None else fillers.describe()
                words = "training waits for samples: %d of %d have come in %.0f s. %s"
                log.warning(words, count, least, seconds, doing)
        return resident

    # ---- samples ----

    def __len__(self) -> int:
        return len(self.resident()) if self._length is None else self._length

    def __getitem__(self, index: SupportsIndex) -> Any:
        """The sample that is in a slot now. While that sample is being replaced, another resident sample."""
        number, length = index.__index__(), len(self)
        if not -length <= number < self.store.length:
            raise IndexError(f"index {number} is out of range: {length} samples are resident in this epoch")
        return cached_source(self.dataset).sample(number if number >= 0 else number + length)

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        """The samples of a batch."""
        return list(cached_source(self.dataset).samples(indices))

    def __loader_sampler__(self, *, shuffle: bool) -> RollingSampler:
        return self.sampler(shuffle=shuffle)

    def __cached__(self) -> CachedDataset:
        return self.dataset


def share_pools(datasets: Iterable[Any]) -> None:
    """Share the rolling caches among some datasets between the ranks, unless they are shared already. Collective."""
    for dataset in datasets:
        if isinstance(dataset, RollingCache):
            group = NodeGroup.discover()
            if not dataset.is_open or dataset.group != group:
                dataset.share(group)


class _Slots(Dataset[Any]):
    """The source of a dataset that is only in memory: its samples cannot be loaded by their number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise IndexError(f"sample {index} cannot be read: its memory was closed, or has {self.length} samples")


def dataset_in(
    opened: OpenCache, length: int, transform: Callable[[Any], Any] | None, *, borrowed: bool = True
) -> CachedDataset:
    """The slots of a rolling cache or a stream as a map-style dataset.

    Args:
        opened: has the slots.
        length: number of slots.
        transform: for each sample, after the cache.
        borrowed: whether the memory stays open when the dataset is closed.
    """
    slots, ring = _Slots(length), Ring((Arc(length, length),) * len(opened.group.nodes))
    # `freeze_random`: nothing can be read again.
    request = CacheRequest(slots, freeze_random=True, name=opened.request.name, dir=opened.request.dir)
    opened = replace(opened, request=request, source=slots, ring=ring, expected_ring=None, borrowed=borrowed)
    return dataset_over(CachedSource(opened, transform))
