"""A DataLoader that reads a warm cache at memory speed.

Sending a finished batch from a worker costs more than making it from memory. So the main process gathers the batches
whose samples are READY (`epoch`), and workers make the others, or all where there is more to do (`CachedLoader.route`).

Order, contents and the random states are those of a plain DataLoader with the same arguments, bit for bit, because all
draws are made on the caller's thread at the moments at which DataLoader makes them (`draws`).

Differences:

- The storage of a batch, or of a sample out of the cache, cannot be resized.
- Small batches lie together in up to 2 MiB of memory, which is freed with the last of them: `clone` one that you keep.
- Batches of four-dimensional samples in the format `channels_last` are contiguous, as DataLoader's workers make them.
- `is_shared()` is False where DataLoader's worker batches say True. Yet a process that is forked while a batch is held
  shares its memory, and sees the batch that comes there next.
- Tensors of a `collate_fn` in a worker that share memory (a tensor and a view of it) come without what they share.
- The workers' random streams see only the misses: a source must not be random.
- The samples of a batch are loaded before any is transformed: after an error of the source, a random transform has
  drawn less than in DataLoader.
- If a transform returns the same tensor each time, each sample has its own values; DataLoader's workers stack the
  values of the last sample.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from lightning_stocache.cache.store import NO_SLOT, Store
from lightning_stocache.loading.dataset import CachedDataset, cached_in, cached_source
from lightning_stocache.loading.draws import ResumableBatches
from lightning_stocache.loading.epoch import Batches, Epoch, PlainEpoch
from lightning_stocache.loading.loader_sampler import (
    batches_of,
    deals_to_ranks,
    locality_sampler,
    set_epoch,
)
from lightning_stocache.loading.loader_tree import is_rolling, is_stream
from lightning_stocache.loading.maker import Maker
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.loading.workers import InitOnSource, Workers, loader_like
from lightning_stocache.sampling.residents import StreamBatches
from lightning_stocache.sampling.sampler_domain import sampler_domain
from lightning_stocache.setup.request import check_choice, check_flag
from lightning_stocache.torch_internals import has_pinned_memory, iterator_of, shut_down, start_epoch

__all__ = ["CachedLoader", "Gather"]

Gather = Literal["auto", "main", "worker"]

Route = Literal["main", "worker"]
"""The process that makes batches: the main process, from the cache and from loaded samples, or a worker."""

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
        gather: which process makes batches: "main" (the main process, from memory; workers those that miss a sample),
            "worker" (workers make all), or "auto": workers where there are some, and samples are records, have a
            transform to run, or go to a `collate_fn` of the user's; else the main process.
        locality: draw by a `LocalitySampler`, seeded by `seed_everything`: each rank has its part of each global batch,
            of samples that its node has. Call `dataset.share()` before, and `set_epoch` before each epoch (Fabric
            does). The indices of a `sampler` of your own are dealt, unless it deals to ranks itself.
        num_replicas: with `locality`, the number of ranks that share the data, by default all; fewer if some ranks work
            on the same samples (`**fabric.strategy.distributed_sampler_kwargs`).
        rank: with `locality`, the rank of this process among them.
        positional: the next arguments of `torch.utils.data.DataLoader`, from `collate_fn` on.
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

    # Defaults of the class: `copy_over` makes a CachedLoader by copying the `__dict__` of a DataLoader.
    gather: Gather = "auto"
    _started = False  # whether a persistent loader has drawn its base seed
    _workers: Workers | None = None  # persistent ones
    _maker: Maker | None = None  # of batches in this process
    _current: weakref.ref[Batches] | None = None
    _plain: DataLoader[Any] | None = None  # what makes DataLoader's own epochs
    _sizes: deque[int]  # of the batches that its workers are asked for, where there is no cache
    _in_memory: CachedLoader | None = None  # the loader of a stream once the whole stream is in memory

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        *positional: Any,
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
        super().__init__(dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, *positional, **arguments)
        self.gather, self.position = gather, LoaderState()

    def __iter__(self) -> Any:
        """A new epoch. With persistent workers all iterators of the loader go on with it, as in DataLoader."""
        in_memory = self._stream_in_memory(self.dataset) if is_stream(self.dataset) else None
        if in_memory is not None:
            return iter(in_memory)
        with self.position.ledger.beginning():
            return self._begin()

    def _begin(self) -> Batches:
        persistent = self.persistent_workers and self.num_workers > 0
        batches = self._current() if persistent and self._current is not None else None
        if batches is None or batches.is_inherited:
            batches = Batches(self, self.position)
        batches.close()
        self.position.begin(self)
        cached = self._cached()
        is_first = not (persistent and self._started)
        if cached is not None:
            self._refresh(cached, is_first=is_first)
        try:
            epoch = self._epoch(cached, is_first=is_first)
        except BaseException:
            self._keep(None)
            raise
        batches.begin(epoch)
        self._started = True
        self._current = weakref.ref(batches)
        return batches

    def _refresh(self, cached: CachedSource, *, is_first: bool) -> None:
        """Before an epoch: look whether the source has changed. Persistent workers have one that stays as it was."""
        if is_first and not cached.knows_ranks:
            cached.look_at_ranks()
        if is_first or cached.changes.source_has_changed:
            cached.changes.refresh_unread(is_compared=True)
            cached.changes.refresh()
        cached.changes.share_with(self._other_readers, [self.dataset, cached_in(self.dataset)])

    def _epoch(self, cached: CachedSource | None, *, is_first: bool) -> Epoch | PlainEpoch:
        """The epoch that begins now. It `is_first` if DataLoader would draw a base seed for it.

        That is the first epoch of a persistent loader, and each epoch of another loader.
        """
        route = self.route
        workers = None
        if cached is not None:
            self._end_unusable_workers(cached)
            workers = self._workers
        cache = None if cached is None or route != "main" else self._gathers_from(cached)
        if workers is not None and cached is not None and cached.changes.source_has_changed:
            route = "worker"  # they go on, with the source that they have
        if cached is None or route is None or (route == "main" and cache is None):
            self._keep(None)
            return self._plain_epoch(cached, is_first=is_first)
        self._end_plain()
        has_to_load = cache is None or not self._has_nothing_to_load(cache)
        is_start = self.persistent_workers and workers is None  # they have a source of their own from now on
        asks = self.num_workers > 0 and (has_to_load or is_start)
        if asks and workers is None:
            workers = Workers(self, is_late=not is_first)
            self.keep(workers)
        self.position.ledger.is_known = True
        maker = self._maker or Maker()
        return Epoch(self, cached, maker, cache, workers, self.position, keep=self.keep, asks=asks, draws_seed=is_first)

    def _end_unusable_workers(self, cached: CachedSource) -> None:
        """End persistent workers of which one has ended, or that have another cache.

        Raises:
            RuntimeError: a worker was killed, and no epoch has raised that.
        """
        workers = self._workers
        if workers is not None:
            workers.raise_death()
            has_cache = workers.cache is cached.cache or cached.changes.source_has_changed
            if not workers.are_alive or not has_cache:
                self._keep(None)

    def keep(self, workers: Workers) -> None:
        """Keep the workers of an epoch for later epochs, if they are persistent."""
        if self.persistent_workers:
            self._keep(workers)

    def _keep(self, workers: Workers | None) -> None:
        before, self._workers = self._workers, workers
        if before is not None and before is not workers:
            before.close()

    def _gathers_from(self, cached: CachedSource) -> Store | None:
        """The cache, if batches are gathered from it; None if `default_collate` makes something else of its samples."""
        cache = cast(Store, cached.cache)
        if self._maker is None:
            self._maker = Maker(pins=self.pin_memory and has_pinned_memory())
        return None if self._maker.collator_of(cache) is None else cache

    def _has_nothing_to_load(self, cache: Store) -> bool:
        """Whether all samples that the loader's sampler can draw are known to be READY."""
        if cache.full and len(cast(Any, self.dataset)) <= cache.length:
            return True
        drawn = sampler_domain(batches_of(self), cache.length) if cache.filled else None
        if drawn is None or len(drawn) > cache.filled:
            return False
        return bool((cache.lookup(drawn.indices) != NO_SLOT).all())

    def _plain_epoch(self, cached: CachedSource | None, *, is_first: bool) -> PlainEpoch:
        """DataLoader's own epoch, over a copy of the loader. A running persistent loader draws no base seed again."""
        if self._plain is None or not self.persistent_workers:
            self._plain = self._plain_loader(cached, is_first=is_first)
        self._sizes.clear()
        counters = None if cached is None else cached.opened.counters
        self.position.ledger.is_known = cached is not None and (not self.num_workers or cached.cache is None)
        return PlainEpoch(start_epoch(self._plain), counters, self._sizes)

    def _plain_loader(self, cached: CachedSource | None, *, is_first: bool) -> DataLoader[Any]:
        """A DataLoader like this, whose keys are checked as they are drawn, or counted if there is no cache."""
        is_batched = self.batch_sampler is not None
        sizes = self._sizes = deque[int]()
        check: Callable[[Any], None] | None = None
        if cached is not None and cached.cache is not None:
            check = cached.check_keys if is_batched else lambda key: cached.check_keys([key])
        elif cached is not None and self.num_workers:
            check = (lambda keys: sizes.append(len(keys))) if is_batched else lambda key: sizes.append(1)
        draws = ResumableBatches(batches_of(self), self.position, check)
        return loader_like(
            self,
            None if is_first else torch.default_generator if self.generator is None else self.generator,
            **{"batch_sampler" if is_batched else "sampler": draws},
            worker_init_fn=InitOnSource.around(self.worker_init_fn),
        )

    def _end_plain(self) -> None:
        plain, self._plain = self._plain, None
        iterator = None if plain is None else iterator_of(plain)
        if iterator is not None:
            shut_down(iterator)

    def _stream_in_memory(self, stream: Any) -> CachedLoader | None:
        """The loader of a stream that is in memory as a whole; None if the stream is read in this epoch."""
        size = self.batch_size
        epoch = None if size is None else stream.__kept__(size, self.drop_last)
        if epoch is None:
            return None
        dataset, batches = epoch
        self._end_plain()  # persistent workers, which had the stream to read
        if self._in_memory is not None and self._in_memory.dataset is not dataset:
            self._in_memory.close()  # its memory was given up: the stream was shared again
            self._in_memory = None
        if self._in_memory is None:
            self._in_memory = self._loader_in_memory(dataset, batches, stream.source)
            self._in_memory.position.ledger = self.position.ledger
        cast(StreamBatches, self._in_memory.batch_sampler).batches = batches.batches
        return self._in_memory

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
        no cache, or no batches                        None          None
        a `collate_fn` of the user's                   None          "worker" (None: "main")
        a transform for each                           None          "worker" (None: "main")
        nothing, to records                            None          "worker" (None: "main")
        nothing, to rows                               "main"        "main" ("worker")
        =============================================  ============  ========================

        In brackets: with `gather="main"`, and with `gather="worker"`.
        """
        cached = self._cached()
        if cached is None or cached.cache is None or self.batch_sampler is None:
            return None
        if self.collate_fn is not default_collate or cached.transforms or not cached.cache.codec.is_fixed:
            return "worker" if self.num_workers and self.gather != "main" else None
        return "worker" if self.gather == "worker" and self.num_workers else "main"

    def close(self) -> None:
        """End the epoch under way, and the workers; a new epoch starts new ones."""
        batches = None if self._current is None else self._current()
        if batches is not None and not batches.is_inherited:
            batches.close(ends_workers=True)
            batches.begin(PlainEpoch.none())
        self._keep(None)
        self._end_plain()
        self._current = None
        self._maker = None
        self._started = False
        if self._in_memory is not None:
            self._in_memory.close()
            self._in_memory = None

    @property
    def _other_readers(self) -> list[Any]:
        """The user's own code that may read the state of the dataset: of workers only what runs there, or is shared."""
        readers: list[Any] = [] if self.collate_fn is default_collate else [self.collate_fn]
        if not self.num_workers:
            readers += [part for part in (self.sampler, self.batch_sampler) if part is not None]
        return readers

    def _cached(self) -> CachedSource | None:
        dataset = cached_in(self.dataset)
        return None if dataset is None else cached_source(dataset)

    def invalidate(self, indices: Sequence[int] | None = None) -> None:
        """Say that samples of its dataset have changed; see `CachedDataset.invalidate`."""
        dataset = cached_in(self.dataset)
        if dataset is not None:
            dataset.invalidate(indices)
        elif any(cached_in(part) for part in _parts(self.dataset)):
            raise TypeError("the dataset of this loader is made of others: call invalidate of the CachedDataset in it")

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch in the sampler, so that each epoch has its own order."""
        set_epoch(self, epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader in its epoch, as plain values. It counts the batches that were handed out.

        Each rank needs its own state if the order is drawn from the process's generators (RandomSampler).

        Raises:
            TypeError: the dataset is a stream or a RollingCache, which cannot resume.
            RuntimeError: an epoch is under way whose batches come in any order (`in_order=False`).
        """
        if isinstance(self.dataset, IterableDataset) or is_rolling(self.dataset):
            raise TypeError(f"a loader of a {type(self.dataset).__name__} cannot resume: it has no state")
        is_in_order = not self.num_workers or getattr(self, "in_order", True)
        if not is_in_order and self.position.is_within_epoch:
            raise RuntimeError("with in_order=False a loader cannot say which batches it has handed out")
        return self.position.as_dict(self)

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
        return None if self._plain is None else iterator_of(self._plain)

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a process that is sent the loader, starts with nothing.
        nothing = dict.fromkeys(("_workers", "_maker", "_current", "_plain", "_in_memory"))
        return self.__dict__ | nothing | {"_started": False, "position": LoaderState()}


def _parts(dataset: Any) -> Iterator[Any]:
    """The datasets of which a Subset or a ConcatDataset is made, at any depth."""
    for part in [getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ())]:
        if part is not None:
            yield part
            yield from _parts(part)
