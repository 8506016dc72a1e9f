"""Whether what lies on a disk is what was stored there, and not what a crash or a flipped bit has left.

Each slot has a checksum (XXH3, 64 bits, of which the lowest is always one, so that zero is none) over the bytes of the
sample, their number, the index, where a record begins, and the token of the file. It is written after the bytes, and no
write waits for the disk, so a crash may leave either without the other. A job finds out when it reads the slot for the
first time, by `pread`: that reports a bad block as an error, where the mapping would end the process. A sound slot is
verified from then on, for all processes of the job on the node: a byte per slot, in memory, which slots have that the
job has filled itself. Verified slots are read through the mapping. A slot that is not sound is emptied, and loaded
anew. A disk with a bad block is left alone for a while.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.layout import EMPTY, READY, Layout
from lightning_stocache.cache.placement import NO_SLOT, Arc
from lightning_stocache.node.segment import Segment

__all__ = ["SUM_BYTES", "Checksums", "checksum"]

log = logging.getLogger(__name__)

SUM_BYTES = 8
"""Bytes of a checksum."""

_SUM = struct.Struct("<Q")
_ABOUT = struct.Struct("<16sqqQ")  # token, where a record begins, index, bytes
_REST = 30.0  # seconds for which a disk with a bad block is left alone


class Checksums:
    """The checksums of a store on a disk, and which slots this job has verified.

    Args:
        segment: of the store.
        layout: its columns, of which one is `sum`.
        arc: which indices have a slot, and where.
        verified: in memory, a byte for each slot: READY where it may be read; zeroes at first.

    Raises:
        ImportError: xxhash is not installed; the message says how to get it.
    """

    def __init__(self, segment: Segment, layout: Layout, arc: Arc, verified: Segment) -> None:
        self.segment = verified
        self.verified = np.frombuffer(verified.memory(0, arc.slots), dtype=np.uint8)
        self._disk, self._layout, self._arc = segment, layout, arc
        self._begins = layout.columns.get("begin")
        self._claims = Claims(segment)
        self._xxh3 = checksum()
        self._rest_until = 0.0

    def seal(self, slot: int, contents: Iterable[Any]) -> None:
        """Write the checksum of a sample, given its parts, whose bytes are in their slot already.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        self._disk.store(self._layout.offset_in("sum", slot), memoryview(_SUM.pack(self._sum(slot, contents))))

    def is_sound(self, slot: int) -> bool:
        """Whether what lies in a slot can be read, and is what was stored there."""
        try:
            return self._matches(slot)
        except OSError:
            return False

    def verify(self, slots: Sequence[int]) -> None:
        """Read what an earlier job has stored in those slots: what is sound may be read, what is not is emptied."""
        if time.monotonic() < self._rest_until or not self._disk.is_whole:
            return
        for slot in slots:
            if slot == NO_SLOT or self._layout.states[slot] == EMPTY or self.verified[slot]:
                continue
            try:
                is_sound = self._matches(slot)
            except OSError as error:
                self._empty(slot)
                self._rest_until = time.monotonic() + _REST
                log.warning(
                    "the disk of the cache is left alone for %.0f s, samples are loaded meanwhile: %s", _REST, error
                )
                return
            if is_sound:
                self.verified[slot] = READY
            else:
                self._empty(slot)

    def close(self) -> None:
        """Drop the view, and the memory of what is verified."""
        self.verified, self._begins = np.empty(0, dtype=np.uint8), None
        self.segment.close()

    def _matches(self, slot: int) -> bool:
        """Whether the checksum of a slot is that of its bytes, read through the file; an OSError if it cannot be."""
        parts = self._layout.fetch(slot)
        if parts is None:
            return False
        (stored,) = _SUM.unpack(self._disk.fetch(self._layout.offset_in("sum", slot), SUM_BYTES))
        return bool(stored == self._sum(slot, parts))

    def _empty(self, slot: int) -> None:
        if self._claims.take(slot):
            try:
                if not self.verified[slot]:
                    self._layout.states[slot] = EMPTY
            finally:
                self._claims.release(slot)

    def _sum(self, slot: int, contents: Iterable[Any]) -> int:
        digest, nbytes = self._xxh3(), 0
        for part in contents:
            digest.update(part)
            nbytes += memoryview(part).nbytes
        begin = 0 if self._begins is None else int(self._begins[slot])
        digest.update(_ABOUT.pack(self._disk.token, begin, self._arc.index(slot), nbytes))
        return int(digest.intdigest()) | 1


def checksum() -> Any:
    """The algorithm, of the package xxhash; an ImportError that says how to get it, where it is missing."""
    try:
        import xxhash
    except ImportError as error:
        raise ImportError(
            "a cache on a disk has checksums, for which xxhash is missing: pip install 'lightning-stocache[disk]'"
        ) from error
    return xxhash.xxh3_64
