"""The nesting of loaders that a user has: what is iterated over in it, and the cached datasets behind that.

A loader may stand alone, or in dicts, lists and tuples, or in a CombinedLoader of Lightning's; a dataset may be behind
a Subset, a ConcatDataset, or what stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, TypeAlias

from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_stocache.loading.dataset import CachedDataset, cached_in
from lightning_stocache.loading.grows import Stream, is_stream

__all__ = ["Cached", "cached_behind", "cached_in_leaves", "leaves_in", "loaders_in", "wrapped_loader"]

Cached: TypeAlias = CachedDataset | Stream


def leaves_in(loaders: Any) -> Iterator[Any]:
    """What Lightning iterates over in what a user gave the Trainer, DataLoader or not; of a wrapper, what it reads."""
    if hasattr(loaders, "iterables"):  # CombinedLoader, of lightning.pytorch or of pytorch_lightning
        yield from leaves_in(loaders.iterables)
    elif isinstance(loaders, MutableMapping | list | tuple):
        for inner in loaders.values() if isinstance(loaders, MutableMapping) else loaders:
            yield from leaves_in(inner)
    else:
        inner = wrapped_loader(loaders)
        yield loaders if inner is None else inner


def loaders_in(loaders: Any) -> Iterator[DataLoader[Any]]:
    """Every DataLoader in what a user gave the Trainer."""
    return (leaf for leaf in leaves_in(loaders) if isinstance(leaf, DataLoader))


def wrapped_loader(leaf: Any) -> DataLoader[Any] | None:
    """The DataLoader that timm's PrefetchLoader reads, which normalises its batches on the device."""
    kind = type(leaf)
    if (kind.__module__, kind.__name__) != ("timm.data.loader", "PrefetchLoader"):
        return None
    return leaf.loader if isinstance(leaf.loader, DataLoader) else None


def cached_behind(*leaves: Any) -> list[Cached]:
    """The cached datasets and streams that are read by what has a `dataset`, DataLoader or not; one per cache."""
    found: dict[int, Cached] = {}
    for leaf in leaves:
        for dataset in _inside(getattr(leaf, "dataset", None)):
            found.setdefault(id(dataset.counters or dataset), dataset)
    return list(found.values())


def cached_in_leaves(loaders: Any) -> list[Cached]:
    """Those that are read in a nesting of loaders, by a DataLoader or not (Fabric's)."""
    return cached_behind(*leaves_in(loaders))


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
