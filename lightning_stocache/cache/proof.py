"""Whether what lies on a disk is what was stored there, and not what a crash or a flipped bit has left.

Each slot has a checksum (XXH3, 64 bits, of which the lowest is always one, so that what was never written is none). The
bytes of the sample lie under it, with their number, the index, and the token of the file. It is stored after the bytes,
in no particular order on the disk: no write is waited for. So after a crash a slot may be READY without its checksum,
or have a checksum without its bytes. Both are found when it is read for the first time by a job: by `pread`, for a
block that cannot be read is an error there, and not the end of the process. What is sound is trusted from then on, by
all processes of the job on the node: a byte for each slot, in memory. What is not is EMPTY again, and loaded anew.

Trusted is also what the job has stored itself. Later reads go through the mapping, as from memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import aligned
from lightning_stocache.cache.placement import Arc, Integers
from lightning_stocache.node.segment import Segment

__all__ = ["SUM_BYTES", "Proof", "checksum", "sums_bytes"]

SUM_BYTES = 8
"""Bytes of a checksum."""

_SUM = struct.Struct("<Q")
_ABOUT = struct.Struct("<16sqQ")  # token, index, bytes


def sums_bytes(slots: int) -> int:
    """Bytes of the checksums of so many slots, at the end of a segment."""
    # One more than they need: a file that was cut off never has its length again by what is stored into it later.
    return aligned(slots * SUM_BYTES + 1)


class Proof:
    """The checksums of a store on a disk, and which slots this job trusts.

    Args:
        segment: of the store; the checksums are its last bytes.
        arc: which indices have a slot, and where.
        trusted: in memory, a byte for each slot: 1 where it is trusted.

    Raises:
        ImportError: xxhash is not installed; the message says how to get it.
    """

    def __init__(self, segment: Segment, arc: Arc, trusted: Segment) -> None:
        self.trusted = trusted
        self._segment, self._arc = segment, arc
        self._start = segment.size - sums_bytes(arc.slots)
        self._bytes = trusted.memory(0, arc.slots)
        self._array = np.frombuffer(self._bytes, dtype=np.uint8)
        self._xxh3 = checksum()

    @staticmethod
    def begin(slots: int) -> Segment:
        """The memory that says which slots are trusted: none is.

        Raises:
            OSError: there is no room for it.
        """
        return Segment.create(slots, reserved=slots)

    @property
    def is_whole(self) -> bool:
        """Whether the file has still its length; behind its end nothing may be read."""
        return self._segment.is_whole

    def trusts(self, slot: int) -> bool:
        """Whether a slot may be read."""
        return self._bytes[slot] != 0 and self._segment.is_whole

    def trusted_among(self, slots: Integers) -> npt.NDArray[np.bool_]:
        """Which of those slots may be read, bool of the same shape; what is no slot may not."""
        if not self._segment.is_whole:
            return np.zeros(slots.shape, dtype=np.bool_)
        trusted: npt.NDArray[np.bool_] = (self._array.take(slots, mode="clip") != 0) & (slots >= 0)
        return trusted

    @property
    def trusted_slots(self) -> npt.NDArray[np.bool_]:
        """Which slots may be read, bool `[slots]`."""
        return self._array != 0 if self._segment.is_whole else np.zeros(len(self._array), dtype=np.bool_)

    def seal(self, slot: int, contents: Iterable[Any]) -> None:
        """Store the checksum of a sample, given its parts, whose bytes are in their slot already.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        self._segment.store(self._start + slot * SUM_BYTES, memoryview(_SUM.pack(self._sum(slot, contents))))

    def trust(self, slot: int) -> None:
        """Have a slot read from now on."""
        self._bytes[slot] = 1

    def holds(self, slot: int, contents: Iterable[Any]) -> bool:
        """Whether those are the parts that were stored in a slot.

        Raises:
            OSError: the checksum cannot be read.
        """
        (stored,) = _SUM.unpack(self._segment.fetch(self._start + slot * SUM_BYTES, SUM_BYTES))
        return bool(stored == self._sum(slot, contents))

    def close(self) -> None:
        """Drop the views, and the memory of what is trusted."""
        self._array = np.empty(0, dtype=np.uint8)
        self._bytes.release()
        self.trusted.close()

    def _sum(self, slot: int, contents: Iterable[Any]) -> int:
        digest, nbytes = self._xxh3(), 0
        for part in contents:
            digest.update(part)
            nbytes += memoryview(part).nbytes
        digest.update(_ABOUT.pack(self._segment.token, self._arc.index(slot), nbytes))
        return int(digest.intdigest()) | 1


def checksum() -> Any:
    """The algorithm, of the package xxhash.

    Raises:
        ImportError: it is not installed; the message says how to get it.
    """
    try:
        import xxhash
    except ImportError as error:
        raise ImportError(
            "a cache on a disk has checksums, for which xxhash is missing: pip install 'lightning-stocache[disk]'"
        ) from error
    return xxhash.xxh3_64
