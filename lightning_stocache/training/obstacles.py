"""The reasons why a loader cannot be cached. They are found without reading, drawing or changing anything.

Reasons that only reading a source shows (samples that cannot be kept, an error) are found by `setup.open`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_stocache.loading.loader_sampler import index_sampler
from lightning_stocache.loading.loader_tree import cached_behind
from lightning_stocache.setup.request import check_budget
from lightning_stocache.torch_internals import is_loader_iterator
from lightning_stocache.training.loaders import hides_dataset, source_of
from lightning_stocache.training.options import CacheOptions

__all__ = ["cacheable_length", "title"]

_IN_MEMORY = (torch.Tensor, np.ndarray, str, bytes, range, set, frozenset)  # a list of batches, given as a loader


def title(leaf: Any) -> str:
    """The name of a loader in messages: the class of its dataset, or its own class if it is no DataLoader."""
    return type(source_of(leaf) if isinstance(leaf, DataLoader) else leaf).__name__


def cacheable_length(leaf: Any, stage: str, options: CacheOptions) -> int | None:
    """The length of a loader's dataset; -1 for a stream, None if there is nothing to cache.

    `leaf` is the object that Lightning iterates over for a stage.

    Raises:
        TypeError: the loader cannot be cached; the message has the reason and the remedy.
        ValueError: the dataset is empty, or the budget is a share of an unknown size.
    """
    if cached_behind(leaf):
        return None
    if not isinstance(leaf, DataLoader):
        if isinstance(leaf, _IN_MEMORY) or not (isinstance(leaf, Iterable) or hasattr(leaf, "__getitem__")):
            return None
        dataset = getattr(leaf, "dataset", None)
        wrap = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
        advice = f"Wrap its {type(dataset).__name__} with CachedDataset where you make it"
        raise TypeError(f"it is no torch.utils.data.DataLoader. {advice if wrap else 'Use a DataLoader'}")
    dataset = leaf.dataset
    if isinstance(dataset, IterableDataset):
        if not options.streams or options.is_off(stage):
            raise TypeError("it is iterable-style. streams=True keeps it as it passes, if all of it fits")
        check_budget(options.budgets[options.pot(stage)])
        _check_copy(leaf, "CachedStream")
        return -1
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except Exception as error:  # the user's code raised it; a training without a cache may never ask
        raise TypeError(f"it has no length: {error!r}. Give it a __len__") from error
    if not hasattr(dataset, "__getitem__"):
        raise TypeError("it is not map-style: it has no __getitem__")
    if length == 0:
        raise ValueError("it is empty: check the path or filter it is made from")
    if not hasattr(key := _first_key(leaf), "__index__"):
        raise TypeError(f"its sampler gives keys such as {key!r}, and a cache knows samples by number")
    _check_copy(leaf, "CachedDataset")
    return length


def _check_copy(loader: DataLoader[Any], cached: str) -> None:
    """Refuse a loader whose copy cannot read another dataset; `cached` names the class to use by hand."""
    kind = type(loader).__name__
    process = getattr(loader.multiprocessing_context, "Process", None)
    if isinstance(process, type) and issubclass(process, Thread):  # MONAI's ThreadDataLoader
        raise TypeError(f"the workers of {kind} are threads, and a cache is shared by processes")
    if any(is_loader_iterator(value) for name, value in vars(loader).items() if name != "_iterator"):
        raise TypeError(f"{kind} reads it already. Wrap it with {cached} where you make the loader")
    if hides_dataset(loader):
        raise TypeError(f"{kind} makes it by itself. Wrap it with {cached} there")


def _first_key(loader: DataLoader[Any]) -> Any:
    """The first key of a sampler, if it is visible without drawing; else 0."""
    keys = index_sampler(loader)
    while isinstance(keys, Sequence) and not isinstance(keys, str):
        if not keys:
            return 0
        keys = keys[0]
    return 0 if isinstance(keys, Iterable) and not isinstance(keys, str | torch.Tensor) else keys
