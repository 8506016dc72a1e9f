"""The description of a segment, for people: what is in a file, without mapping it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from lightning_stocache.cache.head import ENTRY, ON_DISK, ROLLING, is_complete
from lightning_stocache.cache.seats import READY
from lightning_stocache.node.files import HEADER_BYTES, Manifest, ManifestError, manifest_in, token_of

__all__ = ["Contents", "contents_of"]

_STEP = 1 << 20  # slots whose states are read together


@dataclass(frozen=True)
class Contents:
    """The description of a segment: its manifest, or its damage in words, and the number of its filled slots."""

    manifest: Manifest | None
    damage: str = ""
    filled: int = 0


def contents_of(file: int) -> Contents:
    """Read the description of a segment's file without mapping it. Another process may be filling it.

    Raises:
        ValueError: the file is no segment.
        OSError: the file cannot be read.
    """
    token_of(file)
    try:
        manifest = manifest_in(file)
    except ManifestError as error:
        return Contents(None, str(error))
    rolls = manifest.fingerprint.items() >= ROLLING.items()
    filled, slots, begin, dtype = 0, manifest.geometry.slots, HEADER_BYTES, np.dtype(np.int64 if rolls else np.uint32)
    if manifest.on_disk and not rolls:
        begin, dtype = HEADER_BYTES + ON_DISK.scratch_bytes(slots), ENTRY
    for first in range(0, slots, _STEP):  # one read has at most 2 GiB
        length = min(slots - first, _STEP) * dtype.itemsize
        content = os.pread(file, length, begin + first * dtype.itemsize)
        found = np.frombuffer(content, dtype, len(content) // dtype.itemsize)  # the file may be cut off anywhere
        if rolls:
            filled += int(np.count_nonzero(is_complete(found)))
        else:
            filled += int(np.count_nonzero(found["sum"] if manifest.on_disk else found == READY))
    return Contents(manifest, "", filled)
