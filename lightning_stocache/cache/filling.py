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
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.placement import NO_SLOT, Integers
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
    nbytes: int
    """Bytes of one sample."""
    states: torch.Tensor
    """EMPTY or READY, uint8 `[count]`, live."""
    state_bytes: memoryview
    """The states, for single looks."""

    def reserve(self, slot: int) -> None:
        """Have the kernel promise a slot's memory, or raise OSError (ENOSPC)."""

    def store(self, slot: int, contents: Sequence[memoryview]) -> None:
        """Copy one sample in, bytes `[nbytes]` per field, or raise OSError (ENOSPC)."""

    def read(self, slot: int) -> list[torch.Tensor]:
        """Copy one sample out, uint8 `[nbytes]` per field."""

    def ready(self, slots: Integers) -> npt.NDArray[np.bool_]:
        """Which of those slots are READY."""

    def gather(self, slots: Integers, into: Memory) -> None:
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

    def fill(self, slots: Iterable[int], samples: Sequence[Sequence[memoryview]]) -> Iterator[bool | None]:
        """Store samples, each if its slot is empty and nobody else is filling it, as the iterator comes to them.

        Args:
            slots: of the samples, or NO_SLOT.
            samples: of each, bytes `[nbytes]` per field. Whether there is memory is asked once for all of them, so a
                call should hold few megabytes.

        Yields:
            Whether this call has stored the sample; None where it has no slot.
        """
        states, claims, may_store = self._slots.state_bytes, self._claims, None
        for slot, contents in zip(slots, samples, strict=True):
            if slot == NO_SLOT:
                yield None
                continue
            stored = False
            if states[slot] != READY and claims.take(slot):
                try:
                    if states[slot] != READY:
                        if may_store is None:
                            may_store = self._has_memory(len(samples) * self._slots.nbytes)
                        stored = may_store = may_store and self._publish(slot, contents)
                finally:
                    claims.give_up(slot)
            yield stored

    def put(self, slot: int, contents: Sequence[memoryview], *, overwrite: bool) -> bool:
        """Store a sample as soon as nobody else is filling the slot.

        Returns:
            False if the slot holds other bytes and is not to be overwritten.
        """
        with self._claims.waiting(slot):
            if self._slots.state_bytes[slot] != READY:
                if self._has_memory(self._slots.nbytes):
                    self._publish(slot, contents)
            elif [row.numpy().data for row in self._slots.read(slot)] != list(contents):
                if not overwrite:
                    return False
                self._slots.state_bytes[slot] = EMPTY
                fence()
                self._store(slot, contents)  # it has its memory
        return True

    def _has_memory(self, nbytes: int) -> bool:
        """Whether so many bytes may be filled now."""
        if self._retry_at and time.monotonic() < self._retry_at:
            return False
        short = self.shortage.comes_with(nbytes)
        if short is not None:
            self._stop(short)
        return short is None

    def _publish(self, slot: int, contents: Sequence[memoryview]) -> bool:
        """Store a sample into a slot that is claimed, and have it read; whether there was memory."""
        try:
            self._store(slot, contents)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._stop(f"no space left in {memory_directory()}; enlarge it (Docker: --shm-size)")
            return False
        return True

    def _stop(self, short: str) -> None:
        """Store nothing for a while, and say why, once on the node."""
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

    def _store(self, slot: int, contents: Sequence[memoryview]) -> None:
        self._slots.store(slot, contents)
        fence()
        self._slots.state_bytes[slot] = READY
