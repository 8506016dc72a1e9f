"""Checksums of the samples on a disk, which a crash or a flipped bit may have damaged.

Each slot has a checksum (XXH3, 64 bits; the lowest bit is always one, so zero means no checksum). It covers the bytes
of the sample, their number, the index (of a rolling store also the ticket), the offset of a record, and the token of
the file. It is written after the bytes, and no write waits for the disk, so a crash may leave the checksum without the
bytes, or the bytes without it.

A job checks a slot when it reads the slot for the first time, by `pread`, which reports a bad block as an error. In the
mapping a bad block would end the process. A sound slot is then verified for all processes of the job on the node: a
byte per slot, in memory. Slots that the job has filled itself are verified, too. Verified slots are read through the
mapping. A slot that is not sound is emptied, and its sample is loaded again. A disk with a bad block is not read for a
while.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from lightning_stocache.cache.layout import READY, Layout
from lightning_stocache.cache.placement import NO_SLOT
from lightning_stocache.cache.seats import Seats
from lightning_stocache.node.segment import Segment

__all__ = ["SUM_BYTES", "Checksums", "checksum"]

log = logging.getLogger(__name__)

SUM_BYTES = 8
"""Bytes of a checksum."""

_SUM = struct.Struct("<Q")
_REST = 30.0  # seconds for which a disk with a bad block is not read


class Checksums:
    """The checksums of a store on a disk, and the slots that this job has verified.

    Args:
        disk: the segment of the store.
        layout: the layout of the store, with a column `sum`.
        identity: given a slot, the numbers of its sample that the checksum covers (the index; if the store rolls, the
            ticket, too).
        memory: a segment in memory with a byte per slot, READY where the slot may be read; zeroes at first.

    Raises:
        ImportError: xxhash is not installed; the message says how to get it.
    """

    def __init__(
        self, disk: Segment, layout: Layout, identity: Callable[[int], tuple[int, ...]], memory: Segment
    ) -> None:
        self._disk, self._memory, self._layout, self._identity = disk, memory, layout, identity
        self.verified = np.frombuffer(memory.memory(0, layout.count), dtype=np.uint8)
        self._begins = layout.columns.get("begin")
        self._seats = Seats(disk, layout.states, layout.lives, layout.changes)
        self._xxh3 = checksum()
        self._rest_until = 0.0

    def seal(self, slot: int, contents: Iterable[Any]) -> None:
        """Write the checksum of a sample, given its parts, whose bytes are already in their slot.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        self._disk.store(self._layout.offset_in("sum", slot), memoryview(_SUM.pack(self._sum(slot, contents))))

    def is_sound(self, slot: int) -> bool:
        """Whether the sample of a slot can be read, and is the one that was stored."""
        try:
            return self._matches(slot)
        except OSError:
            return False

    def verify(self, slots: Sequence[int]) -> None:
        """Read the samples of slots that an earlier job has filled: mark sound slots verified, and empty the others."""
        if time.monotonic() < self._rest_until or not self._disk.is_whole:
            return
        for slot in slots:
            if slot == NO_SLOT or self._layout.states[slot] != READY or self.verified[slot]:
                continue
            try:
                is_sound = self._matches(slot)
            except OSError as error:
                self._empty(slot)
                self._rest_until = time.monotonic() + _REST
                log.warning(
                    "the disk of the cache is not read for %.0f s, samples are loaded meanwhile: %s", _REST, error
                )
                return
            if is_sound:
                self.verified[slot] = READY
            else:
                self._empty(slot)

    def close(self) -> None:
        """Drop the view, and the memory of the verified slots."""
        self._seats.close()
        self.verified, self._begins = np.empty(0, dtype=np.uint8), None
        self._memory.close()

    def _matches(self, slot: int) -> bool:
        """Whether the checksum of a slot matches its bytes, read through the file. Raises OSError for a bad block."""
        parts = self._layout.fetch(slot)
        if parts is None:
            return False
        (stored,) = _SUM.unpack(self._disk.fetch(self._layout.offset_in("sum", slot), SUM_BYTES))
        return bool(stored == self._sum(slot, parts))

    def _empty(self, slot: int) -> None:
        self._seats.empty(slot, unless=lambda: bool(self.verified[slot]))

    def _sum(self, slot: int, contents: Iterable[Any]) -> int:
        digest, nbytes = self._xxh3(), 0
        for part in contents:
            digest.update(part)
            nbytes += memoryview(part).nbytes
        begin = 0 if self._begins is None else int(self._begins[slot])
        numbers = (begin, *self._identity(slot), nbytes)
        digest.update(struct.pack(f"<16s{len(numbers)}q", self._disk.token, *numbers))
        return int(digest.intdigest()) | 1


def checksum() -> Any:
    """The algorithm, from the package xxhash. Raises ImportError, with the way to install it, if it is missing."""
    try:
        import xxhash
    except ImportError as error:
        raise ImportError(
            "a cache on a disk has checksums, for which xxhash is missing: pip install 'lightning-stocache[disk]'"
        ) from error
    return xxhash.xxh3_64
