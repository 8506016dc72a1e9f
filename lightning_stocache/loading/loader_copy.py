"""Copies of loaders that read another dataset, and `cache_loader`, which makes one around a cache.

A copy is made attribute by attribute, without a constructor: a constructor may draw random numbers (MONAI), remove
arguments (torch_geometric's `collate_fn`) or keep none of them. Sampler, generator and the user's own attributes are
the same objects.

Lightning re-creates loaders to insert a sampler: from the constructor's arguments, which it records in a loader hook
under names that begin with two underscores, or from the attributes. In the copy of a subclass these records contain the
new dataset. The copy of a DataLoader has another class, whose arguments are all attributes, so it has no records.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from threading import Thread
from types import MethodType
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from lightning_stocache.loading.dataset import StandIn, dataset_over
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.loader_sampler import batches_of, index_sampler
from lightning_stocache.loading.loader_tree import cached_in_leaves, wrapped_loader
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.loading.workers import InitOnSource
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.errors import description
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.sampling.sampler_domain import sampler_domain
from lightning_stocache.setup.open import open_caches
from lightning_stocache.setup.request import CacheRequest, Form, LoaderSettings, check_flag
from lightning_stocache.torch_internals import has_pinned_memory, is_loader_iterator

__all__ = ["cache_loader", "check_loader", "copy_over", "length_of", "reason_of", "settings_of"]

log = logging.getLogger(__name__)

Loader = TypeVar("Loader")


def cache_loader(
    loader: Loader,
    budget: int | float | str = "auto",
    *,
    freeze_random: bool = False,
    name: str | None = None,
    fingerprint: str = "",
    strict: bool = False,
    store: Form = "decoded",
    prefill: bool = False,
    dir: str | None = None,
    share: bool = True,
) -> Loader:
    """Copy a finished DataLoader, so that it reads through a cache: for loops and frameworks without a Trainer.

    StochasticCache does the same to the loaders of a Trainer. Batches, their order and all random draws stay the same.
    The copy of a DataLoader is a CachedLoader, which makes batches at memory speed; a loader of another class keeps its
    class. The copy has the sampler, `collate_fn`, workers and all other attributes of the loader. Its `dataset` has the
    attributes of the original dataset, and is an instance of its class. Use the copy in place of the loader.

    A loader that reads a cached dataset already is returned as it is. So is a loader that cannot be cached, with one
    warning: its dataset is iterable-style (`CachedStream` keeps streams), empty, without a length, or random in a way
    that cannot be split; its workers are threads; or it has begun to read.

    The memory is freed with the last reference to the copy (`del loader`) and its batches, at the latest when the
    process ends. To free it earlier, use a CachedLoader of a `CachedDataset`, which has `close`. `CacheMeter(loader)`
    measures hits and waiting.

    Args:
        loader: a `torch.utils.data.DataLoader` of any class, or timm's PrefetchLoader around one.
        budget: memory per node: "8GiB", "500MB", "60%" (of the dataset's cached size), "60% of free" (memory), "auto"
            (the whole dataset), bytes, or 0 (off). What does not fit is loaded every time.
        freeze_random: cache a random source as it is, with its first draw frozen.
        name: the name under which the cache stays in memory when the job ends; see `CachedDataset`.
        fingerprint: your version of the data, equal in all jobs of this name.
        strict: raise an error if the loader cannot be cached or there is no memory.
        store: "decoded" (samples as the source gives them, up to its first random step), "encoded" (files as they are,
            decoded after the cache), or "auto"; see `CachedDataset`.
        prefill: let idle workers load samples that no batch has asked for yet.
        dir: a directory on a disk of this machine, where the cache lies instead of in memory; see `CachedDataset`.
        share: whether the ranks of a node share one cache. If so, all ranks call `cache_loader` in the same order,
            after `init_process_group`. False: a cache for this rank alone, for a loader that other ranks do not have.

    Returns:
        The copy, or the loader itself if it is not cached. For timm's PrefetchLoader, a copy of it around the copy.

    Raises:
        TypeError: `loader` is no DataLoader, or an option is of the wrong type; (`strict`) it cannot be cached.
        ValueError: an option cannot have this value; (`strict`) the dataset is empty, or random and cannot be split.
        CacheMemoryError: (`strict`) the memory cannot be had.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = cache_loader(DataLoader([1.0, 2.0, 3.0], batch_size=2), budget="1MiB")
        >>> [batch.tolist() for epoch in range(2) for batch in loader]
        [[1.0, 2.0], [3.0], [1.0, 2.0], [3.0]]
        >>> del loader  # frees the memory
    """
    inner = wrapped_loader(loader)
    plain = loader if inner is None else inner
    if not isinstance(plain, DataLoader):
        kind = type(loader).__name__
        raise TypeError(f"loader must be a torch.utils.data.DataLoader, got {kind}. Give the loader inside a wrapper")
    check_flag("share", share)
    request = CacheRequest(
        plain.dataset,
        "",
        Budget.parse(budget),
        freeze_random=freeze_random,
        name=name,
        fingerprint=fingerprint,
        strict=strict,
        store=store,
        prefill=prefill,
        dir=dir,
    )
    if cached_in_leaves(plain) or request.budget.off:
        return loader
    dataset = _cached_dataset(plain, request, NodeGroup.discover() if share else NodeGroup())
    if dataset is None:
        return loader
    cached = copy_over(plain, dataset)
    if inner is None:
        return cached  # type: ignore[return-value]  # a CachedLoader is a DataLoader
    wrapper: Any = copy.copy(loader)
    wrapper.loader = cached
    return wrapper  # type: ignore[no-any-return]


def _cached_dataset(loader: DataLoader[Any], request: CacheRequest, group: NodeGroup) -> StandIn | None:
    """The cached dataset of a loader, or None, with one warning, if it is not cached. Collective."""
    title = type(loader.dataset).__name__

    def finding() -> int | str:
        try:
            if isinstance(loader.dataset, IterableDataset):
                raise TypeError("it is iterable-style. Wrap the stream with CachedStream where you make the loader")
            check_loader(loader, with_running=False)
            return length_of(loader.dataset)
        except (TypeError, ValueError) as error:
            if request.strict:
                raise type(error)(f"{title} cannot be cached: {error}") from error
            return str(error)

    reason = reason_of(group.exchange(group.together(finding)))
    if reason is not None:
        if group.rank == 0:
            log.warning("%s passes through uncached: %s", title, reason)
        return None
    drawn = None if request.name is not None else sampler_domain(index_sampler(loader), request.length)
    request = replace(request, reader=settings_of(loader), domain=drawn)
    [opened] = open_caches([request], {request.pot: request.budget}, group)
    if not any(group.exchange(opened.cache is not None)):
        opened.close()
        return None
    opened.tell()
    return StandIn(dataset_over(CachedSource(opened)))


# ---- any loader ----


def check_loader(loader: DataLoader[Any], *, with_running: bool = True) -> None:
    """Refuse a loader whose class reads in a way that no cache can serve.

    Unless `with_running`, no persistent workers may run: the order of a copy would be that of a loader that is new.

    Raises:
        TypeError: its workers are threads, or it has begun to read.
    """
    kind = type(loader).__name__
    process = getattr(loader.multiprocessing_context, "Process", None)
    if isinstance(process, type) and issubclass(process, Thread):  # MONAI's ThreadDataLoader
        raise TypeError(f"the workers of {kind} are threads, and a cache is shared by processes")
    iterators = {name for name, value in vars(loader).items() if is_loader_iterator(value)}
    if iterators - ({"_iterator"} if with_running else set()):
        cached = "CachedStream" if isinstance(loader.dataset, IterableDataset) else "CachedDataset"
        raise TypeError(f"{kind} reads it already. Wrap it with {cached} where you make the loader")


def length_of(dataset: Any) -> int:
    """The length of a map-style dataset.

    Raises:
        TypeError: it has none.
        ValueError: it is empty.
    """
    try:
        length = len(dataset)
    except Exception as error:  # the user's code raised it; a training without a cache may never ask
        raise TypeError(
            f"it has no length: {description(error)}. Give it a __len__, if its sampler draws indices"
        ) from error
    if length == 0:
        raise ValueError("it is empty: check the path or filter it is made from")
    return length


def reason_of(findings: Sequence[int | str | None]) -> str | None:
    """The reason why a loader is not cached, given the finding of each rank: the dataset's length, or a reason."""
    reasons = [finding for finding in findings if isinstance(finding, str)]
    if not reasons and len(set(findings)) > 1:
        return f"its length differs between the ranks, {list(findings)}. Give every rank the whole dataset"
    return reasons[0] if reasons else None


def settings_of(loader: DataLoader[Any], stage: str = "") -> LoaderSettings:
    """The settings of a loader that determine its memory besides the cache."""
    draws_lists = loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler)
    batch_size: Any = loader.batch_size or getattr(batches_of(loader), "batch_size", 1)
    context: Any = loader.multiprocessing_context
    init: Any = loader.worker_init_fn
    method = None if context is None else context.get_start_method()
    return LoaderSettings(
        batch_size,
        loader.num_workers,
        loader.prefetch_factor,
        method,
        init,
        stage,
        draws_lists=draws_lists,
        pins=loader.pin_memory and has_pinned_memory(),
    )


def copy_over(
    loader: DataLoader[Any],
    dataset: Dataset[Any],
    kind: type[CachedLoader] = CachedLoader,
    sampler: Sampler[Any] | None = None,
) -> DataLoader[Any]:
    """A copy of a loader that reads another dataset of the same length.

    Args:
        loader: the loader, which stays as it is.
        dataset: the dataset of the copy.
        kind: the class of the copy of a DataLoader. A loader of another class keeps its class.
        sampler: what the copy draws from, if not from the loader's sampler. The loader must have a `batch_size`.
    """
    has_own_class = type(loader) is not DataLoader
    renewed: DataLoader[Any] = object.__new__(type(loader) if has_own_class else kind)
    state = dict(loader.__getstate__() if isinstance(loader, CachedLoader) else vars(loader))
    for name, value in list(state.items()):
        if inspect.ismethod(value) and value.__self__ is loader:  # `collate_fn=self.collate`
            state[name] = MethodType(value.__func__, renewed)
        elif isinstance(value, DataLoader) and value.dataset is loader.dataset:  # Accelerate's loaders read another
            state[name] = copy_over(value, dataset)
        elif name.startswith("__"):
            del state[name]
            if has_own_class:
                state[name] = _with_value(value, loader.dataset, dataset)
    state |= {"dataset": dataset, "_iterator": None}
    if isinstance(renewed, CachedLoader):
        state["position"] = LoaderState()
    else:
        state["worker_init_fn"] = InitOnSource.around(loader.worker_init_fn)
    if sampler is not None:
        state |= {"sampler": sampler, "batch_sampler": BatchSampler(sampler, state["batch_size"], loader.drop_last)}
    # Without __setattr__: DataLoader's refuses to change a dataset, and Lightning's records the change.
    vars(renewed).update(state)
    own: Any = object.__getstate__(loader)
    for name, value in (own[1] if isinstance(own, tuple) else {}).items():  # of a class with `__slots__`
        object.__setattr__(renewed, name, value)
    return renewed


def _with_value(record: Any, before: Any, after: Any) -> Any:
    """A record of a constructor's arguments (one, a tuple or a dict) with one value in place of another."""
    if record is before:
        return after
    if isinstance(record, tuple):
        return tuple(after if value is before else value for value in record)
    if isinstance(record, dict):
        return {name: after if value is before else value for name, value in record.items()}
    return record
