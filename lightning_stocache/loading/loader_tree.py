"""The nesting of a user's loaders: the loaders in it, and the cached datasets and streams that they read.

A loader may stand alone, or in dicts, lists and tuples, or in Lightning's CombinedLoader. A dataset may lie behind a
Subset, a ConcatDataset or a stand-in.

The room `growing` has the datasets that grow, and this room imports none of them. A loader knows them by dunder names
of their classes, which no user's dataset has.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_stocache.loading.dataset import Cached, cached_in

__all__ = ["Cached", "cached_in_leaves", "is_rolling", "is_stream", "leaves_in", "loaders_in", "wrapped_loader"]


def is_rolling(dataset: Any) -> bool:
    """Whether a dataset has samplers of its own, as a RollingCache has: `__loader_sampler__(shuffle=)` gives one."""
    return hasattr(type(dataset), "__loader_sampler__")


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is a stream that is kept, as a CachedStream is.

    `__kept__(batch_size, drop_last)` begins its next epoch. It returns the dataset in memory and this rank's batches,
    or None if the stream is read.
    """
    return hasattr(type(dataset), "__kept__")


def leaves_in(loaders: Any) -> Iterator[Any]:
    """The loaders in a nesting, in order, DataLoaders or not. For timm's wrapper, the loader that the wrapper reads."""
    if hasattr(loaders, "iterables"):  # CombinedLoader, of lightning.pytorch or of pytorch_lightning
        yield from leaves_in(loaders.iterables)
    elif isinstance(loaders, MutableMapping | list | tuple):
        for inner in loaders.values() if isinstance(loaders, MutableMapping) else loaders:
            yield from leaves_in(inner)
    else:
        inner = wrapped_loader(loaders)
        yield loaders if inner is None else inner


def loaders_in(loaders: Any) -> Iterator[DataLoader[Any]]:
    """Every DataLoader in a nesting."""
    return (leaf for leaf in leaves_in(loaders) if isinstance(leaf, DataLoader))


def wrapped_loader(leaf: Any) -> DataLoader[Any] | None:
    """The DataLoader that timm's PrefetchLoader reads, which normalises its batches on the device."""
    kind = type(leaf)
    if (kind.__module__, kind.__name__) != ("timm.data.loader", "PrefetchLoader"):
        return None
    return leaf.loader if isinstance(leaf.loader, DataLoader) else None


def cached_in_leaves(loaders: Any) -> list[Cached]:
    """The cached datasets and streams that a nesting of loaders reads, DataLoaders or not; one per cache."""
    found: dict[int, Cached] = {}
    for leaf in leaves_in(loaders):
        for dataset in _inside(getattr(leaf, "dataset", None)):
            found.setdefault(id(dataset.counters or dataset), dataset)
    return list(found.values())


def _inside(dataset: Any) -> Iterator[Cached]:
    if (cached := cached_in(dataset)) is not None:
        yield cached
    elif is_stream(dataset):
        yield dataset
    elif isinstance(dataset, Subset):
        yield from _inside(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _inside(part)
