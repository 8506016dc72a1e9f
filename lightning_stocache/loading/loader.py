"""A DataLoader that reads a warm cache at memory speed.

Sending a finished batch from a worker costs more than making it from memory. So the main process gathers the samples
that are READY, by one `take` per field into recycled memory, and workers load only the others, into the memory of the
batch. Once everything is READY there are no workers, and a thread gathers one batch ahead. With a per-sample transform
on the CPU, of records, and by a `collate_fn` of the user's, workers make whole batches in shared memory.

Order, contents and the random states are those of a plain DataLoader with the same arguments, bit for bit: all draws
are made on the caller's thread at the moments at which DataLoader makes them (`index_stream`). Samples
without batching, `in_order=False` and a dataset that is not cached have no short cut: DataLoader makes their batches.

Differences:

- The storage of a batch, or of a sample out of the cache, cannot be resized.
- Small batches lie together in up to 2 MiB of memory, which is freed with the last of them: `clone` one that you keep.
- `is_shared()` is False where DataLoader's worker batches say True. Yet a process that is forked while a batch is held
  shares its memory, and sees the batch that comes there next.
- The workers' random streams see only the misses: a source must not be random.
- The samples of a batch are loaded before any is transformed: after an error of the source, a random transform has
  drawn less than in DataLoader.
- If a transform returns the same tensor each time, each sample has its own values; DataLoader's workers stack the
  values of the last sample.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from lightning_stocache.cache.store import gathers
from lightning_stocache.loading.dataset import CachedDataset, cached_in, cached_source
from lightning_stocache.loading.epoch import Epoch, Resources, Route
from lightning_stocache.loading.index_stream import IndexStream
from lightning_stocache.loading.loader_sampler import (
    batches_of,
    deals_to_ranks,
    locality_sampler,
    set_epoch,
)
from lightning_stocache.loading.loader_tree import Stream, is_rolling, is_stream
from lightning_stocache.loading.position import CheckedDraws, CountedBatches, LoaderState, ResumableBatches
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.loading.worker_pool import InitOnSource
from lightning_stocache.sampling.residents import StreamBatches
from lightning_stocache.setup.request import check_choice, check_flag
from lightning_stocache.torch_internals import knows_workers, shut_down

__all__ = ["CachedLoader", "Gather"]

Gather = Literal["auto", "main", "worker"]

_NO_SAMPLING = (
    "CachedLoader has no option sampling: say locality=True in place of sampling='locality', and give a "
    "DistributedSampler as sampler in place of sampling='global'"
)


class CachedLoader(DataLoader[Any]):
    """A DataLoader for a CachedDataset: the same batches, at memory speed where they are cached.

    Args:
        dataset: a CachedDataset, a CachedStream, or a RollingCache, whose sampler it takes; any other is loaded as
            DataLoader does.
        batch_size: samples per batch.
        gather: which process makes batches: "main" (the main process, from memory; workers only load what is missing),
            "worker" (workers make whole batches), or "auto": workers where there are some, and samples are records,
            have a transform to run, or go to a `collate_fn` of the user's; else the main process.
        locality: draw by a `LocalitySampler`, seeded by `seed_everything`: each rank has its part of each global batch,
            of samples that its node has. Call `dataset.share()` before, and `set_epoch` before each epoch (Fabric
            does). The indices of a `sampler` of your own are dealt, unless it deals to ranks itself.
        num_replicas: with `locality`, the number of ranks that share the data, by default all; fewer if some ranks work
            on the same samples (`**fabric.strategy.distributed_sampler_kwargs`).
        rank: with `locality`, the rank of this process among them.
        arguments: all other arguments of `torch.utils.data.DataLoader`, with their meaning there.

    Raises:
        ValueError: `gather` is none of these, `gather="worker"` without workers, or `locality` without a `batch_size`.
        TypeError: an argument is none of DataLoader's.

    Example:
        >>> import torch
        >>> from lightning_stocache import CachedDataset
        >>> dataset = CachedDataset([(torch.tensor([i, i]), i) for i in range(6)])
        >>> loader = CachedLoader(dataset, batch_size=3)
        >>> [labels.tolist() for pairs, labels in loader]
        [[0, 1, 2], [3, 4, 5]]
        >>> dataset.close()
    """

    position: LoaderState
    """The position of the loader in its epoch."""

    # The values of a new loader, also of one that copies a DataLoader's attributes and was never constructed.
    gather: Gather = "auto"
    _started = False  # whether a persistent loader has drawn its base seed
    resources: Resources | None = None
    _current: weakref.ref[Epoch] | None = None
    _plain: Any = None
    _in_memory: CachedLoader | None = None  # the loader of a stream once the whole stream is in memory

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        *,
        gather: Gather = "auto",
        locality: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        **arguments: Any,
    ) -> None:
        check_choice("gather", gather, Gather)
        if gather == "worker" and num_workers == 0:
            raise ValueError("gather='worker' needs num_workers > 0")
        check_flag("locality", locality)
        if "sampling" in arguments:
            raise TypeError(_NO_SAMPLING)
        if is_rolling(dataset) and sampler is None and batch_sampler is None:
            sampler, shuffle = cast(Any, dataset).__loader_sampler__(shuffle=bool(shuffle)), None
        elif locality and batch_sampler is None and not deals_to_ranks(sampler):
            sampler = locality_sampler(dataset, batch_size, bool(shuffle), num_replicas, rank, draws=sampler)
            shuffle = None
        super().__init__(dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, **arguments)
        self.gather, self.position = gather, LoaderState()

    def __iter__(self) -> Any:
        """A new epoch. With persistent workers all iterators of the loader go on with it, as in DataLoader."""
        self.position.waiting.begin()
        if is_stream(self.dataset):
            return self._iter_stream(self.dataset)
        persistent = self.persistent_workers and self.num_workers > 0
        last = None if not persistent or self._current is None else self._current()
        if last is not None:
            last.close()
        started = persistent and (self._started or self._plain is not None)
        self.position.begin(self)
        cached = self._cached()
        if cached is not None and not started and not cached.knows_ranks:
            cached.look_at_ranks()
        if cached is not None and (not started or cached.changes.are_heard):
            cached.changes.refresh_unread(is_compared=True)
            cached.changes.refresh()  # persistent workers have a source of their own, which stays as it was
        if cached is not None:
            cached.changes.share_with(self._other_readers, [self.dataset, cached_in(self.dataset)])
        resources = None if cached is None else self._resources_for(cached)
        if resources is not self.resources:
            self._change(resources)
        if cached is None or resources is None:
            plain = self._iter_plainly(seeded=persistent and self._started and self._plain is None)
            if last is not None:
                last.next_epoch = plain
            return plain
        # New workers with random transforms need a new seed; new ones that only load do not.
        first = not started or (resources.route == "worker" and resources.workers is None)
        stream = IndexStream(self, first, self.position)
        self._started = True
        whole = resources.route == "main" and resources.cache.full and len(self.dataset) <= resources.cache.length  # type: ignore[arg-type]
        passes = cached.cache is None
        warm = whole and stream.trusted and not passes
        epoch = Epoch(self, cached, stream, resources, self.position, warm=warm, passes=passes)
        if last is not None:
            last.next_epoch = epoch
        self._current = weakref.ref(epoch)
        return epoch

    def _iter_plainly(self, seeded: bool) -> Any:
        """DataLoader's own epoch. A persistent loader that has drawn its base seed draws none again."""
        generator, init = self.generator, self.worker_init_fn
        if seeded:
            self.generator = torch.Generator().set_state((generator or torch.default_generator).get_state())
        self.worker_init_fn = InitOnSource.of(init)
        batches, name = batches_of(self), "sampler" if self.batch_sampler is None else "batch_sampler"
        stream = isinstance(self.dataset, IterableDataset)
        draws = batches if stream else self._checked(ResumableBatches(batches, self.position))
        vars(self)[name] = draws  # past its __setattr__
        try:
            return CountedBatches(super().__iter__(), self.position)
        finally:
            vars(self)[name] = batches
            self.generator, self.worker_init_fn = generator, init

    def _checked(self, draws: ResumableBatches) -> ResumableBatches | CheckedDraws:
        """The draws of an epoch that DataLoader makes, checked for keys that are no indices."""
        cached = self._cached()
        if cached is None or cached.cache is None or cached.changes.has_other_keys:
            return draws
        return CheckedDraws(draws, cached.check_keys, is_batched=self.batch_sampler is not None)

    def _iter_stream(self, stream: Stream) -> Any:
        """An epoch of a stream: DataLoader's own, or that of a dataset once the whole stream is in memory."""
        size = self.batch_size
        epoch = None if size is None else stream.__kept__(size, self.drop_last)
        if epoch is None:
            return self._iter_plainly(seeded=False)
        dataset, batches = epoch
        if self._plain is not None:
            shut_down(self._plain)  # persistent workers, which had the stream to read
            self._plain = None
        if self._in_memory is not None and self._in_memory.dataset is not dataset:
            self._in_memory.close()  # its memory was given up: the stream was shared again
            self._in_memory = None
        if self._in_memory is None:
            self._in_memory = self._loader_in_memory(dataset, batches, stream.source)
            self._in_memory.position.waiting = self.position.waiting
        cast(StreamBatches, self._in_memory.batch_sampler).batches = batches.batches
        return iter(self._in_memory)

    def _loader_in_memory(self, dataset: CachedDataset, batches: StreamBatches, source: Any) -> CachedLoader:
        names = ["num_workers", "collate_fn", "pin_memory", "timeout", "generator", "prefetch_factor", "gather"]
        names += ["persistent_workers", "multiprocessing_context", "in_order"]  # the last since torch 2.6
        arguments = {name: getattr(self, name) for name in names if hasattr(self, name)}
        init = None if self.worker_init_fn is None else InitOnSource(self.worker_init_fn, source)
        return CachedLoader(dataset, batch_sampler=batches, worker_init_fn=init, **arguments)

    @property
    def route(self) -> Route | None:
        """The process that makes batches; None if DataLoader makes them.

        =============================================  ============  ========================
        what is done to samples after the cache        no workers    with workers
        =============================================  ============  ========================
        no cache                                       None          None
        no batches, or `in_order=False`                None          None
        a `collate_fn` of the user's                   None          "worker" (None: "main")
        a transform for each                           None          "worker" (None: "main")
        nothing, to records                            None          "worker" (None: "main")
        nothing, to rows                               "main"        "main" ("worker")
        =============================================  ============  ========================

        In brackets: with `gather="main"`, and with `gather="worker"`.
        """
        cached = self._cached()
        if cached is None or cached.cache is None:
            return None
        if self.batch_sampler is None or not getattr(self, "in_order", True):
            return None
        if self.num_workers and not knows_workers():
            return None
        if self.collate_fn is not default_collate or cached.transforms or not gathers(cached.cache):
            return "worker" if self.num_workers and self.gather != "main" else None
        return "worker" if self.gather == "worker" and self.num_workers else "main"

    def close(self) -> None:
        """End the epoch under way, and the workers; a new epoch starts new ones."""
        if self._current is not None and (epoch := self._current()) is not None:
            epoch.close()
        self._change(None)
        self._current, self._started = None, False
        if self._in_memory is not None:
            self._in_memory.close()
            self._in_memory = None

    def _change(self, resources: Resources | None) -> None:
        """Replace the resources, perhaps by none, and release those before."""
        if self.resources is not None:
            self.resources.release()
        self.resources = resources

    def _resources_for(self, cached: CachedSource) -> Resources | None:
        """The resources for this cache and this route, kept or new; None if there is no short cut."""
        cache, route, last = cached.cache, self.route, self.resources
        if last is not None and cached.changes.are_heard and not last.cache.closed and last.workers is not None:
            return last if last.persistent and last.is_usable() and last.workers is not None else None
        if cache is None or route is None:
            return None
        if last is not None and last.cache is cache and last.route == route and last.is_usable():
            return last
        try:
            return Resources(self, cache, route)
        except (TypeError, RuntimeError):  # default_collate refuses these samples, or keeps a subclass
            return None

    @property
    def _other_readers(self) -> list[Any]:
        """The user's own code that may read the state of the dataset: of workers only what runs there, or is shared."""
        readers: list[Any] = [] if self.collate_fn is default_collate else [self.collate_fn]
        if not self.num_workers:
            readers += [part for part in (self.sampler, self.batch_sampler) if part is not None]
        return readers

    def _cached(self) -> CachedSource | None:
        """The cached source of the dataset, if it is cached."""
        dataset = cached_in(self.dataset)
        return None if dataset is None else cached_source(dataset)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch in the sampler, so that each epoch has its own order."""
        set_epoch(self, epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader in its epoch, as plain values. It counts the batches that were handed out.

        Each rank needs its own state if the order is drawn from the process's generators (RandomSampler).

        Raises:
            TypeError: the dataset is a stream or a RollingCache, which cannot resume.
        """
        if isinstance(self.dataset, IterableDataset) or is_rolling(self.dataset):
            raise TypeError(f"a loader of a {type(self.dataset).__name__} cannot resume: it has no state")
        return self.position.of(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next epoch resume at the position of a state, with the remaining batches.

        With another batch size or number of ranks, it resumes after the same samples. Later calls of `set_epoch` may
        count on, or from zero as Fabric does.

        Raises:
            ValueError: the value is no state of a CachedLoader.
        """
        self.position.load(state_dict)

    @property
    def _iterator(self) -> Any:
        """DataLoader's own persistent iterator. Lightning shuts a loader down by setting it to None."""
        return self._plain

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        if iterator is None:
            self.close()
        self._plain = iterator

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a process that is sent the loader, starts with nothing.
        nothing = dict.fromkeys(("resources", "_current", "_plain", "_in_memory"))
        return self.__dict__ | nothing | {"_started": False, "position": LoaderState()}
