"""What lies in a segment's file, found out without mapping it: for people who ask what takes their memory.

The file may be damaged, and another process may be filling it. It is read by `pread` in pieces of 64 KiB, and only
where it holds memory at all: what the header says never decides how much memory or time the look takes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_stocache.cache.rolling_ring import FORM, GENERATIONS, ROLLING, is_even
from lightning_stocache.cache.slots import EMPTY, READY
from lightning_stocache.node.header import HEADER_BYTES, Manifest, ManifestError, read_manifest, token_of

__all__ = ["Contents", "contents_of"]

_STATES = bytes((EMPTY, READY))
_PIECE = 1 << 16


@dataclass(frozen=True)
class Contents:
    """What a segment says about itself.

    Args:
        manifest: its own words; None if it has none, or none that can be read.
        damage: why it cannot be read, as it follows after "the cache"; empty if it can.
        filled: slots that are READY.
    """

    manifest: Manifest | None
    damage: str = ""
    filled: int = 0


def contents_of(file: int) -> Contents:
    """What lies in a file that is open for reading.

    Raises:
        ValueError: it is no segment.
        OSError: it cannot be read.
    """
    token_of(file)
    try:
        manifest = read_manifest(os.pread(file, HEADER_BYTES, 0), os.fstat(file).st_size - HEADER_BYTES)
    except ManifestError as error:
        return Contents(None, str(error))
    if manifest.fingerprint.get(FORM) == ROLLING:
        return Contents(manifest, "", _rolled(file, manifest.geometry.slots))
    end = HEADER_BYTES + manifest.geometry.slots
    filled = 0
    for piece in _pieces(file, HEADER_BYTES, end):
        if piece.translate(None, _STATES):
            return Contents(None, "is damaged: a slot is in a state that there is not")
        filled += piece.count(READY)
    return Contents(manifest, "", filled)


def _rolled(file: int, slots: int) -> int:
    """Slots of a rolling store that hold a sample."""
    start = HEADER_BYTES + GENERATIONS
    numbers = (np.frombuffer(piece, np.int64, len(piece) // 8) for piece in _pieces(file, start, start + 8 * slots))
    return sum(int(np.count_nonzero(is_even(generations))) for generations in numbers)


def _pieces(file: int, start: int, end: int) -> Iterator[bytes]:
    """The bytes of a range that lie in memory; the holes between them are zeroes that nobody has stored."""
    while start < end:
        try:
            start = max(start, os.lseek(file, start, os.SEEK_DATA))
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return  # (another error: a filesystem that does not know its holes)
        if start >= end or not (piece := os.pread(file, min(_PIECE, end - start), start)):
            return
        yield piece
        start += len(piece)
