"""The memory of the batches that workers make: one sparse file, in which each batch on its way has a slot.

A batch in a message is copied twice, into fresh memory. So the request for a batch names a slot, the worker writes the
batch there, and the consumer gets tensors over that memory. A slot belongs, in turn, to

    =======  ===========================================  ============================================
    state    who uses the slot                            the state ends
    =======  ===========================================  ============================================
    free     nobody                                       when a request is drawn (`lease`)
    leased   the worker of that request                   when its reply is unpacked (`lend`, `end_lease`)
    lent     the batch's tensors and their views          with the last of them
    =======  ===========================================  ============================================

Slots have a fixed stride of virtual memory; what a slot has of real memory stands in a table in the file. The worker
that gets a slot reserves what the batch needs more, if that much is free: a page without memory would end the process
by SIGBUS, and a container above its limit is killed. It gives back what is more than twice the median batch. Where
there is no memory, or no slot, the batch travels in the message.

The file is a memfd: /dev/shm may be small. Forked workers inherit it, others receive its descriptor.

A pool of equal segments with one owner at a time is that of SPDL (Moto Hira, Meta Platforms).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import context, reduction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.codec import aligned
from lightning_stocache.loading.interrupt import held_back
from lightning_stocache.node.free import FreeMemory

if sys.platform != "win32":
    import resource

__all__ = ["Arena", "Slot", "arena_of"]

_STRIDE = 4 << 30  # bytes of address space per slot
_LEAST_STRIDE = 1 << 20
_PART_OF_LIMIT = 8  # an arena takes at most this part of a limited address space
_PAGE = mmap.PAGESIZE
_KNOWN = 33  # batches whose median size is known
_SMALL = 4096  # bytes; a tensor or array up to this size travels in the message

_arenas: weakref.WeakValueDictionary[bytes, Arena] = weakref.WeakValueDictionary()


class Arena:
    """Slots for batches. Make one with `create`, before the workers start.

    Args:
        slots: number of slots.
        stride: bytes of address space per slot.
        workers: number of workers, which may take memory at the same time.
        descriptor: of the file; None for a new one.
        token: identifies the arena in all processes.

    Raises:
        OSError: the system has no such file, or not that much address space.
    """

    def __init__(
        self,
        slots: int,
        stride: int,
        workers: int,
        descriptor: int | None = None,
        token: bytes | None = None,
    ) -> None:
        self.slots = slots
        self.stride = stride
        self.token = token or os.urandom(8)
        self._workers = workers
        self._file = os.memfd_create("stocache-batches") if descriptor is None else descriptor
        weakref.finalize(self, os.close, self._file).atexit = False
        if descriptor is None:
            os.ftruncate(self._file, self._start(slots))
        self._map = mmap.mmap(self._file, self._start(slots))
        self._reserved = np.frombuffer(self._map, np.int64, slots)  # bytes of each slot, written by whoever has it
        self._free = list(range(slots))[::-1]
        self._leases: dict[int, int] = {}  # the slot of each request
        self._lent: dict[int, _SlotLoan] = {}  # by slot
        self._returned: list[weakref.ref[Any]] = []
        self._sizes: deque[int] = deque(maxlen=_KNOWN)
        _arenas[self.token] = self

    @classmethod
    def create(cls, slots: int, workers: int) -> Arena | None:
        """An arena, or None where the system has none. Slots are smaller where address space is limited.

        Example:
            >>> arena = Arena.create(2, workers=1)
            >>> arena.lease(0), arena.lease(1), arena.lease(2)
            (0, 1, None)
            >>> slot = Slot(arena, 0)
            >>> _ = slot.room(3).fill_(7)
            >>> batch = torch.frombuffer(arena.lend(0, slot.end), dtype=torch.uint8, count=3)
            >>> batch.tolist(), arena.free_slots
            ([7, 7, 7], 0)
            >>> del batch
            >>> arena.free_slots
            1
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        stride = _STRIDE
        if limit != resource.RLIM_INFINITY:
            stride = min(stride, _whole_pages(limit // _PART_OF_LIMIT // slots))
        while stride >= _LEAST_STRIDE:
            # Between the opening of the file and its registration Ctrl-C would leave it open for ever.
            with contextlib.suppress(OSError, AttributeError), held_back():  # a system may have no memfd
                return cls(slots, stride, workers)
            stride //= 4
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        return _received, (self.slots, self.stride, self._workers, reduction.DupFd(self._file), self.token)

    def _start(self, slot: int) -> int:
        return _whole_pages(8 * self.slots) + slot * self.stride

    def memory(self, slot: int, nbytes: int) -> memoryview:
        """The first bytes of a slot."""
        start = self._start(slot)
        return memoryview(self._map)[start : start + nbytes]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that the file has."""
        return os.fstat(self._file).st_blocks * 512

    # ---- the process that sends requests ----

    def lease(self, request: int) -> int | None:
        """The slot of a request, the last used first; None if all are out."""
        if not self.free_slots:
            return None
        self._leases[request] = slot = self._free.pop()
        return slot

    def lend(self, request: int, nbytes: int) -> memoryview:
        """The memory of a reply. The slot is free again when nothing refers to it. Any thread may call this."""
        slot = self._leases.pop(request)
        memory = self.memory(slot, nbytes)
        # The callback is C code: in a Python function, one Ctrl-C of twelve would be swallowed and the slot lost.
        loan = _SlotLoan(memory, self._returned.append)
        loan.slot = slot
        self._lent[slot] = loan
        self._sizes.append(nbytes)
        return memory

    def end_lease(self, request: int) -> None:
        """The slot of a request is free: its reply has come in the message, or will not come."""
        slot = self._leases.pop(request, None)
        if slot is not None:
            self._free.append(slot)

    def end_leases(self) -> None:
        """All leased slots are free: no worker is at work."""
        for request in list(self._leases):
            self.end_lease(request)

    @property
    def free_slots(self) -> int:
        """Number of free slots."""
        while self._returned:
            slot = self._returned.pop().slot  # type: ignore[attr-defined]
            del self._lent[slot]
            self._free.append(slot)
        return len(self._free)

    @property
    def most_bytes(self) -> int:
        """Bytes that a slot may keep: twice the median batch."""
        return 2 * int(statistics.median(self._sizes)) if self._sizes else self.stride

    def trim(self, most: int = 0) -> None:
        """Give the memory of free slots beyond their first `most` bytes back."""
        if self.free_slots:
            for slot in self._free:
                self.give_back(slot, most)

    # ---- whoever has a slot ----

    def give_back(self, slot: int, most: int) -> None:
        """Give the memory of a slot beyond its first `most` bytes back."""
        keep, reserved = _whole_pages(most), int(self._reserved[slot])
        if reserved > keep:
            self._map.madvise(mmap.MADV_REMOVE, self._start(slot) + keep, reserved - keep)
            self._reserved[slot] = keep

    def reserve(self, slot: int, nbytes: int, promised: Callable[[], int] = int) -> bool:
        """Take memory for the first bytes of a slot. Returns False if it is not there.

        Args:
            slot: number of the slot.
            nbytes: bytes of the batch so far.
            promised: returns the number of free bytes that are promised to caches.
        """
        reserved = int(self._reserved[slot])
        more = _whole_pages(nbytes) - reserved
        if more <= 0:
            return True
        # The other workers may look at this moment, and find the same memory.
        if nbytes > self.stride or more * self._workers > FreeMemory.now(None).bytes - promised():
            return False
        try:
            os.posix_fallocate(self._file, self._start(slot) + reserved, more)
        except OSError:
            return False
        self._reserved[slot] = reserved + more
        return True


class Slot:
    """The memory of the batch that a worker makes, given out from its beginning. Without a number there is none.

    Attributes:
        end: bytes given out.
        is_refused: whether there was no memory.
    """

    def __init__(self, arena: Arena | None, number: int | None, promised: Callable[[], int] = int) -> None:
        self._arena = None if number is None else arena
        self._number, self._promised = number or 0, promised
        self.end, self.is_refused = 0, False

    def room(self, nbytes: int) -> torch.Tensor | None:
        """Memory for a tensor, uint8 `[nbytes]`; None if there is none."""
        if self._arena is None or self.is_refused or not nbytes:
            return None
        offset, end = self.end, self.end + nbytes
        if not self._arena.reserve(self._number, end, self._promised):
            self.is_refused = True
            return None
        self.end = aligned(end)
        return torch.frombuffer(self._arena.memory(self._number, end), dtype=torch.uint8, offset=offset)

    def take(self, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Memory for the fields of a batch, uint8 `[size]` each; private where there is no room."""
        rooms = map(self.room, sizes)
        return [
            np.empty(size, dtype=np.uint8) if room is None else room.numpy()
            for size, room in zip(sizes, rooms, strict=True)
        ]

    def clear(self) -> None:
        """Give the memory out from its beginning again."""
        self.end = 0

    def place(self, content: npt.NDArray[np.uint8]) -> int | None:
        """The offset of bytes in this memory, to which large bytes are copied. None if the bytes lie elsewhere."""
        offset = self._offset_of(content)
        room = self.room(content.nbytes) if offset is None and content.nbytes > _SMALL else None
        if room is None:
            return offset
        memory = room.numpy()
        memory[:] = content
        return self._offset_of(memory)

    def _offset_of(self, content: npt.NDArray[np.uint8]) -> int | None:
        """Where bytes lie in this memory; None if they lie elsewhere."""
        if self._arena is None or not self.end:
            return None
        first = torch.frombuffer(self._arena.memory(self._number, 1), dtype=torch.uint8).data_ptr()
        offset = int(content.__array_interface__["data"][0]) - first
        return offset if 0 <= offset < self.end else None


class _SlotLoan(weakref.ref[Any]):
    __slots__ = ("slot",)
    slot: int


def arena_of(token: bytes) -> Arena:
    """The arena of a token in this process."""
    return _arenas[token]


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _received(slots: int, stride: int, workers: int, descriptor: Any, token: bytes) -> Arena:
    return Arena(slots, stride, workers, descriptor=descriptor.detach(), token=token)
