"""How records lie in a segment: states, a directory, and the arena.

Layout of the memory: `count` state bytes, then for each slot where its record begins (uint64, the directory), the
number of the arena, and the arena. All but the arena is reserved when the store is made. A slot is READY when its
record and its entry in the directory are there.

On a disk, a crash may leave any of these as they were before: checksums (`proof`) tell what can be served, and `mend`
takes care that nothing is stored over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.arena import LEDGER_BYTES, Arena
from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.codec import aligned
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.records import HEAD
from lightning_stocache.cache.slots import EMPTY, READY
from lightning_stocache.node.segment import Segment

__all__ = ["RecordSlots"]

_WORD = 8
_SMALL = 8  # alignment of records without buffers


class RecordSlots:
    """The slots of a cache of records.

    Args:
        segment: where they lie; longer than `bytes_for(count)`.
        count: number of slots.
        claims: of the segment's locks; byte `count + 1` is the arena's.
        end: where the arena ends; by default with the segment.
    """

    def __init__(self, segment: Segment, count: int, claims: Claims, end: int | None = None) -> None:
        self.count = count
        self.end = end = segment.size if end is None else end
        self._segment = segment
        directory, ledger, begin = _starts(count)
        self.states = segment.bytes(0, count)
        self.state_bytes = segment.memory(0, count)
        self._ready = self.states.numpy()
        self._words = segment.memory(directory, count * _WORD).cast("Q")
        self._directory = np.frombuffer(self._words, dtype=np.uint64) if count else np.empty(0, dtype=np.uint64)
        self.arena = Arena(segment, ledger, begin, end, claims, count + 1)
        self._begin, self._end = begin, end
        self._memory = segment.memory(0, end)
        # Heads lie at multiples of 8: the second word is the bytes of the record.
        self._all_words = np.frombuffer(self._memory[: end // _WORD * _WORD], dtype=np.uint64)

    slot_bytes = 1 + _WORD
    """Bytes that a slot takes besides its record."""

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken, by slots and records."""
        return self._begin + self.arena.used_bytes

    @staticmethod
    def bytes_for(count: int) -> int:
        """Bytes that so many slots take besides their records, alignment included."""
        return _starts(count)[2]

    def reserve_states(self, begin: int, end: int) -> None:
        """Have the kernel promise the memory of some states and words, where that was not done when the store was made.

        Raises:
            OSError: there is none left (ENOSPC).
        """
        directory, ledger, arena = _starts(self.count)
        self._segment.reserve(begin, end - begin)
        self._segment.reserve(directory + begin * _WORD, (end - begin) * _WORD)
        self._segment.reserve(ledger, arena - ledger)

    def ready(self, slots: Integers) -> npt.NDArray[np.bool_]:
        """Which of those slots are READY; bool of the same shape."""
        found: npt.NDArray[np.bool_] = (self._ready.take(slots, mode="clip") == READY) & (slots >= 0)
        return found

    def nbytes(self, slots: Integers) -> int:
        """Bytes of the records of READY slots."""
        heads = self._directory.take(slots).astype(np.int64) // _WORD
        return int(self._all_words.take(heads + 1).sum())

    def record(self, slot: int) -> memoryview:
        """The record of a READY slot, live; it is only to be read."""
        offset = self._words[slot]
        return self._memory[offset : offset + HEAD.unpack_from(self._memory, offset)[2]].toreadonly()

    def has_room(self, nbytes: int) -> bool:
        """Whether a record of so many bytes may find room."""
        return self.arena.has_room(nbytes)

    def size(self, contents: Sequence[memoryview]) -> int:
        """Bytes that a sample takes, given its parts."""
        return sum(part.nbytes for part in contents)

    def store(self, slot: int, contents: Sequence[memoryview]) -> bool:
        """Write a record, given its parts, and say where it is; whether there was room for it.

        Raises:
            OSError: the system has no memory left (ENOSPC).
        """
        segment, nbytes = self._segment, self.size(contents)
        if not self.arena.has_room(nbytes):
            return False

        def write(offset: int) -> None:
            segment.store(offset, *contents)

        offset = self.arena.store(nbytes, _SMALL if len(contents) == 1 else aligned(1), write)
        if offset is None:
            return False
        self._words[slot] = offset
        return True

    def fetch(self, slot: int) -> list[bytes] | None:
        """Read the record of a slot through the file of a store on a disk; None if there can be none.

        Raises:
            OSError: it cannot be read (EIO).
        """
        segment, offset = self._segment, self._words[slot]
        if not self._begin <= offset <= self._end - HEAD.size or offset % _SMALL:
            return None
        head = segment.fetch(offset, HEAD.size)
        nbytes = HEAD.unpack(head)[2]
        if not HEAD.size <= nbytes <= self._end - offset:
            return None
        return [head, segment.fetch(offset + HEAD.size, nbytes - HEAD.size)]

    def mend(self, is_sound: Callable[[int, Sequence[bytes]], bool]) -> None:
        """Have new records lie behind all that can be served; no other process has the store open.

        Records do not overlap, so the last sound one says where free memory begins. What lies behind it is given up.

        Args:
            is_sound: whether these are the parts that were stored in a slot.
        """
        self.arena.free, slots = self._begin, np.flatnonzero(self._directory)
        for slot in slots[np.argsort(self._directory[slots])[::-1]].tolist():
            try:
                record = self.fetch(slot)
                if record is not None and is_sound(slot, record):
                    self.arena.free = self._words[slot] + sum(map(len, record))
                    break
            except OSError:
                pass
            self.state_bytes[slot] = EMPTY
            self._words[slot] = 0

    def close(self) -> None:
        """Drop all views, without which the segment cannot be unmapped."""
        self.arena.close()
        self.states = torch.empty(0, dtype=torch.uint8)
        self._ready = np.empty(0, dtype=np.uint8)
        self._directory = self._all_words = np.empty(0, dtype=np.uint64)
        self.state_bytes.release()
        self._words.release()
        self._memory.release()


def _starts(count: int) -> tuple[int, int, int]:
    """Where the directory, the number of the arena and the arena itself begin."""
    directory = aligned(count)
    ledger = aligned(directory + count * _WORD)
    return directory, ledger, aligned(ledger + LEDGER_BYTES)
