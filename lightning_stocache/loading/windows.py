"""Finished batches in memory that workers and main process share for good.

With a per-sample transform on the CPU, whole batches are made in workers. DataLoader sends each in fresh shared memory:
page faults in the worker, a descriptor in the message, a mapping and page faults again in the main process. Here the
same memory is used again and again: a worker writes the collated tensors into a window, the message says where they
lie, and the batch that the trainer gets *is* the window. When nobody holds a tensor of it any more, the window is free
for another batch. If no window is free, a batch is copied out of its own, or travels as DataLoader sends it.

A window belongs, in turn, to the main process (free), to the one worker with its errand, to the main process again (the
answer has come), and to the trainer (lent). The size is that of the first batch; what does not fit travels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from lightning_stocache.loading.dataset import Delivery
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["WindowClerk", "Windows"]

_ALIGNMENT = 64


@dataclass(frozen=True)
class _Written:
    """A tensor that lies in a window."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class WindowClerk:
    """In a worker: collates a batch into the window that came with the errand."""

    def __init__(self) -> None:
        self._segments: dict[bytes, Segment] = {}

    def __call__(self, delivery: Delivery) -> Any:
        """The batch, with `_Written` in place of each tensor that lies in the window."""
        _, errand, samples = delivery
        if errand.place is None:
            return default_collate(samples)
        handle: SegmentHandle = errand.place
        segment = self._segments.get(handle.token)
        if segment is None:
            segment = self._segments[handle.token] = Segment.attach(handle)
        return collate(samples, collate_fn_map={torch.Tensor: _Writer(segment)} | _other_types)

    def __getstate__(self) -> dict[str, Any]:
        return {"_segments": {}}


_other_types = {kind: function for kind, function in default_collate_fn_map.items() if kind is not torch.Tensor}


class _Writer:
    """Stacks plain tensors into a window, one field after the other."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._end = segment, 0

    def __call__(self, leaves: list[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        first = leaves[0]
        plain = all(
            type(leaf) is torch.Tensor and leaf.dtype == first.dtype and leaf.shape == first.shape for leaf in leaves
        )
        size = first.numel() * first.element_size() * len(leaves)
        if not plain or not size or self._end + size > self._segment.size or first.layout is not torch.strided:
            return default_collate(leaves)
        place = _Written(self._end, first.dtype, (len(leaves), *first.shape))
        torch.stack(leaves, out=self._segment.bytes(place.offset, size).view(place.dtype).view(place.shape))
        self._end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place


class Windows:
    """The windows of a loader, in the main process.

    Args:
        count: batches that are under way or held by the trainer.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._segments: list[Segment] = []
        self._free: list[int] = []
        self._sized = False

    def take(self) -> int | None:
        """A free window, to be filled by a worker; None if there is none."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def handle(self, window: int) -> SegmentHandle:
        """The address of a window."""
        return self._segments[window].handle

    def open(self, answer: Any, window: int | None) -> Any:
        """The batch of an answer. Its tensors are lent: the window is free again when the last of them is gone."""
        if window is None:
            self._make_for(answer)
            return answer
        memory = self._segments[window].memory(0, self._segments[window].size)
        # May run in any thread, at any moment: it only appends, which is atomic.
        weakref.finalize(memory, self._free.append, window).atexit = False
        if self._free:
            return _rebuilt(answer, lambda one: _tensor(memory, one))
        return _rebuilt(answer, lambda one: _tensor(memory, one).clone())

    def give_back(self, window: int | None) -> None:
        """A window whose errand came to nothing."""
        if window is not None:
            self._free.append(window)

    def close(self) -> None:
        """Give the windows up; a batch that is still held keeps its memory."""
        self._free.clear()
        for segment in self._segments:
            segment.close()

    def _make_for(self, batch: Any) -> None:
        """Make the windows as large as this batch, which came without one."""
        if self._sized:
            return
        self._sized = True
        sizes: list[int] = []
        _rebuilt(batch, lambda one: None, lambda one: sizes.append(one.numel() * one.element_size()))
        size = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        if not size:
            return
        try:
            for number in range(self._count):
                segment = Segment.create(size)
                segment.reserve(0, size)
                self._segments.append(segment)
                self._free.append(number)
        except OSError:  # no memory: batches travel as DataLoader sends them
            return


def _tensor(memory: memoryview, place: _Written) -> torch.Tensor:
    count = torch.Size(place.shape).numel()
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)


def _rebuilt(
    node: Any, written: Callable[[_Written], Any], tensor: Callable[[torch.Tensor], Any] = lambda one: one
) -> Any:
    """The same structure with every `_Written`, and every tensor, replaced."""
    if isinstance(node, _Written):
        return written(node)
    if isinstance(node, torch.Tensor):
        return tensor(node)
    if isinstance(node, dict):
        return type(node)((key, _rebuilt(value, written, tensor)) for key, value in node.items())
    if isinstance(node, list | tuple):
        values = [_rebuilt(value, written, tensor) for value in node]
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    return node
