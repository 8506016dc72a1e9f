"""Two stores for the same samples: one in memory above one on a disk.

The one in memory has the beginning of the other's arc, so a slot has the same number in both. What is loaded is stored
in both (write-through), or in memory, and on the disk when the store is saved (write-back). What lies in both is read
from memory. What an earlier job has left on the disk goes up when it is read for the first time, and found to be sound.
A place below the length of the store in memory is a slot there, one from it on a slot on the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import Lend, Memory, SampleCodec
from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.disk_store import DiskRows, DiskStore
from lightning_stocache.cache.placement import NO_SLOT, Arc, Integers
from lightning_stocache.cache.row_store import RowStore
from lightning_stocache.cache.segment_store import SegmentStore
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.cache.store import StoreHandle
from lightning_stocache.cache.turns import Turns

__all__ = ["TieredHandle", "TieredRows", "TieredStore", "tiered"]


@dataclass(frozen=True)
class TieredHandle:
    """How another process opens both stores."""

    memory: StoreHandle
    disk: StoreHandle
    write_back: bool

    @property
    def arc(self) -> Arc:
        """Which indices have a slot: on the disk."""
        return self.disk.arc


class TieredStore:
    """A `SampleStore` of two.

    Args:
        memory: with the beginning of the other's arc.
        disk: the store below it.
        write_back: whether what finds room in memory is stored on the disk not before `save`.
    """

    def __init__(self, memory: SegmentStore[Any], disk: DiskStore[Any], write_back: bool = False) -> None:
        self.memory, self.disk, self.write_back = memory, disk, write_back
        self._counters: Counters | None = None

    @property
    def handle(self) -> TieredHandle:
        """What another process needs to open the same store."""
        return TieredHandle(self.memory.handle, self.disk.handle, self.write_back)

    @property
    def codec(self) -> SampleCodec:
        """What samples look like."""
        codec: SampleCodec = self.disk.codec
        return codec

    @property
    def turns(self) -> Turns:
        """Who loads what, where several jobs fill it."""
        return self.disk.turns

    @property
    def length(self) -> int:
        """Number of samples in the dataset."""
        return self.disk.length

    def __len__(self) -> int:
        """Number of samples that have a slot."""
        return len(self.disk)

    # ---- samples ----

    def has_place(self, index: int) -> bool:
        """Whether an index has a slot."""
        return self.disk.has_place(index)

    def has_room(self, sample: Any) -> bool:
        """Whether a sample may find room."""
        return self.disk.has_room(sample) or self.memory.has_room(sample)

    def place(self, index: int) -> int:
        """Where the sample of an index can be read now, or NO_PLACE."""
        if (place := self.memory.place(index)) != NO_SLOT:
            return place
        place = self.disk.place(index)
        return place if place == NO_SLOT else place + len(self.memory)

    def lookup(self, indices: Integers) -> Integers:
        """Where those indices (int64 `[samples]`) can be read now, NO_PLACE for the others."""
        places = self.memory.lookup(indices)
        others = np.flatnonzero(places == NO_SLOT)
        if len(others):
            below = self.disk.lookup(indices[others])
            places[others] = np.where(below == NO_SLOT, NO_SLOT, below + len(self.memory))
        return places

    def recall(self, indices: Sequence[int]) -> bool:
        """Look through what an earlier job has left on the disk, and copy into memory what is sound, and has room."""
        if not self.disk.recall(indices):
            return False
        for index in indices:
            if not self.memory.has_place(index) or self.memory.place(index) != NO_SLOT:
                continue
            if (place := self.disk.place(index)) != NO_SLOT:
                any(self.memory.put_many([index], [self.disk.contents(place)]))
        return True

    def read(self, places: Integers, lend: Lend | None = None) -> Iterable[Any]:
        """Copies of the samples of READY places (int64 `[samples]`), in order."""
        above = places < len(self.memory)
        kinds = iter(self.memory.read(places[above], lend)), iter(self.disk.read(self._below(places[~above]), lend))
        return (next(kinds[0] if in_memory else kinds[1]) for in_memory in above.tolist())

    def stored_bytes(self, places: Integers) -> int:
        """Bytes of the samples of READY places (int64 `[samples]`)."""
        above = places < len(self.memory)
        parts = (self.memory, places[above]), (self.disk, self._below(places[~above]))
        return sum(store.stored_bytes(part) for store, part in parts if len(part))

    def fill(self, index: int, sample: Any) -> bool:
        """Check a sample and store it in both; whether it was stored in one of them.

        Raises:
            SampleMismatchError: it is not of the codec.
        """
        return any(self.put_many([index], [self.codec.contents(self.codec.encode(sample, index))]))

    def put_many(self, indices: Sequence[int], samples: Sequence[Sequence[memoryview]]) -> Iterator[bool | None]:
        """Store encoded samples, as the iterator comes to them; for each, the better of the two outcomes."""
        for index, contents in zip(indices, samples, strict=True):
            [above] = self.memory.put_many([index], [contents])
            if above and self._counters is not None:
                self._counters.add(fills=1)
            if above is not None and self.write_back:
                self.turns.give_up([index])
                yield above
                continue
            [below] = (self.disk.put_copies if above else self.disk.put_many)([index], [contents])
            yield True if True in (above, below) else False if False in (above, below) else None

    def count_fills(self, counters: Counters) -> None:
        """Count what is stored in one of them, when it is."""
        self._counters = counters
        self.disk.count_fills(counters)

    def save(self) -> bool:
        """Store on the disk what lies in memory alone, and wait for it; False if the disk does not take it."""
        wanted = self.memory.is_filled & ~self.disk.is_filled[: len(self.memory)]
        for slot in np.flatnonzero(wanted).tolist():
            index, contents = self.disk.arc.index(slot), self.memory.contents(slot)
            if not any(self.disk.put_copies([index], [contents])) and (
                not self.disk.flush() or not any(self.disk.put_copies([index], [contents]))
            ):
                return False
        return self.disk.flush()

    def _below(self, places: Integers) -> Integers:
        """Places on the disk as the store there has them."""
        return places - len(self.memory)

    # ---- what there is ----

    @property
    def filled(self) -> int:
        """Number of samples that are stored in one of them."""
        return int(self._either(self.memory.is_filled, self.disk.is_filled).sum())

    @property
    def full(self) -> bool:
        """Whether every index of the dataset can be read."""
        return len(self) == self.length and bool(self._either(self.memory.is_readable, self.disk.is_readable).all())

    def _either(self, above: npt.NDArray[np.bool_], below: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        below[: len(above)] |= above
        return below

    @property
    def fill_fraction(self) -> float:
        """How much of what there is on the disk is filled; of what is written later, how many of its samples."""
        return self.filled / max(len(self), 1) if self.write_back else self.disk.fill_fraction

    @property
    def capacity(self) -> int:
        """Number of samples for which there is room."""
        return self.disk.capacity

    @property
    def granted_bytes(self) -> int:
        """Bytes that it may take on the disk."""
        return self.disk.granted_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes that the samples take in memory."""
        return self.memory.memory_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes that they take on the disk."""
        return self.disk.disk_bytes

    @property
    def promised_bytes(self) -> int:
        """Bytes of memory that were granted and are still to be taken."""
        return self.memory.promised_bytes

    def keep_free(self, nbytes: int) -> None:
        """Leave that many bytes of the disk to others."""
        self.disk.keep_free(nbytes)

    def unlink(self) -> None:
        """Take the names of their files away, if they have any."""
        self.memory.unlink()
        self.disk.unlink()

    @property
    def closed(self) -> bool:
        """Whether this process has given it up."""
        return self.disk.closed

    def close(self) -> None:
        """Give both up in this process."""
        self.disk.close()
        self.memory.close()


class TieredRows(TieredStore):
    """A `RowSampleStore` of two."""

    memory: RowStore
    disk: DiskRows

    def read(self, places: Integers, lend: Lend | None = None) -> list[Any]:
        """Copies of the samples of READY places (int64 `[samples]`), which own their memory together."""
        codec: SampleSpec = self.disk.codec
        sizes = codec.sizes(len(places))
        memory = [np.empty(size, dtype=np.uint8) for size in sizes] if lend is None else lend(sizes)
        self.gather(places, memory)
        return codec.split(memory, len(places))

    def gather(self, places: Integers, into: Memory) -> None:
        """Copy READY places (int64 `[samples]`) into the memory of a batch, uint8 `[samples * nbytes]` per field."""
        above = places < len(self.memory)
        if above.all():
            self.memory.gather(places, into)
            return
        below = np.flatnonzero(~above)
        if len(below) == len(places):
            self.disk.gather(self._below(places), into)
            return
        # One gather from memory for all, in which any slot stands for those that are not there.
        self.memory.gather(np.where(above, places, places[above][0]), into)
        rest = [np.empty(size, dtype=np.uint8) for size in self.disk.codec.sizes(len(below))]
        self.disk.gather(self._below(places[below]), rest)
        for field, part in zip(into, rest, strict=True):
            if part.size:
                field.reshape(len(places), -1)[below] = part.reshape(len(below), -1)


def tiered(memory: SegmentStore[Any], disk: DiskStore[Any], write_back: bool) -> TieredStore:
    """The store of two, of rows or of records."""
    return (TieredRows if isinstance(memory, RowStore) else TieredStore)(memory, disk, write_back)
