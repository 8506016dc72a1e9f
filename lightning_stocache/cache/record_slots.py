"""How records lie in a segment: states, a directory, and the arena.

Layout of the memory: `count` state bytes, then for each slot a word of the directory (uint64: where its record begins,
48 bits, and a check of the slot and of that, 16 bits), the numbers of the arena, and the arena. All but the arena is
reserved when the store is made.

On a disk, a crash may leave the numbers of the arena as they were before some of the words: `mend` takes care that no
record that a word leads to is overwritten.

A word is believed only if its check is right, the record's head lies in the arena and names the same slot, and its end
lies there, too: whatever overwrites the directory, nobody is served another sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.arena import LEDGER_BYTES, Arena
from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.codec import aligned
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.records import HEAD
from lightning_stocache.cache.slots import EMPTY, READY
from lightning_stocache.node.disk import DiskSegment
from lightning_stocache.node.fence import fence
from lightning_stocache.node.segment import Segment

__all__ = ["RecordSlots"]

_WORD = 8
_OFFSET_BITS = 48
_OFFSET = (1 << _OFFSET_BITS) - 1
_SMALL = 8  # alignment of records without buffers
_MIX = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio (Fibonacci hashing, Knuth 6.4)


class RecordSlots:
    """The slots of a cache of records.

    Args:
        segment: where they lie; longer than `bytes_for(count)`.
        count: number of slots.
        claims: of the segment's locks; bytes from `count + 1` on are the arena's.
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
        # Heads lie at multiples of 8: as words, the first holds the slot and the second the bytes of the record.
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
        """Which of those slots are READY, and have a record that can be believed; bool of the same shape."""
        found: npt.NDArray[np.bool_] = (self._ready.take(slots, mode="clip") == READY) & (slots >= 0)
        fence()
        places = slots[found]
        words = self._directory.take(places)
        offsets = (words & _OFFSET).astype(np.int64)
        sound = (words >> _OFFSET_BITS) == _checks(places, offsets)
        sound &= (offsets >= self._begin) & (offsets <= self._end - HEAD.size) & (offsets % _SMALL == 0)
        heads = np.where(sound, offsets, self._begin) // _WORD
        if len(heads) and bool(sound.any()):  # what nobody has written to must not be read
            heads = np.where(sound, heads, heads[sound.argmax()])
            sound &= (self._all_words.take(heads) & np.uint64(0xFFFFFFFF)) == (places & 0xFFFFFFFF)
            sound &= self._all_words.take(heads + 1) <= (self._end - offsets).astype(np.uint64)
        found[found] = sound
        return found

    def is_sound(self, slot: int) -> bool:
        """Whether a READY slot has a record that can be believed."""
        if (offset := self._offset(slot, self._words[slot])) is None:
            return False
        owner, _, nbytes, _ = HEAD.unpack_from(self._memory, offset)
        return bool(owner == slot & 0xFFFFFFFF and nbytes <= self._end - offset)

    def nbytes(self, slots: Integers) -> int:
        """Bytes of the records of READY slots."""
        heads = (self._directory.take(slots) & _OFFSET).astype(np.int64) // _WORD
        return int(self._all_words.take(heads + 1).sum())

    def record(self, slot: int) -> memoryview:
        """The record of a READY slot, live; it is only to be read."""
        offset = self._words[slot] & _OFFSET
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
        contents[0][:4] = (slot & 0xFFFFFFFF).to_bytes(4, "little")  # the head, which encoding has left open

        def write(offset: int) -> None:
            segment.store(offset, *contents)

        offset = self.arena.store(nbytes, _SMALL if len(contents) == 1 else aligned(1), write)
        if offset is None:
            return False
        self._words[slot] = offset | (_check(slot, offset) << _OFFSET_BITS)
        return True

    def fetch(self, slot: int) -> list[bytes] | None:
        """Read the record of a slot through the file of a store on a disk; None if its word leads to none.

        Raises:
            OSError: it cannot be read (EIO).
        """
        segment, word = cast(DiskSegment, self._segment), self._words[slot]
        if (offset := self._offset(slot, word)) is None:
            return None
        head = segment.fetch(offset, HEAD.size)
        owner, _, nbytes, _ = HEAD.unpack(head)
        if owner != slot & 0xFFFFFFFF or not HEAD.size <= nbytes <= self._end - offset:
            return None
        return [head, segment.fetch(offset + HEAD.size, nbytes - HEAD.size)]

    def mend(self) -> None:
        """Have new records lie behind all that a word leads to; no other process has the store open.

        Records do not overlap, so the last one says where free memory begins. One that cannot be read is given up.
        """
        free, slots = self._begin, np.flatnonzero(self._directory)
        offsets = (self._directory[slots] & _OFFSET).astype(np.int64)
        for number in np.argsort(offsets)[::-1].tolist():
            slot = int(slots[number])
            if (record := self._fetched(slot)) is not None:
                free = int(offsets[number]) + sum(map(len, record))
                break
            self.state_bytes[slot] = EMPTY
            self._words[slot] = 0
        self.arena.mend(free)

    def _fetched(self, slot: int) -> list[bytes] | None:
        try:
            return self.fetch(slot)
        except OSError:
            return None

    def _offset(self, slot: int, word: int) -> int | None:
        """Where the word of a slot leads; None if it cannot be believed."""
        offset = word & _OFFSET
        if word >> _OFFSET_BITS != _check(slot, offset) or offset % _SMALL:
            return None
        return offset if self._begin <= offset <= self._end - HEAD.size else None

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
    """Where the directory, the numbers of the arena and the arena itself begin."""
    directory = aligned(count)
    ledger = aligned(directory + count * _WORD)
    return directory, ledger, aligned(ledger + LEDGER_BYTES)


def _check(slot: int, offset: int) -> int:
    return (((slot + 1) * _MIX + offset * 0xFF51AFD7ED558CCD) & 0xFFFFFFFFFFFFFFFF) >> 48


def _checks(slots: Integers, offsets: Integers) -> npt.NDArray[np.uint64]:
    mixed = (slots.astype(np.uint64) + np.uint64(1)) * np.uint64(_MIX)
    return (mixed + offsets.astype(np.uint64) * np.uint64(0xFF51AFD7ED558CCD)) >> np.uint64(48)
