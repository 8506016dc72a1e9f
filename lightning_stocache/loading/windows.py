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

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from lightning_stocache.loading.dataset import Delivery
from lightning_stocache.loading.transit import transit_memory
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["Place", "WindowClerk", "Windows"]

_ALIGNMENT = 64  # bytes, for the reason that `slots` gives


class Place(NamedTuple):
    """A window, as a worker is told of it."""

    number: int
    handle: SegmentHandle


@dataclass(frozen=True)
class _Written:
    """A tensor that lies in the window."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


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
        """The batch, with `_Written` or `_Sent` in place of its tensors."""
        if not isinstance(delivery, Delivery):  # keys that only the source understands
            return default_collate(delivery)
        errand = delivery.errand
        rows = _Rows(None if errand.place is None else self._segment(errand.place), len(errand))
        samples = [rows.put(number, sample) for number, sample in enumerate(delivery.samples)]
        if not samples or not _is_plain(samples[0]):
            return default_collate(samples)
        stack = _Stack(rows)
        batch = collate(samples, collate_fn_map=default_collate_fn_map | {torch.Tensor: stack})
        return _rebuilt(batch, lambda leaf: _sent(leaf) if _is_dense(leaf) else leaf)

    def _segment(self, place: Place) -> Segment:
        known = self._segments.get(place.number)
        if known is None or known.token != place.handle.token:
            if known is not None:  # it was too small
                known.close()
            known = self._segments[place.number] = Segment.attach(place.handle)
        return known

    def __getstate__(self) -> dict[str, Any]:
        return {"_segments": {}}


class _Room(NamedTuple):
    """A place in the window for one tensor of the batch.

    Args:
        place: where it lies.
        tensor: the memory, `[samples, *shape]`.
        rows: each row of it, `[*shape]`.
    """

    place: _Written
    tensor: torch.Tensor
    rows: tuple[torch.Tensor, ...]

    def put(self, number: int, leaf: Any) -> Any:
        """A leaf of that sample, in its row if it fits there."""
        row = self.rows[number]
        fits = _is_dense(leaf) and leaf.dtype == row.dtype and leaf.shape == row.shape
        return row.copy_(leaf) if fits else leaf


class _Rows:
    """A window as the tensors of a batch, each with a row for every sample.

    Args:
        segment: the window, if there is one.
        samples: of the batch.
    """

    def __init__(self, segment: Segment | None, samples: int) -> None:
        self._segment, self._samples, self._end = segment, samples, 0
        self._rooms: list[_Room | None] = []  # for each leaf of the first sample
        self._types: list[type] | None = None  # of them, if that sample is a tuple without branches

    def put(self, number: int, sample: Any) -> Any:
        """The sample, with its tensors in their rows as far as there are rows that fit."""
        if self._segment is None or number >= self._samples:
            return sample
        if type(sample) is tuple and [type(leaf) for leaf in sample] == self._types:
            # Nearly all are like that. Code is cold after each transform: the less of it, the better.
            return tuple(
                [
                    leaf if room is None else room.put(number, leaf)
                    for room, leaf in zip(self._rooms, sample, strict=True)
                ]
            )
        if not _is_plain(sample):
            return sample
        if number == 0:
            _rebuilt(sample, lambda leaf: self._rooms.append(self.make(leaf, self._samples)))
            if type(sample) is tuple and not any(isinstance(leaf, dict | list | tuple) for leaf in sample):
                self._types = [type(leaf) for leaf in sample]
        rooms = itertools.chain(self._rooms, itertools.repeat(None))
        return _rebuilt(sample, lambda leaf: leaf if (room := next(rooms)) is None else room.put(number, leaf))

    def make(self, first: Any, samples: int) -> _Room | None:
        """Room for as many tensors such as this one; None if there is none, or if it is none."""
        if self._segment is None or not _is_dense(first):
            return None
        size = first.numel() * first.element_size() * samples
        if not size or self._end + size > self._segment.size:
            return None
        place = _Written(self._end, first.dtype, (samples, *first.shape))
        self._end += _aligned(size)
        tensor = self._segment.bytes(place.offset, size).view(place.dtype).view(place.shape)
        return _Room(place, tensor, tensor.unbind(0))

    def found(self, leaves: list[torch.Tensor]) -> _Written | None:
        """Where these tensors lie, if they are the rows of one."""
        for room in self._rooms:
            if room is not None and len(leaves) == self._samples and leaves[0].data_ptr() == room.rows[0].data_ptr():
                step, begin = room.tensor.stride(0) * room.tensor.element_size(), room.tensor.data_ptr()
                if all(leaf.data_ptr() == begin + number * step for number, leaf in enumerate(leaves)):
                    return room.place
        return None


class _Stack:
    """Stacks tensors, into the window as long as they fit; nothing is left to do for those that lie there already."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __call__(self, leaves: list[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        first = leaves[0]
        if not all(_is_dense(leaf) and leaf.dtype == first.dtype and leaf.shape == first.shape for leaf in leaves):
            return default_collate(leaves)
        if (place := self._rows.found(leaves)) is not None:
            return place
        room = self._rows.make(first, len(leaves))
        if room is None:
            return torch.stack(leaves)
        torch.stack(leaves, out=room.tensor)
        return room.place


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
            if isinstance(leaf, _Written):
                assert memory is not None
                count = torch.Size(leaf.shape).numel()
                tensor = torch.frombuffer(memory, dtype=leaf.dtype, count=count, offset=leaf.offset).view(leaf.shape)
                size += _aligned(tensor.nbytes)
                return tensor if lend else tensor.clone()
            if isinstance(leaf, _Sent):
                size += _aligned(leaf.content.nbytes)
                return torch.from_numpy(leaf.content).view(leaf.dtype).view(leaf.shape)
            return leaf

        batch = _rebuilt(answer, arrived)
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


def _is_plain(node: Any) -> bool:
    """Whether a sample, and so the batch that is collated from it, can be walked by `_rebuilt`."""
    kind = type(node)
    if kind in (dict, OrderedDict):
        return all(map(_is_plain, node.values()))
    if isinstance(node, torch.Tensor | np.ndarray | np.generic | int | float | str | bytes):
        return kind is torch.Tensor or not isinstance(node, torch.Tensor) or kind not in default_collate_fn_map
    walked = kind in (list, tuple) or (isinstance(node, tuple) and hasattr(kind, "_fields"))
    return walked and kind not in default_collate_fn_map and all(map(_is_plain, node))


def _is_dense(leaf: Any) -> bool:
    """Whether it is a tensor that is its bytes, dtype and shape, and nothing else."""
    return (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and leaf.device.type == "cpu"
        and not (leaf.requires_grad or leaf.is_quantized or leaf.is_nested or leaf.is_conj() or leaf.is_neg())
    )


def _sent(tensor: torch.Tensor) -> _Sent:
    return _Sent(tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _rebuilt(node: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same structure with what `leaf` makes of each leaf."""
    if type(node) in (dict, OrderedDict):
        return type(node)((key, _rebuilt(value, leaf)) for key, value in node.items())
    if type(node) is list or isinstance(node, tuple):
        values = [_rebuilt(value, leaf) for value in node]
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    return leaf(node)
