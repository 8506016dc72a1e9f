"""Checksums of the samples on a disk, which a crash or a flipped bit may have damaged.

Each slot has a checksum (XXH3, 64 bits; the lowest bit is always one, so zero means no checksum). It covers the bytes
of the sample, their number, the index (of a rolling store also the ticket), the offset of a record, and the token of
the file. It is written after the bytes, and no write waits for the disk, so a crash may leave the checksum without the
bytes, or the bytes without it.

A job checks a slot when it reads the slot for the first time, by `pread`, which reports a bad block as an error. In the
mapping a bad block would end the process. The sound slots of a call are then made ready in one turn, for all processes
that have the file open, except slots that another process has claimed meanwhile. If the disk has no room for their
words, this process alone remembers them. Slots that these processes have stored are ready, too. Ready slots are read
through the mapping. Until a slot is safe (`disk_sync`), each copy is compared with the checksum again (`is_sum_of`). A
slot that is not sound is claimed and emptied, and its sample is loaded again. A disk with a bad block is not read for a
while.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.disk_sync import DiskSync
from lightning_stocache.cache.layout import Layout
from lightning_stocache.cache.placement import NO_SLOT
from lightning_stocache.cache.seats import EMPTY, Seats
from lightning_stocache.node.segment import Segment

__all__ = ["Checksums", "checksum"]

log = logging.getLogger(__name__)

_REST = 30.0  # seconds for which a disk with a bad block is not read


class Checksums:
    """The checksums of a store on a disk.

    Args:
        disk: the segment of the store.
        layout: the layout of the store, with a column `sum`, which it fills from now on.
        identity: given a slot, the numbers of its sample that the checksum covers (the index; if the store rolls, the
            ticket, too). A rolling store is also given the index of a sample whose entry is not written yet.
        sync: gives verified slots their words.

    Raises:
        ImportError: xxhash is not installed; the message says how to get it.
    """

    def __init__(self, disk: Segment, layout: Layout, identity: Callable[..., tuple[int, ...]], sync: DiskSync) -> None:
        self._disk, self._layout, self._identity, self._sync = disk, layout, identity, sync
        self._xxh3 = checksum()
        self._rest_until = 0.0
        self.known: npt.NDArray[np.bool_] | None = None
        """The slots that this process alone knows as verified, bool `[slots]`. They never become safe."""
        layout.checksum, layout.is_sound = self._sum, self.is_sound

    def is_sound(self, slot: int) -> bool:
        """Whether the sample of a slot can be read, and is the one that was stored."""
        try:
            stored = self._layout.sum(slot)
            return stored != 0 and self._sum_now(slot) == stored
        except OSError:
            return False

    def is_sum_of(self, slot: int, contents: Sequence[Any]) -> bool:
        """Whether a copy of a sample, given in its parts as bytes, is what was stored in a slot."""
        try:
            stored = self._layout.sum(slot)
        except OSError:
            return False
        return stored == self._sum(slot, self._layout.begin_of(slot), sum(map(len, contents)), contents)

    def verify(self, slots: Sequence[int], seats: Seats) -> bool:
        """Read what an earlier job has stored in slots that are not ready: set sound slots ready, and empty the others.

        `seats` have the words of the slots. Returns whether some may be ready now.
        """
        unknown = [slot for slot in dict.fromkeys(slots) if slot != NO_SLOT]
        if not unknown or time.monotonic() < self._rest_until:
            return False
        try:
            return self._verify(unknown, seats)
        except OSError as error:
            self._rest_until = time.monotonic() + _REST
            log.warning(
                "the disk of the cache is not read for %.0f s, samples are loaded meanwhile: %s", _REST, str(error)
            )
            return True

    def _verify(self, unknown: Sequence[int], seats: Seats) -> bool:
        sums = {slot: self._read(slot, self._layout.sum, seats) for slot in unknown}
        stored = [slot for slot, number in sums.items() if number]
        if not stored:
            return False
        sound = []
        for slot in stored:
            if self._read(slot, self._sum_now, seats) == sums[slot]:
                sound.append(slot)
            else:
                self._empty(slot, sums[slot], seats)
        self._set_ready(sound, seats)
        return True

    def _set_ready(self, sound: Sequence[int], seats: Seats) -> None:
        """Let slots be read, by other processes, too, if there is a turn, and the disk has room for their words."""
        with suppress(OSError):
            if seats.publish_found(sound, self._sync.verified_word) is not None:
                return
        if self.known is None:
            self.known = np.zeros(self._layout.count, dtype=np.bool_)
        self.known[[slot for slot in sound if self._layout.states[slot] == EMPTY]] = True

    def _empty(self, slot: int, number: int, seats: Seats) -> None:
        """Empty a slot with this checksum, unless another process has claimed it."""
        if seats.is_mine(slot):
            self._layout.forget(slot)
            return
        with suppress(OSError):  # the disk has no room for a claim
            try:
                if seats.take([slot]) and self._layout.sum(slot) == number:
                    self._layout.forget(slot)
            finally:
                seats.release([slot])

    def _read(self, slot: int, read: Callable[[int], int], seats: Seats) -> int:
        """What `read` gives for a slot. A slot that it cannot read is emptied."""
        try:
            return read(slot)
        except OSError:
            if seats.is_mine(slot):
                self._layout.forget(slot)
            else:
                try:
                    if seats.take([slot]):
                        self._layout.forget(slot)
                finally:
                    seats.release([slot])
            raise

    def _sum_now(self, slot: int) -> int:
        """The checksum of what a slot has, read through the file; 0 for nothing. Raises OSError for a bad block."""
        parts = self._layout.fetch(slot)
        return 0 if parts is None else self._sum(slot, self._layout.begin_of(slot), sum(map(len, parts)), parts)

    def _sum(self, slot: int, begin: int, nbytes: int, contents: Iterable[Any], *index: int) -> int:
        digest = self._xxh3()
        for part in contents:
            digest.update(part)
        numbers = (begin, *self._identity(slot, *index), nbytes)
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
