"""What passes between a CachedLoader and its workers' copies of the dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lightning_stocache.loading.batch_pool import Place

__all__ = ["Delivery", "Errand"]


class Errand(list[int]):
    """Indices that a CachedLoader sends to a worker, with the place where the answer may be put.

    Args:
        indices: of a batch, or of those of its samples that are missing.
        place: the shared memory of the batch, if there is any.
        missing: where only those samples are wanted that are not to be read from their slots, their positions in the
            batch.
        of_batch: then, the indices of the whole batch.
    """

    def __init__(
        self,
        indices: Sequence[int] = (),
        place: Place | None = None,
        *,
        missing: Sequence[int] | None = None,
        of_batch: Sequence[int] = (),
    ) -> None:
        super().__init__(indices)
        self.place, self.missing, self.of_batch = place, missing, of_batch


class Delivery(NamedTuple):
    """What a worker has fetched for an errand. What runs as its collate function makes the answer of it.

    Args:
        dataset: the CachedDataset that has fetched it.
        errand: what for.
        samples: those of its indices; none where they are missing from a batch, and are loaded into its memory.
    """

    dataset: Any
    errand: Errand
    samples: Iterable[Any]
