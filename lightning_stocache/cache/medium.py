"""Where the samples of a store lie: in memory, where a stored sample stays as it is, or on a disk, where it may not.

A store asks its medium which slots can be read, tells it what is written, and has it compare copies. In memory there is
nothing to do. On a disk a slot is verified before its first read (`checksums`), a copy is compared until its sample is
safe (`disk_sync`), and a file that was cut off while it was open is not read any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.checksums import Checksums
from lightning_stocache.cache.disk_sync import DiskSync
from lightning_stocache.cache.layout import Layout
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.seats import READY, Seats, are_stored
from lightning_stocache.node.segment import Segment

__all__ = ["Disk", "Medium"]


class Medium:
    """Where samples lie: here memory, where a stored sample stays as it is.

    Args:
        layout: the samples.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @property
    def is_whole(self) -> bool:
        """Whether the file has its full length. A read beyond its end is a SIGBUS."""
        return True

    @property
    def has_failed(self) -> bool:
        """Whether something that was stored has been lost."""
        return False

    @property
    def losses(self) -> int:
        """Number of samples that this process has found lost."""
        return 0

    # ---- reading ----

    def is_ready(self, slot: int) -> bool:
        """Whether a slot can be read now."""
        return bool(are_stored(self._layout.states[slot]))

    def are_ready(self, slots: Integers | slice) -> npt.NDArray[np.bool_]:
        """Which slots can be read now."""
        return np.asarray(self._layout.state[slots] == READY)

    def verify(self, slots: Sequence[int], seats: Seats) -> bool:
        """Verify what earlier jobs have stored in slots that are not ready. Returns whether some may be ready now."""
        return False

    def unsafe(self, slots: Integers) -> list[int]:
        """The numbers of those slots whose copies must be compared with what was stored."""
        return []

    def agrees(self, slot: int, contents: Sequence[Any]) -> bool:
        """Whether a copy is what was stored. If not, this process forgets the slot, and `losses` increases."""
        return True

    # ---- storing ----

    @property
    def can_store(self) -> bool:
        """Whether more samples may be stored."""
        return True

    def stored_word(self) -> int:
        """The word of a slot that is stored now; see `DiskSync.stored_word`."""
        return READY

    def unstored(self, slots: list[int]) -> list[int]:
        """Those of the claimed slots in which no earlier job has stored a sample."""
        return slots

    def note_write(self) -> None:
        """Note that samples will be written. Raises OSError if a disk has no room for a number."""

    def note_stored(self) -> None:
        """Note that samples have been stored."""

    def end_epoch(self) -> None:
        """Begin to make the stored samples safe."""

    def make_safe(self, seconds: float) -> bool:
        """Wait until all stored samples are safe. Returns False if they may be lost; see `DiskSync.make_safe`."""
        return True

    # ---- opening and closing ----

    def drop_lost_pages(self) -> None:
        """Drop the page cache of a file that may show pages that its disk has lost; see `DiskSync.drop_lost_pages`."""

    def close(self) -> None:
        """Drop all views."""


class Disk(Medium):
    """A disk, which can lose or damage what it has taken.

    Args:
        segment: the file.
        layout: the samples.
        identity: the numbers of a slot's sample that its checksum covers.

    Raises:
        ImportError: xxhash, which makes the checksums, is not installed.
    """

    def __init__(self, segment: Segment, layout: Layout, identity: Callable[..., tuple[int, ...]]) -> None:
        super().__init__(layout)
        self._segment = segment
        self.sync = DiskSync(segment, layout.rounds_offset)
        self.checksums = Checksums(segment, layout, identity, self.sync)
        self._lost = set[int]()  # slots whose samples the disk has lost, as this process has found

    @property
    def is_whole(self) -> bool:
        """Whether the file has its full length."""
        return self._segment.is_whole

    @property
    def has_failed(self) -> bool:
        """Whether the disk has lost what it had taken."""
        return self.sync.has_failed

    @property
    def losses(self) -> int:
        """Number of samples that this process has found lost."""
        return len(self._lost)

    # ---- reading ----

    def is_ready(self, slot: int) -> bool:
        """Whether a slot can be read now."""
        known = self.checksums.known
        return slot not in self._lost and (super().is_ready(slot) or (known is not None and bool(known[slot])))

    def are_ready(self, slots: Integers | slice) -> npt.NDArray[np.bool_]:
        """Which slots can be read now, by all processes or by this one alone."""
        ready = np.asarray(are_stored(self._layout.state[slots]))
        if self.checksums.known is not None:
            ready |= self.checksums.known[slots]
        if self._lost:
            numbers = np.arange(*slots.indices(self._layout.count)) if isinstance(slots, slice) else slots
            ready &= ~np.isin(numbers, list(self._lost))
        return ready

    def verify(self, slots: Sequence[int], seats: Seats) -> bool:
        """Verify what earlier jobs have stored in slots that are not ready. Returns whether some may be ready now."""
        return self._layout.is_kept and self.checksums.verify(slots, seats)

    def unsafe(self, slots: Integers) -> list[int]:
        """The numbers of those slots whose samples are not safe."""
        return self.sync.unsafe(self._layout.state.take(slots)) if len(slots) else []

    def agrees(self, slot: int, contents: Sequence[Any]) -> bool:
        """Whether a copy is what was stored. If not, this process forgets the slot, and `losses` increases."""
        self.sync.note()
        agrees = self.checksums.is_sum_of(slot, contents)
        if not agrees and self.is_ready(slot):  # else it was invalidated meanwhile
            self._lost.add(slot)
        return agrees

    # ---- storing ----

    @property
    def can_store(self) -> bool:
        """Whether more samples may be stored: the file has its full length, and the disk has lost nothing."""
        return self._segment.is_whole and not self.sync.has_failed

    def stored_word(self) -> int:
        """The word of a slot that is stored now; see `DiskSync.stored_word`."""
        return self.sync.stored_word()

    def unstored(self, slots: list[int]) -> list[int]:
        """Those of the claimed slots that have no checksum. What is not verified yet is not stored again."""
        return [slot for slot in slots if not self._layout.sum(slot)] if self._layout.is_kept else slots

    def note_write(self) -> None:
        """Note that samples will be written. Raises OSError if the disk has no room for a number."""
        self.sync.note_write()

    def note_stored(self) -> None:
        """Note that samples have been stored: a sync may be due."""
        self.sync.note()

    def end_epoch(self) -> None:
        """Begin to make the stored samples safe, in a thread."""
        self.sync.end_epoch()

    def make_safe(self, seconds: float) -> bool:
        """Wait until all stored samples are safe. Returns False if they may be lost; see `DiskSync.make_safe`."""
        return self.sync.make_safe(seconds)

    # ---- opening and closing ----

    def drop_lost_pages(self) -> None:
        """Drop the page cache of a file that may show pages that its disk has lost; see `DiskSync.drop_lost_pages`."""
        self.sync.drop_lost_pages()

    def close(self) -> None:
        """Wait for a sync of this process, see `DiskSync.join`, and drop all views."""
        try:
            self.sync.join()
        finally:  # Ctrl-C
            self.sync.close()
