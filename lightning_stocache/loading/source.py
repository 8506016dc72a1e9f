"""What can be a source: a map-style dataset, with samples, that is not cached already."""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset, IterableDataset, Subset

__all__ = ["check_source"]


def check_source(source: Any, cached: type) -> None:
    """Refuse what cannot be cached. Nothing is read.

    Args:
        source: what the user gave.
        cached: the class of datasets that are cached already; one inside a Subset or ConcatDataset is found too.

    Raises:
        TypeError: it is iterable-style, has no length, or is cached already.
        ValueError: it is empty.

    Example:
        >>> check_source([], cached=dict)
        Traceback (most recent call last):
            ...
        ValueError: source must have at least one sample, got an empty list
    """
    if _holds(source, cached):
        raise TypeError(f"source must be the dataset itself, got a {type(source).__name__} that is cached already")
    if isinstance(source, type):
        raise TypeError(f"source must be a dataset, got the class {source.__name__}: call it first")
    if isinstance(source, IterableDataset) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise TypeError(
            f"source must be a map-style dataset with __getitem__ and __len__, got {type(source).__name__}: without an "
            "index there is nothing to cache by"
        )
    if len(source) == 0:
        raise ValueError(f"source must have at least one sample, got an empty {type(source).__name__}")


def _holds(dataset: Any, kind: type) -> bool:
    if isinstance(dataset, Subset):
        return _holds(dataset.dataset, kind)
    if isinstance(dataset, ConcatDataset):
        return any(_holds(part, kind) for part in dataset.datasets)
    return isinstance(dataset, kind)
