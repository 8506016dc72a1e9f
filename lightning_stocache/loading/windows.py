"""Finished batches in memory that workers and main process share for good.

With a per-sample transform on the CPU, whole batches are made in workers. DataLoader sends each in fresh shared
memory: page faults in the worker, a descriptor in the message, a mapping and page faults again in the main process.
Here the same memory is used again and again: a worker puts each sample's tensors into their rows of a window as soon
as it has been transformed (64 of them, kept to be stacked, are fresh memory too), the message says where they lie,
and the batch that the trainer gets *is* the window. When nobody holds a tensor of it any more, the window is free for
another batch. Is it the last free one, the batch is copied out, so that the next one has a window too.

A window belongs, in turn, to the main process (free), to the one worker with its errand, to the main process again (the
answer has come), and to the trainer (lent). Windows are as large as the largest batch so far; what does not fit, what
came before there was a window, and what is small (labels) travels in the message as plain bytes: torch's own way to
send a tensor takes fresh memory in /dev/shm, and dies of SIGBUS where there is none. Only samples that hold other
things than dicts, lists, tuples, numbers, strings, arrays and tensors travel as DataLoader sends them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from lightning_stocache.loading.errand import Delivery
from lightning_stocache.loading.stacking import Rows, Stack, Written, aligned, is_dense, is_plain, rebuilt
from lightning_stocache.loading.transit import transit_memory
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["Place", "WindowClerk", "Windows"]


class Place(NamedTuple):
    """A window, as a worker is told of it."""

    number: int
    handle: SegmentHandle


@dataclass(frozen=True)
class _Sent:
    """A tensor that lies in the message."""

    content: npt.NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]


class WindowClerk:
    """In a worker: collates a batch into the window that came with the errand."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}

    def __call__(self, delivery: Delivery | list[Any]) -> Any:
        """The batch, with `Written` or `_Sent` in place of its tensors."""
        if not isinstance(delivery, Delivery):  # keys that only the source understands
            return default_collate(delivery)
        errand = delivery.errand
        rows = Rows(None if errand.place is None else self._segment(errand.place), len(errand))
        samples = [rows.put(number, sample) for number, sample in enumerate(delivery.samples)]
        if not samples or not is_plain(samples[0]):
            return default_collate(samples)
        stack = Stack(rows)
        batch = collate(samples, collate_fn_map=default_collate_fn_map | {torch.Tensor: stack})
        return rebuilt(batch, lambda leaf: _sent(leaf) if is_dense(leaf) else leaf)

    def _segment(self, place: Place) -> Segment:
        known = self._segments.get(place.number)
        if known is None or known.token != place.handle.token:
            if known is not None:  # it was too small
                known.close()
            known = self._segments[place.number] = Segment.attach(place.handle)
        return known

    def __getstate__(self) -> dict[str, Any]:
        return {"_segments": {}}


class Windows:
    """The windows of a loader, in the main process.

    Args:
        count: batches that are under way or held by the trainer.
        promised: says how many bytes of free memory are somebody else's.
    """

    def __init__(self, count: int, promised: Callable[[], int] = int) -> None:
        self._count, self._promised = count, promised
        self._size = 0
        self._segments: dict[int, Segment] = {}
        self._free: list[int] = []

    def take(self) -> int | None:
        """A free window, to be filled by a worker; None if there is none, or no memory for it."""
        while self._free:
            window = self._free.pop()
            segment = self._segments.get(window)
            if segment is not None and segment.size >= self._size:
                return window
            if segment is not None:
                self._segments.pop(window).close()
            try:
                self._segments[window] = transit_memory(self._size, self._promised())
            except OSError:  # from now on there is one less
                continue
            return window
        return None

    def place(self, window: int) -> Place:
        """What the worker is told of a window."""
        return Place(window, self._segments[window].handle)

    def open(self, answer: Any, window: int | None) -> Any:
        """The batch of an answer. Its tensors are lent: the window is free again when the last of them is gone."""
        memory: memoryview | None = None
        lend = False
        if window is not None:
            memory = self._segments[window].memory(0, self._segments[window].size)
            # May run in any thread, at any moment: it only appends, which is atomic.
            weakref.finalize(memory, self._free.append, window).atexit = False
            lend = bool(self._free)
        size = 0

        def arrived(leaf: Any) -> Any:
            nonlocal size
            if isinstance(leaf, Written):
                assert memory is not None
                count = torch.Size(leaf.shape).numel()
                tensor = torch.frombuffer(memory, dtype=leaf.dtype, count=count, offset=leaf.offset).view(leaf.shape)
                size += aligned(tensor.nbytes)
                return tensor if lend else tensor.clone()
            if isinstance(leaf, _Sent):
                size += aligned(leaf.content.nbytes)
                return torch.from_numpy(leaf.content).view(leaf.dtype).view(leaf.shape)
            return leaf

        batch = rebuilt(answer, arrived)
        if not self._size and size:
            self._free.extend(range(self._count))
        self._size = max(self._size, size)
        return batch

    def give_back(self, window: int | None) -> None:
        """A window whose errand came to nothing."""
        if window is not None:
            self._free.append(window)

    def close(self) -> None:
        """Give the windows up; a batch that is still held keeps its memory."""
        self._free.clear()
        for segment in self._segments.values():
            segment.close()


def _sent(tensor: torch.Tensor) -> _Sent:
    return _Sent(tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))
