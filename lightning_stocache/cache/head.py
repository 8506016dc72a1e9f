"""The bytes before the samples of a store: columns with a number per slot, and a few numbers for all slots.

`Head` says what there is and how large it is. `columns` makes live arrays over it. Every array begins at a multiple of
64 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import aligned
from lightning_stocache.cache.disk_sync import ROUNDS
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.seats import SEATS
from lightning_stocache.node.files import HEADER_BYTES
from lightning_stocache.node.segment import Segment

__all__ = [
    "CHANGES",
    "CLEARS",
    "END",
    "ENTRY",
    "FREE",
    "LEFT",
    "ONCE",
    "ON_DISK",
    "OWN_NUMBERS",
    "ROLLING",
    "ROLLING_ENTRY",
    "ROUNDS_BEGIN",
    "Head",
    "columns",
    "is_complete",
    "offsets",
]

ROLLING: Mapping[str, str | int] = {"form": "rolling"}
"""In the fingerprint of a rolling store, whose states are int64."""

ENTRY = np.dtype([("sum", np.uint64), ("begin", np.int64), ("nbytes", np.int64)])
"""What outlives a job on a disk, per slot: the checksum, zero without a sample; where the record begins; its size."""

ROLLING_ENTRY = np.dtype([*ENTRY.descr, ("index", np.int64), ("time", np.int64)])
"""An entry of a rolling store: also the index of the sample in its source, and when it came (`rolling`)."""

END = ""
"""The name under which `offsets` gives the end of all arrays."""

_BLOCK = 1 << 16  # the largest page or filesystem block; entries begin at one, so one hole frees all before them


def is_complete(generation: Integers | int) -> Any:
    """Whether a slot of this generation has a complete sample (`rolling`); for an array, each of them."""
    return (generation > 0) & (generation & 1 == 0)


def offsets(dtypes: Mapping[str, npt.DTypeLike], count: int, begin: int = 0) -> dict[str, int]:
    """The offset of each column's array; under the name "", the end of all arrays."""
    starts = {}
    for name, dtype in dtypes.items():
        starts[name] = begin
        begin = aligned(begin + count * np.dtype(dtype).itemsize)
    return starts | {END: begin}


def columns(
    segment: Segment, dtypes: Mapping[str, npt.DTypeLike], count: int, begin: int = 0
) -> dict[str, npt.NDArray[Any]]:
    """Make live, aligned arrays `[count]` over a segment. Drop them before the segment is closed.

    Args:
        segment: must be long enough.
        dtypes: dtypes by name; a dtype with a shape makes an array of more dimensions.
        count: length of each array.
        begin: offset of the first array, a multiple of 64.

    Example:
        >>> segment = Segment.create(256)
        >>> arrays = columns(segment, {"state": "u1", "begin": "i8", "pixels": "3u1"}, 5)
        >>> [array.shape for array in arrays.values()], offsets({"state": "u1", "begin": "i8"}, 5)
        ([(5,), (5,), (5, 3)], {'state': 0, 'begin': 64, '': 128})
    """
    starts = offsets(dtypes, count, begin)
    arrays = {}
    for name, dtype in dtypes.items():
        kind = np.dtype(dtype)
        if count * kind.itemsize:  # `frombuffer` keeps a reference to the buffer, `ndarray` does not
            array = np.frombuffer(segment.memory(starts[name], count * kind.itemsize), kind.base)
        else:
            array = np.empty(0, kind.base)
        arrays[name] = array.reshape(count, *kind.shape)
    return arrays


@dataclass(frozen=True)
class Head:
    """The part of a segment before the samples: columns with a number per slot, and a few numbers for all slots."""

    columns: Mapping[str, npt.DTypeLike]
    numbers: int = 8
    entry: np.dtype[Any] | None = None
    """What each slot has in its entry; None without entries."""

    block: int = aligned(1)
    """Entries begin at a multiple of it in the file."""

    def plus(self, columns: Mapping[str, npt.DTypeLike]) -> Head:
        """This head with more columns."""
        return replace(self, columns={**self.columns, **columns})

    @property
    def on_disk(self) -> Head:
        """This head with entries, all bytes before which one hole frees."""
        return replace(self, entry=ENTRY, block=_BLOCK)

    @property
    def of_records(self) -> Head:
        """This head with the places of records; entries have them."""
        return self if self.entry else self.plus({"begin": np.int64, "nbytes": np.int64})

    def scratch_bytes(self, count: int) -> int:
        """Bytes of columns and numbers."""
        size = aligned(offsets(self.columns, count)[END] + 8 * self.numbers)
        return -(-(HEADER_BYTES + size) // self.block) * self.block - HEADER_BYTES

    def nbytes(self, count: int) -> int:
        """Bytes of the head for `count` slots."""
        return aligned(self.scratch_bytes(count) + count * self.entry_bytes)

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry; 0 without entries."""
        return self.entry.itemsize if self.entry else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in all columns."""
        return sum(np.dtype(dtype).itemsize for dtype in self.columns.values()) + self.entry_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the numbers, and the most that alignment wastes. The number of slots does not matter."""
        return 8 * self.numbers + 256 + (self.block if self.entry else 0)


FREE, CHANGES, LEFT, CLEARS, ROUNDS_BEGIN = range(5)
"""The numbers of a store: see `layout`."""

OWN_NUMBERS = ROUNDS_BEGIN + ROUNDS.size // 8
ONCE = Head({"state": np.uint32}, OWN_NUMBERS + SEATS // 2)
"""The head of a store whose slots are written once. Behind its first numbers lie the lives of seats."""

ON_DISK = ONCE.on_disk
"""The head of such a store on a disk."""
