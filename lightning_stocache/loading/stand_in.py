"""What the doors of the Trainer put in the place of the user's dataset.

A `StandIn` has no name of its own: `loader.dataset.strength = 2` and `loader.dataset.set_epoch(3)` do what they do
without a cache, whatever the user's names are. The package finds the CachedDataset behind it by `cached_in`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, SupportsIndex

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.forwarding import Forwarding

__all__ = ["StandIn", "cached_in"]


class StandIn(Forwarding):
    """A cached dataset that passes for its source.

    Args:
        dataset: what it reads from.

    Example:
        >>> class Squares:
        ...     cache = "the user's own"
        ...
        ...     def __len__(self):
        ...         return 4
        ...
        ...     def __getitem__(self, index):
        ...         return index * index
        >>> dataset = CachedDataset(Squares())
        >>> stand_in = StandIn(dataset)
        >>> stand_in[3], stand_in.cache
        (9, "the user's own")
        >>> dataset.close()
    """

    def __init__(self, dataset: CachedDataset) -> None:
        super().__init__(dataset.source)
        self.__dataset = dataset

    def __len__(self) -> int:
        return len(self.__dataset)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.__dataset[index]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> Any:
        """The samples of a batch."""
        return self.__dataset.__getitems__(indices)

    def __copy__(self) -> StandIn:
        return StandIn(copy.copy(self.__dataset))

    def __cached__(self) -> CachedDataset:
        return self.__dataset


def cached_in(dataset: Any) -> CachedDataset | None:
    """The CachedDataset that a loader's dataset is or stands for; None for any other dataset."""
    behind = getattr(type(dataset), "__cached__", None)  # a dunder name, which can be nobody else's
    return dataset if isinstance(dataset, CachedDataset) else None if behind is None else behind(dataset)
