"""The store of samples, the one class of this room that loaders and set-up use.

A store is a segment, a layout (rows or records), a medium (memory or a disk) and a policy, which is its class:

    Store           an index has a fixed slot on the ring; the store stops when there is no room
    StreamStore     a sample takes the next slot; when the stream has ended, samples have an order (`stream`)
    RollingStore    a sample takes the slot of the oldest sample (`rolling`)

An index has a slot in the store, or none; that never changes. A loader looks up the slots of a batch, reads those that
are ready, and puts the samples that are missing. Rows can also be gathered into the memory of a batch. Readers get
copies, never views.

The process that has loaded a sample fills its slot:

    claim the slot (`seats`) -> write, which takes the memory -> fence -> ready

A process that does not get the claim serves its sample unstored. A killed writer leaves the slot empty and claimable. A
ready slot stays ready, except after `invalidate`, whose readers look up again (`changes`), and after `clear` and
`replace`, during which the caller keeps readers away.
Where memory runs short (`shortage`), the slot stays empty, with one warning per node.

Two jobs that miss the same sample would both load it. So where other jobs can open the store, a slot is claimed before
its sample is loaded (`divide`). A thread that finds the slot claimed loads other samples first, and then waits. No
thread waits while it has a claim, so no thread waits for ever: a source that reads a sample through the cache while it
makes another one loads that sample by itself, unstored. A process that has waited in vain (the other process was
stopped) loads all samples by itself from then on.

On a disk (`medium`) what an earlier job has stored is verified before it is read, by lookups with `verify`, and is not
stored again. If a copy shows that the disk has lost a sample, this process forgets the slot and increases `changes`, so
the caller looks its samples up again. An error of the disk does not end the training: the slot stays empty. The next
job restores the full length of a file that was cut off.

Locked bytes:

    slot            while it is being written (`rolling`)
    after slots     by the process that has warned of a shortage, until it ends
    far behind      for `alone`, for `disk_sync`, and for each seat

Any number can be an index: a negative index, and one outside of the dataset, has no slot.
"""

from __future__ import annotations

import errno
import logging
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, compress
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import Codec, Lend, Memory, chosen, nbytes_of
from lightning_stocache.cache.gather_pool import ALONE, GatherPool
from lightning_stocache.cache.head import ONCE, Head
from lightning_stocache.cache.layout import UNREADABLE, Layout
from lightning_stocache.cache.layout_records import Records
from lightning_stocache.cache.layout_rows import Rows
from lightning_stocache.cache.medium import Disk, Medium
from lightning_stocache.cache.placement import NO_SLOT, Arc, Domain, Integers
from lightning_stocache.cache.seats import EMPTY, READY, Seats, are_stored
from lightning_stocache.cache.shortage import Shortage, refused
from lightning_stocache.node.files import HEADER_BYTES, Backend, Geometry, Manifest
from lightning_stocache.node.segment import Segment, SegmentHandle, fence

__all__ = ["NO_SLOT", "PATIENCE", "RETRY_SECONDS", "UNREADABLE", "Store", "StoreHandle", "layout_of"]

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds that a process waits, once, for a sample that another process loads."""

RETRY_SECONDS = 10.0
"""Length of the pause after a shortage: memory seldom comes back at once, and each try costs system calls."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01
_STEP = 1 << 12  # slots that are looked at together for an empty one
_WINDOW = 1 << 16  # slots that are looked at together for those that have a sample
_ALONE = 1 << 40  # a byte after those of all slots
_COPIED_BYTES = 1 << 22  # that `take_over` copies at once
_LOST = "it has lost what it had taken (does a thin volume or a sparse image have less room than it promises?)"
_SLOW = "a sync of it has not ended within {:.0f} s, or has ended with its process: it may still have the old samples"


@dataclass(frozen=True)
class StoreHandle:
    """The address of a store for other processes of the node. It can be pickled and sent anywhere.

    `companion` is the ledger of a stream, or the control numbers and rounds of a rolling store on a disk.
    """

    segment: SegmentHandle
    codec: Any
    arc: Arc
    companion: SegmentHandle | None = None


class Store:
    """Samples by index, filled lazily and read by many processes.

    Args:
        segment: the memory of the samples.
        codec: what a sample looks like: the spec of rows, or the codec of records.
        arc: which indices have a slot, and which slot.
        companion: a second segment that a policy needs, see `StreamStore` and `rolling_slots`.

    Raises:
        ImportError: xxhash, which makes the checksums of a store on a disk, is not installed.

    Example:
        >>> from lightning_stocache.cache.rows import SampleSpec
        >>> store = Store.create(SampleSpec.infer(1), Arc(size=10, slots=5))
        >>> store.fill(4, 16), store.get(4), store.fill(7, 49), store.filled
        (True, 16, False, 1)
        >>> store.close()
        >>> from lightning_stocache.cache.records import RecordCodec
        >>> store = Store.create(RecordCodec.infer(["a", "bc"]), Arc(size=10, slots=10), granted=2**20)
        >>> store.fill(4, "some text"), store.get(4), store.get(5), store.filled
        (True, 'some text', None, 1)
        >>> store.close()
    """

    head: ClassVar[Head] = ONCE
    """The columns and numbers that lie before the samples, in memory."""

    stores_misses: ClassVar[bool] = True
    """Whether this store takes missing samples by `put`."""

    def __init__(self, segment: Segment, codec: Any, arc: Arc, companion: Segment | None = None) -> None:
        self.segment, self.codec, self.arc, self._companion = segment, codec, arc, companion
        self.layout: Layout = layout_of(codec)(segment, codec, arc.slots, self._head(segment.on_disk))
        self._medium = Medium(self.layout)
        if segment.on_disk:
            self._medium = Disk(segment, self.layout, partial(self._identity, self.layout, arc))
        layout = self.layout
        self._seats = Seats(segment, layout.states, layout.lives, layout.changes, self._medium.stored_word)
        self._waits = self.stores_misses and segment.path is not None  # other jobs can open it
        self._shortage = Shortage(segment)
        self._retry_at = 0.0
        self._hole = 0  # the slot that was empty when `full` looked
        self._closed = False

    # ---- opening ----

    @classmethod
    def create(
        cls,
        codec: Codec,
        arc: Arc,
        backend: Backend | None = None,
        whose: Mapping[str, Any] | None = None,
        *,
        granted: int = 0,
        directory: str | None = None,
    ) -> Store:
        """Make an empty store.

        Args:
            codec: what a sample looks like.
            arc: which indices have a slot, and which slot.
            backend: kind of segment, see `lightning_stocache.node.segment`.
            whose: fields of the manifest besides the arc, see `lightning_stocache.node.files`.
            granted: bytes that a store of records may take.
            directory: the directory on a disk where the store lies; `check_directory` has accepted it.
        """
        size, manifest = cls.plan(codec, arc, whose, granted=granted, on_disk=directory is not None)
        segment = Segment.create(size, backend, manifest, directory)
        try:
            return cls._in_segment(segment, codec, arc)
        except BaseException:
            segment.close()
            raise

    @classmethod
    def plan(
        cls,
        codec: Codec,
        arc: Arc,
        whose: Mapping[str, Any] | None = None,
        *,
        granted: int = 0,
        on_disk: bool = False,
    ) -> tuple[int, Manifest]:
        """The size and the manifest of the segment for a store; arguments as in `create`."""
        size = layout_of(codec).bytes_for(codec, arc.slots, granted, cls._head(on_disk))
        return size, Manifest(Geometry(**arc.geometry), payload=size, on_disk=on_disk, **(whose or {}))

    @classmethod
    def checksum_bytes(cls, codec: Codec) -> int:
        """Bytes that a slot takes on a disk beyond those that it takes in memory."""
        on_disk, in_memory = (layout_of(codec).whole(cls._head(on_disk)) for on_disk in (True, False))
        return on_disk.slot_bytes - in_memory.slot_bytes

    @classmethod
    def open(
        cls, segment: Segment, codec: Codec, geometry: Geometry, length: int, domain: Domain | None = None
    ) -> Store:
        """Open the store in a segment that this job or another job has made, for a dataset of `length` samples.

        Raises:
            ValueError: its manifest does not fit its size or the dataset.
            OSError: the system has no memory for the columns of the slots.
        """
        arc, head = Arc(**asdict(geometry), domain=domain), cls._head(segment.on_disk)
        size = layout_of(codec).bytes_for(codec, arc.slots, segment.size - head.fixed_bytes, head)
        if arc.length != length or size != segment.size:
            raise ValueError(f"{arc.slots:,} slots for {arc.size:,} samples do not fit in its {segment.size:,} bytes")
        return cls._in_segment(segment, codec, arc)

    @classmethod
    def mend(cls, codec: Codec, segment: Segment, manifest: Manifest, domain: Domain | None = None) -> None:
        """Forget what earlier jobs knew of a segment on a disk, while no other process has it open."""
        store = cls._in_segment(segment, codec, Arc(**asdict(manifest.geometry), domain=domain))
        try:
            store.repair()
        finally:
            store.drop_views()

    def repair(self) -> None:
        """Forget what earlier jobs knew, while no other process has the store open."""
        self._medium.drop_lost_pages()  # first: it reads numbers that `mend` clears
        self.layout.mend()

    @staticmethod
    def _identity(layout: Layout, arc: Arc, slot: int) -> tuple[int, ...]:
        """The numbers of a slot's sample that its checksum covers."""
        return (arc.index(slot),)

    @classmethod
    def _head(cls, on_disk: bool) -> Head:
        """What lies before the samples: on a disk with their checksums."""
        return cls.head.on_disk if on_disk else cls.head

    @classmethod
    def _in_segment(cls, segment: Segment, codec: Codec, arc: Arc) -> Store:
        """Open the store in a segment, and reserve its columns: a maker that died may not have reserved them."""
        if not segment.on_disk:
            segment.reserve(0, layout_of(codec).reserved_bytes(arc.slots, cls.head))
        return cls(segment, codec, arc)

    @classmethod
    def attach(cls, handle: StoreHandle) -> Self:
        """Open a store that another process of the node has open. Raises OSError if this process cannot reach it."""
        segments = [Segment.attach(handle.segment)]
        try:
            if handle.companion is not None:
                segments.append(Segment.attach(handle.companion))
            return cls(segments[0], handle.codec, handle.arc, *segments[1:])
        except BaseException:
            for segment in segments:
                segment.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.segment, self.codec, self.arc, self._companion)

    @property
    def handle(self) -> StoreHandle:
        """The address of this store for other processes."""
        companion = None if self._companion is None else self._companion.handle
        return StoreHandle(self.segment.handle, self.codec, self.arc, companion)

    @property
    def length(self) -> int:
        """Number of samples in the dataset."""
        return self.arc.length

    def __len__(self) -> int:
        """Number of slots."""
        return self.arc.slots

    # ---- reading ----

    def has_slot(self, index: int) -> bool:
        """Whether an index has a slot, ready or not."""
        return self.arc.slot(index) != NO_SLOT

    def have_slots(self, indices: Sequence[int] | Integers) -> npt.NDArray[np.bool_]:
        """Whether each index has a slot, ready or not; bool `[samples]`."""
        return np.asarray(self.arc.slots_of(np.asarray(indices, dtype=np.int64)) != NO_SLOT)

    def ready_slot(self, index: int, *, verify: bool = False) -> int:
        """The slot of an index if it can be read now, or NO_SLOT; see `lookup`."""
        slot, medium = self.arc.slot(index), self._medium
        if slot == NO_SLOT or not medium.is_whole:
            return NO_SLOT
        if not medium.is_ready(slot) and not (verify and medium.verify([slot], self._seats) and medium.is_ready(slot)):
            return NO_SLOT
        fence()
        return slot

    def lookup(self, indices: Integers, *, verify: bool = False) -> Integers:
        """The slots of the indices that can be read now, and NO_SLOT for the others; int64 `[samples]`.

        Args:
            indices: int64 `[samples]`.
            verify: whether to verify first what an earlier job has stored under these indices on a disk. That reads the
                disk, so workers ask for it, and the training process does not.
        """
        slots = self.arc.slots_of(indices)
        if self.arc.slots == 0:
            return slots
        if not self._medium.is_whole:
            return np.full_like(slots, NO_SLOT)
        ready = self._medium.are_ready(slots)
        if verify and self._medium.verify(slots[~ready].tolist(), self._seats):
            ready = self._medium.are_ready(slots)
        fence()
        slots[~ready] = NO_SLOT
        return slots

    def gather(self, slots: Integers, into: Memory, pool: GatherPool = ALONE) -> None:
        """Copy ready rows (int64 `[samples]`) into the memory of a batch, uint8 `codec.sizes(samples)`.

        If `changes` differs afterwards, discard the batch and look its samples up again.
        """
        self.layout.gather(slots, into, pool, self._medium)

    def read(self, slots: Integers, lend: Lend | None = None) -> Iterable[Any]:
        """Copy the samples of ready slots (int64 `[samples]`) into lent or new memory.

        Rows share their memory, and are copied as `gather` does. Records are decoded one by one as the caller
        iterates, even after `close`. A record that cannot be decoded, or that is decoded after another change of
        samples, is UNREADABLE.
        """
        return self.layout.read(slots, lend, self._medium)

    def get(self, index: int) -> Any | None:
        """A copy of the sample of an index, or None."""
        while True:
            seen = self.changes
            slot = self.ready_slot(index)
            if slot == NO_SLOT:
                return None
            [sample] = self.read(np.array([slot]))
            if self.changes == seen:
                return sample

    def stored_bytes(self, slots: Integers) -> int:
        """Bytes of the samples of ready slots (int64 `[samples]`)."""
        return self.layout.stored_bytes(slots)

    # ---- which process loads a sample ----

    def divide(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Divide indices into those that this process loads, and those that others load.

        The caller releases all of them in the end, also if this call raises.
        """
        if not self._waits or not self.segment.has_locks:
            return list(indices), []
        taken = self._take_turns(indices)
        slots = self.lookup(np.array(taken, dtype=np.int64), verify=True)
        stored = {index for index, slot in zip(taken, slots.tolist(), strict=True) if slot != NO_SLOT}
        self.release(stored)
        here = set(taken) - stored
        return [index for index in indices if index in here], [index for index in indices if index not in here]

    def release(self, indices: Iterable[int]) -> None:
        """Let other processes load indices that `divide` gave to this process, and did not find stored."""
        self._seats.release(self.arc.slot(index) for index in indices)

    def wait(self, index: int) -> bool:
        """Wait until no process is loading an index. Returns False if this thread does not wait, or no longer.

        After `divide`. What this call claims, the caller releases.
        """
        if self._seats.has_claims:  # the source reads a sample while it makes another one
            return False
        end, pause = time.monotonic() + PATIENCE, _FIRST_PAUSE
        while self._waits and not self._take_turns([index]):
            if time.monotonic() > end:
                log.warning(
                    "another process has been loading a sample for %.0f s (is it stopped, or its disk slow?): from now "
                    "on all samples are loaded here, too",
                    PATIENCE,
                )
                self._waits = False
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self.release([index])
        return self._waits

    def _take_turns(self, indices: Sequence[int]) -> list[int]:
        """Claim indices before they are loaded, unless they are stored. Returns those that no other process loads."""
        states, seats = self.layout.states, self._seats
        slots = {index: self.arc.slot(index) for index in indices}
        free = {slot for slot in slots.values() if slot == NO_SLOT or are_stored(states[slot]) or seats.is_mine(slot)}
        if self._rests:
            return list(indices)
        try:
            free.update(seats.take(list({slot for slot in slots.values() if slot not in free})))
        except OSError as error:
            seats.release(slots.values())
            self._stop(refused(error, on_disk=self.segment.on_disk))
            return list(indices)
        return [index for index in indices if slots[index] in free]

    # ---- changes ----

    @property
    def changes(self) -> int:
        """The number of changes so far. The samples of a look-up are right if it is the same after their copy."""
        return self.invalidations + 2 * self._medium.losses

    @property
    def invalidations(self) -> int:
        """The number of changes that users have noted so far (`invalidate`), the same in all processes."""
        return self._seats.changes

    def invalidate(self, indices: Integers | None = None) -> int:
        """Empty the slots of indices (int64 `[samples]`), by default all.

        Returns the number of `invalidations` with this one; 0 if the turn was not free, and nothing has changed.

        No call that begins from then on returns what was stored, in any process. What other processes are loading or
        storing meanwhile is not stored. Of records it may empty the other slots, too, see `Records.reuse_room`.

        Raises:
            ValueError: the store lies in a file with a name on a disk, and outlives its job.
            OSError: the disk has no room for a number; it has lost what it had taken; or another process has not ended
                its sync in time: the slots are empty then, but a page that the disk loses would have the old words
                again. A disk that hangs is waited for without end.
        """
        if self.layout.is_kept:
            raise ValueError("the cache lies in a file with a name on a disk: its samples stay as they are")
        if self._medium.has_failed:
            raise OSError(errno.EIO, _LOST)
        state = self.layout.state
        slots = np.arange(len(state)) if indices is None else self.arc.slots_of(indices)

        def empty() -> None:
            stored = slots[(slots != NO_SLOT) & are_stored(state.take(slots, mode="clip"))] if len(state) else slots
            self.layout.empty(stored)
            self.layout.reuse_room()

        changes = self._seats.change(empty)
        if changes and not self._medium.make_safe(PATIENCE):
            raise OSError(errno.EIO, _LOST if self._medium.has_failed else _SLOW.format(PATIENCE))
        return changes

    # ---- storing ----

    def has_room(self, sample: Any) -> bool:
        """Whether a sample may find room. Encode no sample without room."""
        return self.stores_misses and self.layout.has_room(self.codec.least_bytes(sample))

    def fill(self, index: int, sample: Any) -> bool:
        """Check and store a sample, unless its index has no slot or another process fills it. Returns whether stored.

        Raises:
            SampleMismatchError: the sample does not match the codec. Samples without a slot are checked, too.
        """
        return any(self.put([index], [self.codec.contents(self.codec.encode(sample, index))]))

    def put(
        self, indices: Sequence[int], samples: Sequence[Sequence[memoryview]], seen: int | None = None
    ) -> list[bool | None]:
        """Store each sample whose slot is empty and is filled by no other process.

        Args:
            indices: the index of each sample.
            samples: the parts of each sample, as bytes. They are written together, so a call should have few megabytes.
            seen: the number of `invalidations` before they were looked up and loaded; after another nothing is stored.

        Returns:
            Whether this call has stored each sample. None if its index has no slot, or there was no room, or no turn.
        """
        seats, slots = self._seats, self.arc.slots_in(indices)
        outcomes: list[bool | None] = [False] * len(indices)
        numbers: dict[int, int] = {}  # by slot, the number of the first sample
        for number, slot in enumerate(slots):
            if slot == NO_SLOT or not self.stores_misses:
                outcomes[number] = None
            else:
                numbers.setdefault(slot, number)
        try:
            claimed = [] if self._rests else [*seats.mine(numbers), *seats.take(numbers)]  # `divide` claims, too
            claimed = self._medium.unstored(claimed)
            contents = samples if claimed == slots else chosen(samples, [numbers[slot] for slot in claimed])
            if claimed and self._has_memory(nbytes_of(contents)):
                for slot, stored in zip(claimed, self._write(claimed, contents, seen), strict=False):
                    outcomes[numbers[slot]] = stored or None
        except OSError as error:
            self._stop(refused(error, on_disk=self.segment.on_disk))
        finally:
            seats.release(numbers)
        return outcomes

    def take_over(self, other: Store) -> None:
        """Copy the samples of another store in memory, with the same codec. No process reads or fills meanwhile.

        Raises:
            OSError: there is no memory for all of them (ENOSPC).
        """
        theirs = np.flatnonzero(other._stored)
        indices = np.array([other.arc.index(slot) for slot in theirs.tolist()], dtype=np.int64)
        parts = max(math.ceil(other.stored_bytes(theirs) / _COPIED_BYTES), 1)
        self.layout.reserve_all()
        for among, which in zip(np.array_split(theirs, parts), np.array_split(indices, parts), strict=True):
            if not self._has_memory(other.stored_bytes(among)):
                break
            slots = self.arc.slots_of(which)
            written = self.layout.copy_from(other.layout, among, slots)
            fence()
            self.layout.state[slots[written]] = READY

    def replace(self, slot: int, contents: Sequence[memoryview], *, overwrite: bool) -> bool:
        """Store a sample when no other process fills its slot. Returns False if other bytes are there and stay."""
        is_stored = False
        try:
            while not self._seats.take([slot], READY if is_stored else EMPTY):
                is_stored = self.layout.states[slot] == READY
                if is_stored and b"".join(self.layout.fetch(slot) or ()) == b"".join(contents):
                    return True
                if is_stored and not overwrite:
                    return False
                time.sleep(0 if is_stored else _FIRST_PAUSE)
            fence()
            if is_stored or self._has_memory(self.layout.size(contents)):
                self._write([slot], [contents])
        finally:
            self._seats.release([slot])
        return True

    def clear(self) -> None:
        """Empty all slots and return their memory. No process may read or fill meanwhile."""
        self.layout.clear()

    def alone(self) -> AbstractContextManager[None]:
        """Exclude other processes that call `alone`. Claims on slots are not affected."""
        return self.segment.holding(_ALONE)

    def make_safe(self) -> bool:
        """Wait until all stored samples are safe on the disk (`disk_sync`). Returns False if they may be lost."""
        return self._medium.make_safe(PATIENCE)

    def end_epoch(self) -> None:
        """Begin to make the stored samples of a disk safe, in a thread."""
        if not self.closed:
            self._medium.end_epoch()

    def keep_free(self, nbytes: int) -> None:
        """Leave `nbytes` of the node's memory free from now on, in all processes that fill the store."""
        self._shortage.keep_free(nbytes)

    @property
    def _rests(self) -> bool:
        """Whether the system has refused to store a sample a moment ago."""
        return self._retry_at > 0 and time.monotonic() < self._retry_at

    def _has_memory(self, nbytes: int) -> bool:
        """Whether that many bytes may be filled now."""
        if self._rests or not self._medium.can_store:
            return False
        short = self._shortage.comes_with(nbytes)
        if short is not None:
            self._stop(short)
        return short is None

    def _write(
        self, slots: Sequence[int], samples: Sequence[Sequence[memoryview]], seen: int | None = None
    ) -> list[bool]:
        """Write samples into claimed slots and set them ready. Returns which found room; [] if none is stored."""
        try:
            self._medium.note_write()
            written = self.layout.write(slots, samples)
            fence()
            ready = list(compress(slots, written))
            published = self._seats.publish(ready, seen)
            if published:
                self._medium.note_stored()
        except OSError as error:
            self._stop(refused(error, on_disk=self.segment.on_disk))
            return []
        return written if not ready or published else []

    def _stop(self, short: str) -> None:
        """Store nothing for a while, and warn once per node."""
        # This process keeps the lock after those of the slots until it ends, so each node has one warning.
        if not self._retry_at and self.segment.lock(self.layout.count):
            log.warning(
                "the cache stops at %s of %s samples: %s.\nThe others are loaded every time. A lower budget has no "
                "such warning",
                f"{self.filled:,}",
                f"{self.layout.count:,}",
                short,
            )
        self._retry_at = time.monotonic() + RETRY_SECONDS

    # ---- size ----

    @property
    def _stored(self) -> npt.NDArray[np.bool_]:
        """Which slots have a sample, bool `[slots]`, readable now or not."""
        starts = range(0, max(self.arc.slots, 1), _WINDOW)
        return np.concatenate([self._stored_in(first, first + _WINDOW) for first in starts])

    def _stored_in(self, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Which of some slots have a sample."""
        if not self._medium.is_whole:
            return np.zeros(len(self.layout.state[first:last]), dtype=np.bool_)
        return self.layout.stored(first, last)

    def is_stored(self, indices: Integers) -> npt.NDArray[np.bool_]:
        """Which indices of the dataset (int64 `[samples]`) are stored here, verified or not."""
        slots, stored = self.arc.slots_of(indices), self._stored
        if not len(stored):
            return np.zeros(slots.shape, dtype=np.bool_)
        return np.asarray(stored[slots] & (slots != NO_SLOT))

    def some_stored(self, count: int, dice: random.Random | None = None) -> list[int]:
        """About `count` indices that have a sample, verified or not, or all such indices if there are fewer.

        Args:
            count: how many.
            dice: draws one of each stretch of slots; without it, the first of each is taken.
        """
        if self.closed:
            return []
        slots = np.empty(0, dtype=np.int64)
        begin = 0 if dice is None else dice.randrange(math.ceil(self.arc.slots / _WINDOW) or 1) * _WINDOW
        for first, last in chain(self._windows(begin, self.arc.slots), self._windows(0, begin)):
            slots = np.concatenate([slots, np.flatnonzero(self._stored_in(first, last)) + first])
            if len(slots) >= count:
                break
        step = max(len(slots) // count, 1)
        starts = range(0, len(slots), step)
        numbers = starts if dice is None else (min(k + dice.randrange(step), len(slots) - 1) for k in starts)
        return [self.arc.index(int(slots[number])) for number in numbers]

    def _windows(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The bounds of windows of slots, without long stretches in which nothing was ever stored on a disk."""
        while (begin := self.layout.next_stored(begin)) < end:
            last = min(begin + _WINDOW, end)
            yield begin, last
            begin = last

    @property
    def filled(self) -> int:
        """Number of slots that have a sample."""
        return int(np.count_nonzero(self._stored))

    @property
    def full(self) -> bool:
        """Whether every index of the dataset can be read now. The slots after the last one found empty come first."""
        if self.closed or len(self) < self.length or not self._medium.is_whole:
            return False
        for first in chain(range(self._hole, len(self), _STEP), range(0, len(self), _STEP)):
            window = slice(first, first + _STEP)
            are_ready = self._medium.are_ready(window)
            if not are_ready.all():
                self._hole = first + int(are_ready.argmin())
                return False
        return True

    @property
    def fill_fraction(self) -> float:
        """Share of the slots that are filled; for records, share of the bytes."""
        return self.layout.fill_fraction(self.filled)

    @property
    def capacity(self) -> int:
        """Number of samples for which there is room, as far as that is known."""
        return self.layout.capacity(self.filled)

    @property
    def granted_bytes(self) -> int:
        """Bytes that the store may take, as budgets count."""
        return self.layout.granted_bytes

    @property
    def _used_bytes(self) -> int:
        used = self.segment.allocated_bytes - HEADER_BYTES - self.layout.fixed_bytes
        return min(max(used, 0), self.granted_bytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes that samples take in this node's memory now, without the page cache of a disk."""
        return 0 if self.segment.on_disk else self._used_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes that samples take on a disk."""
        return self._used_bytes if self.segment.on_disk else 0

    @property
    def promised_bytes(self) -> int:
        """Bytes of memory that were granted and are not taken yet."""
        return 0 if self.closed or self.segment.on_disk else self.granted_bytes - self.memory_bytes

    # ---- closing ----

    def unlink(self) -> None:
        """Remove the names of the files, if they have names: no other process can open the store any more."""
        self.segment.unlink()
        if self._companion is not None:
            self._companion.unlink()

    @property
    def closed(self) -> bool:
        """Whether this process has closed the store."""
        return self._closed or self.segment.closed

    def close(self) -> None:
        """Close the store in this process. The memory is free when all processes have closed the store."""
        try:
            self.drop_views()
        finally:
            self.segment.close()

    def drop_views(self) -> None:
        """Stop using the segment, which stays open."""
        # The views belong to this object, even if another copy has closed the segment.
        try:
            self._medium.close()
        finally:
            self.layout.close()
            self._seats.close()
            self._closed = True


def layout_of(codec: Codec) -> type[Layout]:
    """The layout of samples of a codec."""
    return Rows if codec.is_fixed else Records
