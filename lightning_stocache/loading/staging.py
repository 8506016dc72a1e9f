"""Where workers put samples that they have not stored, for the main process to pick up.

Sending samples through a queue costs more than loading them from memory: each would be fresh shared memory, opened,
mapped and faulted in twice. So the samples of a batch that did not become READY (no slot here, or another process was
filling it) are written into a fixed area that main process and workers share: a ring of rows, of which every errand has
a stretch, a row for each of its samples. A message carries only the places of those that are there. What has no row (an
errand of more samples than expected, too many under way, or no memory for the area at all) travels in the message as
plain bytes: torch's own way to send a tensor takes shared memory, and dies of SIGBUS where there is none.

A sample that is not of the spec has no row. Its whole batch is collated by the worker, and sent as DataLoader does:
what `default_collate` makes of such samples, or says about them, is not the same in a worker and outside.

A stretch is written by the one worker that has its errand, and read by the main process after the answer has come; its
rows are given to another errand after that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from lightning_stocache.cache.codec import BatchRows, SampleCodec
from lightning_stocache.loading.errand import Delivery
from lightning_stocache.loading.odd import Odd
from lightning_stocache.loading.stacking import aligned
from lightning_stocache.loading.transit import transit_memory
from lightning_stocache.node.segment import Segment

__all__ = ["Collated", "Staged", "Staging", "Stretch"]


class Stretch(NamedTuple):
    """Rows of the area, for the first samples of an errand.

    Args:
        first: number of the first row.
        rows: how many.
    """

    first: int
    rows: int


class Staged(NamedTuple):
    """What of an errand is not to be read from its slot: places with a row in the stretch, and rows sent along."""

    places: list[int]
    sent: dict[int, list[npt.NDArray[np.uint8]]]


class Collated(NamedTuple):
    """A batch that holds a sample which is not of the spec."""

    batch: Any


class Staging:
    """The staging area of a loader; in the workers, the clerk that fills it.

    Args:
        codec: what a sample looks like.
        batch_size: rows that an errand has at most.
        batches: the area has `batch_size * batches` rows; one batch of them is lost where the ring closes.
        promised: bytes of free memory that are somebody else's.
    """

    def __init__(self, codec: SampleCodec, batch_size: int, batches: int, promised: int = 0) -> None:
        self._codec, self._batch_size, self._count = codec, batch_size, batch_size * batches
        self._segment: Segment | None = None
        try:
            self._segment = transit_memory(sum(map(aligned, codec.sizes(self._count))), promised)
        except OSError:
            self._batch_size = self._count = 0
        self._rows: BatchRows | None = None
        self._next = self._taken = 0

    def take(self, samples: int) -> Stretch:
        """Rows for the next errand, behind those of the one before; none where too many are taken."""
        rows = min(samples, self._batch_size)
        if self._taken + rows > self._count - self._batch_size:
            return Stretch(0, 0)
        first = self._next if self._next + rows <= self._count else 0
        self._next, self._taken = first + rows, self._taken + rows
        return Stretch(first, rows)

    def give_back(self, stretch: Stretch) -> None:
        """The rows of the earliest errand that has some."""
        self._taken -= stretch.rows

    def begin_epoch(self) -> None:
        """All rows are free again."""
        self._taken = 0

    def __call__(self, delivery: Delivery) -> Staged | Collated:
        """In a worker: write what it has loaded and not stored, and answer with its places in the errand."""
        errand, answer = delivery.errand, Staged([], {})
        if any(type(came) is Odd for came in delivery.samples):
            return Collated(default_collate(_samples_of_batch(delivery)))
        for place, parts in enumerate(delivery.samples):
            if parts is None:
                continue
            if place < errand.place.rows:
                self._open.put(errand.place.first + place, parts)
                answer.places.append(place)
            else:
                answer.sent[place] = [np.asarray(content) for content in self._codec.contents(parts)]
        return answer

    def copy_to(self, batch: BatchRows, place: int, row: int) -> None:
        """In the main process: copy a row of the area to a place of a batch."""
        batch.copy(place, self._open, row)

    def close(self) -> None:
        """Give the area up in this process."""
        self._rows = None  # all views, without which the segment cannot be unmapped
        if self._segment is not None:
            self._segment.close()

    @property
    def _open(self) -> BatchRows:
        if self._rows is None:
            segment, memory, start = self._segment, list[torch.Tensor](), 0
            assert segment is not None
            for size in self._codec.sizes(self._count):
                memory.append(segment.bytes(start, size))
                start += aligned(size)
            self._rows = self._codec.rows(lambda: memory, self._count)
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": None}


def _samples_of_batch(delivery: Delivery) -> list[Any]:
    """All samples of the batch from which those of an errand were missing; the others are READY."""
    dataset, errand = delivery.dataset, delivery.errand
    came = {index: odd.sample for index, odd in zip(errand, delivery.samples, strict=True) if odd is not None}

    def sample(index: int) -> Any:
        if index in came:
            return came[index]
        return dataset[index] if dataset.cache is None else dataset.cache.get(index % len(dataset))

    return [sample(index) for index in errand.of_batch or errand]
