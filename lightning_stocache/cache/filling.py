"""How a slot is filled, by whoever has loaded the sample.

    claim the slot -> look again -> store, which takes the memory -> fence -> READY -> give the claim up

Who does not get the claim serves its sample unstored; a writer that is killed leaves the slot EMPTY and claimable.
READY is set after the bytes are there and is never taken back, but by `clear` and an explicit overwrite; then readers
are the caller's business. Where memory runs short (`shortage`), or the kernel has none left, the slot stays EMPTY, with
one warning per node.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.shortage import Shortage
from lightning_stocache.cache.slots import EMPTY, READY
from lightning_stocache.node.fence import fence
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.segment import Segment

__all__ = ["Filling", "Slots"]

log = logging.getLogger(__name__)

_RETRY_SECONDS = 10.0  # after a shortage: memory seldom comes back at once, and each try costs system calls


class Slots(Protocol):
    """What a cache needs to know about the place where samples lie."""

    count: int
    states: torch.Tensor
    """EMPTY or READY, uint8 `[count]`, live."""
    state_bytes: memoryview
    """The same, for single looks."""

    def reserve(self, slot: int) -> None:
        """Have the kernel promise a slot's memory, or raise OSError (ENOSPC)."""

    def store(self, slot: int, contents: Sequence[memoryview]) -> None:
        """Copy one sample in, bytes `[nbytes]` per field, or raise OSError (ENOSPC)."""

    def read(self, slot: int) -> list[torch.Tensor]:
        """Copy one sample out, uint8 `[nbytes]` per field."""

    def gather(self, slots: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        """Copy many samples out, into uint8 `[samples * nbytes]` per field."""

    def table(self, field: int) -> torch.Tensor:
        """The live array of one field, as bytes."""

    def clear(self) -> None:
        """Empty all slots and give their memory back."""

    def close(self) -> None:
        """Drop all views."""


class Filling:
    """Fills the slots of a segment.

    Args:
        segment: where the locks are.
        slots: where the samples go.
    """

    def __init__(self, segment: Segment, slots: Slots) -> None:
        self._segment, self._slots = segment, slots
        self._claims = Claims(segment)
        self.shortage = Shortage(segment)
        self._retry_at = 0.0

    def fill(self, slot: int, contents: Sequence[memoryview]) -> bool:
        """Store a sample if the slot is empty and nobody else is filling it; whether this call has.

        Contents are bytes `[nbytes]` per field.
        """
        if self._slots.state_bytes[slot] == READY:
            return False
        if not self._claims.take(slot):
            return False
        try:
            return self._slots.state_bytes[slot] != READY and self._publish(slot, contents)
        finally:
            self._claims.give_up(slot)

    def put(self, slot: int, contents: Sequence[memoryview], *, overwrite: bool) -> bool:
        """Store a sample as soon as nobody else is filling the slot.

        Returns:
            False if the slot holds other bytes and is not to be overwritten.
        """
        with self._claims.waiting(slot):
            if self._slots.state_bytes[slot] != READY:
                self._publish(slot, contents)
            elif [row.numpy().data for row in self._slots.read(slot)] != list(contents):
                if not overwrite:
                    return False
                self._slots.state_bytes[slot] = EMPTY
                fence()
                self._store(slot, contents)  # it has its memory
        return True

    def _publish(self, slot: int, contents: Sequence[memoryview]) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        short = self.shortage.comes_with(sum(content.nbytes for content in contents))
        if short is None:
            try:
                self._store(slot, contents)
                return True
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            short = f"no space left in {memory_directory()}; enlarge it (Docker: --shm-size)"
        # The lock behind those of the slots is kept until this process ends: one warning per node.
        if not self._retry_at and self._segment.lock(self._slots.count):
            log.warning(
                "the cache stops at %s of %s samples: %s.\nThe others are loaded every time. Give "
                "the job more memory, or lower the budget to have no such warning",
                f"{int(self._slots.states.count_nonzero()):,}",
                f"{self._slots.count:,}",
                short,
            )
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        return False

    def _store(self, slot: int, contents: Sequence[memoryview]) -> None:
        self._slots.store(slot, contents)
        fence()
        self._slots.state_bytes[slot] = READY
