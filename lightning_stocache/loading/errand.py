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
        of_batch: where only those samples are wanted that are not to be read from their slots, the whole batch that
            they are missing from.
    """

    def __init__(
        self, indices: Sequence[int] = (), place: Any = None, *, of_batch: Sequence[int] | None = None
    ) -> None:
        super().__init__(indices)
        self.place, self.of_batch = place, of_batch


class Delivery(NamedTuple):
    """What a worker has fetched for an errand. The loader's clerk, its collate function, makes the answer of it.

    Args:
        dataset: the CachedDataset that has fetched it.
        errand: what for.
        samples: those of its indices; where they are missing from a batch, what `Opened.fill` gives.
    """

    dataset: Any
    errand: Errand
    samples: Iterable[Any]
