"""A pool of samples in memory that other processes append to while training runs.

Fillers, or any process of the user's, append; when the budget is full, the oldest sample leaves. An epoch trains on
what is resident when it begins, shuffled: nothing but hits. `begin_epoch` says what that is, the same for all ranks of
a node; the sampler calls it. A sample that leaves in the middle of an epoch that wanted it is replaced by the newer one
of its slot, so the number of batches stays; `stats().renewed` counts those.

A loader sees a map-style dataset, whose length is what was resident when the epoch began. Behind it stands a
CachedDataset whose store is the pool, so a CachedLoader puts batches together as from any cache that is full.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import torch.distributed as dist
from torch.utils.data import Dataset

from lightning_stocache.cache.placement import Arc, Integers, Ring
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import StoreHandle
from lightning_stocache.growing.rolling_pool import RollingPool, RollingRequest, RollingStats
from lightning_stocache.loading.dataset import CachedDataset, cached_source, dataset_over
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.sampling.rolling_sampler import RollingSampler
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import CacheRequest, Layout, check_count

__all__ = ["RollingCache", "Slots", "share_pools"]

log = logging.getLogger(__name__)


class RollingCache(Dataset[Any]):
    """A dataset that grows, and then rolls, while it is trained on.

    It opens when it is first asked for something, or by `share`. What is random in the source is drawn again whenever a
    sample is loaded again; give what is to be drawn in every epoch as `transform`.

    Args:
        source: a map-style dataset, whose indices the fillers draw in shuffled order, epoch after epoch; or a stream of
            samples (an IterableDataset, a generator). None: only `RollingWriter`s append.
        budget: memory per node: "8GiB", "60%" (of a map-style source), "60% of free", bytes. The oldest leave first
            when it is full. Where the whole source has room, each sample is loaded once.
        fillers: processes per node that load samples and append them.
        minimum: samples for which an epoch waits; less where the source or the budget has less.
        indices: a stream of indices that the fillers load, in place of permutations.
        transform: done to each sample after the cache, whenever it is served.
        spec: what a sample looks like, as `SampleSpec.infer(sample)` says; given, nothing is read at set-up.
        layout: "rows" (samples of one shape, nothing but numbers: a batch is one copy per field; others are left out),
            "records" (anything that can be pickled), or "auto": rows where the first two samples are such.
        epoch_samples: samples per epoch and rank, whatever is resident; None: each resident sample once. With a number,
            all epochs have one length, which is what Lightning takes them for.
        shuffle: whether fillers draw in shuffled order.
        seed: of the fillers' order, and of the sampler's.
        multiprocessing_context: how fillers are started: "fork", "spawn" or "forkserver"; None: as the system does.

    Raises:
        ValueError: an argument that breaks its rule; (when it opens) the budget has no room for the least number of
            samples.
        TypeError: the source is cached already.
        FirstSampleError: (when it opens) no sample can be read, or samples cannot be kept.
        RuntimeError: (when an epoch begins) nothing is resident and no filler is left; it holds the last error.

    Example:
        >>> import torch
        >>> from lightning_stocache import CachedLoader, RollingWriter, SampleSpec
        >>> pool = RollingCache(budget="1MiB", spec=SampleSpec.infer(torch.zeros(2)), minimum=2)
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
        spec: SampleSpec | None = None,
        layout: Layout = "auto",
        epoch_samples: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        multiprocessing_context: str | None = None,
    ) -> None:
        if isinstance(source, CachedDataset | RollingCache):
            raise TypeError(f"source must be the dataset itself, got a {type(source).__name__} that is cached already")
        if epoch_samples is not None:
            check_count("epoch_samples", epoch_samples, 1)
        rolls = (spec, layout, shuffle, seed, multiprocessing_context)
        self.request = RollingRequest(source, Budget.parse(budget), fillers, minimum, indices, *rolls)
        self.transform, self.epoch_samples = transform, epoch_samples
        self.group = NodeGroup()
        self._pool: RollingPool | None = None
        self._dataset: CachedDataset | None = None
        self._end: weakref.finalize[[], RollingCache] | None = None
        self._length: int | None = None
        self._borrowed = self._told_alone = False
        self._of: RollingCache | None = None  # the pool that this is a view of: its fillers end with it

    def share(self, group: NodeGroup | None = None) -> None:
        """Open the pool, one for all ranks of the node. Collective: every rank calls it, before anything else is asked.

        Args:
            group: which ranks share memory; by default it is found out from the running process group.
        """
        self.close()
        group = NodeGroup.discover() if group is None else group
        pool = RollingPool.open(self.request, group)
        self._pool, self._end = pool, weakref.finalize(self, pool.stop)
        self._dataset, self.group = self._dataset_over(pool), group

    def begin_epoch(self) -> Integers:
        """What is resident now, int64, the same on all ranks of the node; this dataset's length until the next call.

        Waits for the minimum. The sampler of `sampler` calls it; with another one, call it before each epoch.
        Collective.
        """
        pool = self.pool
        if self.group.world == 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            if not self._told_alone and not self._borrowed:
                log.warning("each rank has a rolling cache of its own: call share() on all ranks to have one per node")
            self._told_alone = True
        return self._agreed(pool.begin_epoch)

    def resident(self) -> Integers:
        """What is resident now, without a new epoch. Collective, as `begin_epoch`."""
        return self._agreed(self.pool.resident)

    def sampler(self, *, shuffle: bool = True) -> RollingSampler:
        """What draws the resident samples of each epoch for this rank; CachedLoader makes one by itself. Collective."""
        self.resident()  # opens the pool, and with it its group
        return RollingSampler(self, shuffle=shuffle, seed=self.request.seed, epoch_samples=self.epoch_samples)

    def __loader_sampler__(self, *, shuffle: bool) -> RollingSampler:
        return self.sampler(shuffle=shuffle)

    def __cached__(self) -> CachedDataset:
        return self.dataset

    @property
    def is_open(self) -> bool:
        """Whether there is a pool by now."""
        return self._pool is not None

    @property
    def pool(self) -> RollingPool:
        """The memory, and who fills it."""
        if self._pool is None:
            self.share(NodeGroup())
        assert self._pool is not None
        return self._pool

    @property
    def dataset(self) -> CachedDataset:
        """The cached dataset behind the pool: every slot by its number."""
        if self._dataset is None:
            self.share(NodeGroup())
        assert self._dataset is not None
        return self._dataset

    @property
    def handle(self) -> StoreHandle:
        """What a `RollingWriter` in another process needs to append here: plain values, to be sent as you like."""
        return self.pool.store.handle

    def stats(self) -> RollingStats:
        """What is resident on this node, and what has been done since the pool was opened."""
        return self.pool.stats()

    def look_after(self) -> None:
        """Tell what fillers have said, and start those anew that have died."""
        self.pool.look_after()

    def view(self, transform: Callable[[Any], Any] | None) -> RollingCache:
        """The same pool with another transform; it does not close the pool."""
        dataset = dataset_over(cached_source(self.dataset).view(transform))
        view = RollingCache.__new__(RollingCache)  # no copy: that would be one for another process
        view.__dict__.update(self.__dict__)
        view.transform, view._dataset, view._borrowed, view._of = transform, dataset, True, self
        return view

    def close(self) -> None:
        """End the fillers and give the pool up in this process; the next use opens another one."""
        if self._borrowed:
            return
        if self._end is not None:
            self._end()
        if self._dataset is not None:
            self._dataset.close()
        self._pool = self._dataset = self._end = self._length = None
        self.group = NodeGroup()

    def __len__(self) -> int:
        return len(self.resident()) if self._length is None else self._length

    def __getitem__(self, index: SupportsIndex) -> Any:
        """Whatever sample lies in a slot now; of one that is being replaced, another resident one."""
        number, length = index.__index__(), len(self)
        if not -length <= number < self.pool.store.length:
            raise IndexError(f"index {number} is out of range: {length} samples are resident in this epoch")
        return cached_source(self.dataset).sample(number if number >= 0 else number + length)

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        """The samples of a batch."""
        return list(cached_source(self.dataset).samples(indices))

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process reads the same memory, and looks after no filler.
        pool = None if self._pool is None else self._pool.memory
        return self.__dict__ | {"_pool": pool, "_end": None, "_of": None, "_borrowed": self._pool is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pool = state["_pool"]
        self.__dict__.update(state | {"_pool": None if pool is None else RollingPool(pool)})

    def _agreed(self, look: Callable[[], Integers]) -> Integers:
        resident = self.group.lead(look)
        self._length = len(resident)
        return resident

    def _dataset_over(self, pool: RollingPool) -> CachedDataset:
        store, memory, slots = pool.store, pool.memory, Slots(pool.store.length)
        opened = OpenCache(
            CacheRequest(slots, budget=self.request.budget, spec=store.codec),
            slots,
            cache=store,
            counters=pool.counters,
            ring=Ring((Arc(store.length, store.length),) * len(memory.group.nodes)),
            group=memory.group,
            budget_bytes=memory.budget_bytes,
        )
        return dataset_over(CachedSource(opened, self.transform))


def share_pools(datasets: Iterable[Any], group: NodeGroup | None = None) -> None:
    """Have the rolling caches among some datasets shared by the ranks, unless they are. Collective."""
    for dataset in datasets:
        if isinstance(dataset, RollingCache):
            group = NodeGroup.discover() if group is None else group
            if not dataset.is_open or dataset.group != group:
                dataset.share(group)


class Slots(Dataset[Any]):
    """Stands for the source of what is in memory alone: samples cannot be loaded again by their number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise IndexError(f"sample {index} cannot be read: what has it was closed, or has {self.length} samples")
