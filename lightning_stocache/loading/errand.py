"""What passes between a CachedLoader and its workers' copies of the dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["Delivery", "Errand"]


class Errand(list[int]):
    """Indices that a CachedLoader sends to a worker, with the place where the answer may be put.

    Args:
        indices: of a batch, or of those of its samples that are missing.
        place: what the loader's clerk makes of it.
        to_fill: whether only those samples are wanted that are not to be read from their slots.
    """

    def __init__(self, indices: Sequence[int] = (), place: Any = None, *, to_fill: bool = False) -> None:
        super().__init__(indices)
        self.place, self.to_fill = place, to_fill


class Delivery(NamedTuple):
    """What a worker has fetched for an errand. The loader's clerk, its collate function, makes the answer of it.

    Args:
        dataset: the CachedDataset that has fetched it.
        errand: what for.
        samples: those of its indices; in an errand to fill, what `Opened.fill` gives.
    """

    dataset: Any
    errand: Errand
    samples: Iterable[Any]
