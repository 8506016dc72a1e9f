"""Where workers put samples that have no ready slot, for the main process to pick up.

Sending samples through a queue costs more than loading them from memory: each would be fresh shared memory, opened,
mapped and faulted in twice. So the samples of a batch that did not become READY (no slot here, or another process was
filling it) are written into a fixed area that main process and workers share: a window for every batch that can be
under way, a row for every sample of it. A message carries only the numbers of the rows. What has no row (a batch that
is longer than a window, or no memory for the area at all) travels in the message as plain bytes: torch's own way to
send a tensor takes shared memory, and dies of SIGBUS where there is none.

A window is written by the one worker that has its errand, and read by the main process after the answer has come; it is
given to another batch after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.cache import SharedCache
from lightning_stocache.cache.placement import NO_SLOT
from lightning_stocache.cache.slots import FieldSlots
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.loading.dataset import Delivery
from lightning_stocache.loading.transit import transit_memory
from lightning_stocache.node.segment import Segment

__all__ = ["Staged", "Staging", "readable_slots"]


class Staged(NamedTuple):
    """What of an errand did not become READY: places whose rows are in the window, and rows that are sent along."""

    places: list[int]
    sent: dict[int, list[npt.NDArray[np.uint8]]]


class Staging:
    """The staging area of a loader; in the workers, the clerk that fills it.

    Args:
        spec: what a sample looks like.
        batch_size: rows per window.
        windows: batches that can be under way.
        promised: bytes of free memory that are somebody else's.
    """

    def __init__(self, spec: SampleSpec, batch_size: int, windows: int, promised: int = 0) -> None:
        self._spec, self._batch_size, self._windows = spec, batch_size, windows
        self._segment: Segment | None = None
        try:
            self._segment = transit_memory(FieldSlots.bytes_for(spec.row_bytes, batch_size * windows), promised)
        except OSError:
            self._batch_size = 0
        self._rows: FieldSlots | None = None
        self._next = 0

    @property
    def room(self) -> int:
        """Rows per window; 0 if there is no memory, and all is sent by message."""
        return self._batch_size

    def window(self) -> int:
        """The window for the next batch."""
        self._next = (self._next + 1) % self._windows
        return self._next

    def __call__(self, delivery: Delivery) -> Staged:
        """In a worker: write what is not READY, and answer with its places in the errand."""
        dataset, errand, samples = delivery.dataset, delivery.errand, list(delivery.samples)
        cache = dataset.cache
        places: Sequence[int] = range(len(errand))
        if cache is not None:
            places = (readable_slots(cache, torch.tensor(errand)) == NO_SLOT).nonzero().flatten().tolist()
        answer = Staged([], {})
        for place in places:
            sample, index = samples[place], errand[place]
            if place < self._batch_size:
                self._open.write(errand.place * self._batch_size + place, self._spec.leaves(sample, index))
                answer.places.append(place)
            else:
                answer.sent[place] = [row.numpy() for row in self._spec.flatten(sample, index)]
        return answer

    def copy_to(self, rows: Sequence[torch.Tensor], position: int, window: int, place: int) -> None:
        """In the main process: copy a staged sample to a position of the batch, uint8 `[samples, nbytes]` per field."""
        for row, staged in zip(rows, self._open.rows(window * self._batch_size + place), strict=True):
            row[position].copy_(staged)

    def close(self) -> None:
        """Give the area up in this process."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None
        if self._segment is not None:
            self._segment.close()

    @property
    def _open(self) -> FieldSlots:
        if self._rows is None:
            assert self._segment is not None
            self._rows = FieldSlots(self._segment, self._spec.row_bytes, self._batch_size * self._windows)
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": None}


def readable_slots(cache: SharedCache, indices: torch.Tensor) -> torch.Tensor:
    """The slots of those indices that can be read now, NO_SLOT for the others.

    An index from the end of the dataset has the slot of the same sample. One outside of it has none: the ring would
    wrap it around, but what it means, if anything, the source knows.
    """
    size = cache.arc.size
    return cache.ready_slots(indices).masked_fill_((indices >= size) | (indices < -size), NO_SLOT)
