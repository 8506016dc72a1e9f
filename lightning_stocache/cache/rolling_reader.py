"""Copies of whole samples from the slots of a rolling store, while others write them (`rolling`).

A reader looks at the generation, copies, and looks again. If the generation is the same even number, the copy is whole.
What changed during the copy is copied again, and another slot is read in place of a slot that is being written.

On a disk a sample of an earlier job is verified before its first read, and a copy is compared with its checksum until
its sample is safe (`disk_sync`). The round of a slot is read after the copy: whoever writes over a safe sample
takes its round first. A sample that is damaged or lost is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.gather_pool import GatherPool
from lightning_stocache.cache.head import is_complete
from lightning_stocache.cache.medium import Disk
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.rolling_room import Room
from lightning_stocache.cache.rolling_slots import EMPTY, UNVERIFIED, Control, RollingSlots
from lightning_stocache.node.processes import poll
from lightning_stocache.node.segment import Segment, fence

__all__ = ["RollingReader"]

_MOST_TRIES = 1000  # then the writers are faster than any copy
_TOO_FAST = "a rolling cache is overwritten faster than it can be read: give it a larger budget, or fewer fillers"


class _Chance:
    """The random numbers of this process: a generator has a lock, which a forked child may inherit locked."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()


class RollingReader:
    """Reads the slots of a rolling store.

    Args:
        segment: the file whose turn is taken.
        layout: the layout of the samples.
        slots: their generations and rounds.
        room: says how many slots may have samples.
        disk: on a disk, the medium.

    Raises:
        RuntimeError: (when reading) no sample is resident, or writers overtake every copy.
    """

    def __init__(
        self,
        segment: Segment,
        layout: Any,
        slots: RollingSlots,
        room: Room,
        disk: Disk | None,
    ) -> None:
        self._segment, self._layout, self._slots, self._room = segment, layout, slots, room
        self._disk = disk
        self.renewed = self.substituted = 0  # samples that were read: newer than the epoch; in place of others
        self._chance = segment.state_of(_Chance)

    def gather(self, asked: Integers, into: Memory, copies: Memory, pool: GatherPool) -> None:
        """Copy whole rows into the memory of a batch, without waiting for writers.

        Args:
            asked: the slots, int64 `[samples]`.
            into: uint8 `[samples * nbytes]` per field.
            copies: the same memory, uint8 `[samples, nbytes]` per field.
            pool: the threads that copy.
        """
        slots, seen = self._whole(asked)
        self._layout.gather(slots, into, pool)
        torn = np.flatnonzero(self._are_torn(slots, seen, copies))
        for _ in range(_MOST_TRIES):
            if not len(torn):
                break
            again, generations = self._whole(slots[torn])
            newer = [fields[again] for fields in self._layout.fields]
            for copied, content in zip(copies, newer, strict=True):
                copied[torn] = content
            seen[torn] = generations
            torn = torn[self._are_torn(again, generations, newer)]
        else:
            raise RuntimeError(_TOO_FAST)
        self.renewed += self._count_newer(seen)

    def _are_torn(self, slots: Integers, seen: Integers, copies: Sequence[Any]) -> npt.NDArray[np.bool_]:
        """Which copies are not the samples that these slots had when they had these generations.

        A copy that may be lost on the disk is compared with its checksum.

        Args:
            slots: int64 `[samples]`.
            seen: int64 `[samples]`.
            copies: uint8 `[samples, nbytes]` per field.
        """
        fence()
        torn: npt.NDArray[np.bool_] = self._slots.generations.take(slots) != seen
        if self._disk is not None:
            for number in self._unsafe(slots):
                torn[number] = torn[number] or not self._check(int(slots[number]), [field[number] for field in copies])
        return torn

    def _unsafe(self, slots: Integers) -> list[int]:
        """The numbers of those slots whose samples are not safe on the disk. Read after their copies."""
        words = cast(Any, self._slots.rounds).take(slots)
        unsafe: list[int] = np.flatnonzero(
            (words <= UNVERIFIED) | (words > cast(Disk, self._disk).sync.safe_word)
        ).tolist()
        return unsafe

    def _is_safe(self, slot: int) -> bool:
        """Whether the disk cannot lose the sample of a slot any more. Read after its copy."""
        rounds = self._slots.rounds
        return rounds is None or UNVERIFIED < rounds[slot] <= cast(Disk, self._disk).sync.safe_word

    def _check(self, slot: int, contents: Sequence[Any]) -> bool:
        """Whether the copy of a sample that is not safe is what was stored. A sample that was lost is dropped."""
        disk = cast(Disk, self._disk)
        disk.sync.note()
        is_whole = disk.checksums.is_sum_of(slot, contents)
        if not is_whole:  # a newer sample may be there
            self._segment.in_turn(self._doubt, slot)
            self.is_sound(slot)
        return is_whole

    def _doubt(self, slot: int) -> None:
        """In a turn: have a slot with a sample verified before it is read again."""
        if self._slots.is_readable(slot):
            self._slots.set_round(slot, UNVERIFIED)

    def record(self, slot: int) -> memoryview:
        """Copy a whole record from this slot, or from another resident slot."""
        for _ in range(_MOST_TRIES):
            seen = self._slots.states[slot]
            if self.is_sound(slot):
                fence()
                live = self._layout.record(slot)
                fence()
                if self._slots.states[slot] == seen:  # then begin and size belong to that generation
                    record = memoryview(bytes(live))
                    fence()
                    if self._slots.states[slot] == seen and (self._is_safe(slot) or self._check(slot, [record])):
                        self.renewed += self._count_newer(np.array([seen]))
                        return record
            slot = int(self._random_slots(1)[0])
            self.substituted += 1
        raise RuntimeError(_TOO_FAST)

    def readable_slots(self) -> Integers:
        """The slots that can be read now, int64."""
        return np.flatnonzero(self._slots.are_readable(slice(self._room.limit)))

    def is_sound(self, slot: int) -> bool:
        """Whether the sample of a slot can be read. A damaged sample of an earlier job is dropped."""
        slots = self._slots
        generation = slots.states[slot]
        if not slots.is_readable(slot):
            return False
        if slots.rounds is None or slots.rounds[slot] != UNVERIFIED:
            return True
        disk, word = cast(Disk, self._disk), None
        with suppress(OSError):  # a full disk
            word = self._segment.in_turn(disk.sync.verified_word)  # before it is read
        is_sound = disk.checksums.is_sound(slot)
        with suppress(OSError):
            self._segment.in_turn(self._note_verified, slot, generation, word if is_sound else EMPTY)
        return is_sound

    def _note_verified(self, slot: int, generation: int, word: int | None) -> None:
        """In a turn: give the sample of a slot a round, or drop it if it is damaged, unless another one came."""
        if self._slots.states[slot] != generation:
            return
        if word == EMPTY:
            self._slots.control[Control.HOLES] = 1
            self._slots.set_round(slot, EMPTY)  # a disk may refuse the rest
            self._slots.drop(slot)
        elif word is not None:
            self._slots.set_round(slot, word)

    def _count_newer(self, generations: Integers) -> int:
        """Number of samples that came after the epoch had begun."""
        return int(np.count_nonzero(generations > 2 * self._slots.control[Control.EPOCH]))

    def _whole(self, slots: Integers) -> tuple[Integers, Integers]:
        """These slots, with readable slots in place of those that cannot be read now, and their generations."""
        generations = self._slots.generations.take(slots)
        whole = self._are_sound(slots, generations)
        if not whole.all():
            slots = slots.copy()
            while len(missing := np.flatnonzero(~whole)):
                slots[missing] = self._random_slots(len(missing))
                generations[missing] = self._slots.generations.take(slots[missing])
                whole = self._are_sound(slots, generations)
                self.substituted += len(missing)
        fence()
        return slots, generations

    def _are_sound(self, slots: Integers, generations: Integers) -> npt.NDArray[np.bool_]:
        """Which of these slots, with these generations, have a sample that can be read."""
        sound: npt.NDArray[np.bool_] = is_complete(generations)
        if (rounds := self._slots.rounds) is not None:
            words = rounds.take(slots)
            sound &= words >= UNVERIFIED
            for number in np.flatnonzero(sound & (words == UNVERIFIED)).tolist():
                sound[number] = self.is_sound(int(slots[number]))
        return sound

    def _random_slots(self, count: int) -> Integers:
        """Random slots that can be read now."""
        # A few random slots: a look at a hundred thousand slots takes half a millisecond.
        slots = self._chance.generator.integers(0, self._slots.count, 64 + 8 * count)
        slots = slots[self._slots.are_readable(slots)]
        if len(slots) < count:
            control = self._slots.control
            is_new = control[Control.APPENDED] == control[Control.BEFORE] and not control[Control.FOUND]
            for seconds in poll(pause=0.001):
                if len(slots := self.readable_slots()):
                    break
                if seconds or is_new:  # at first, writers may have all slots
                    raise RuntimeError(
                        "the rolling cache is empty: no sample has been appended yet, or all are being written"
                    )
            slots = slots[self._chance.generator.integers(0, len(slots), count)]
        return slots[:count]
