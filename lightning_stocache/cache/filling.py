"""How a slot is filled, by whoever has loaded the sample.

    claim the slot -> look again -> store, which takes the memory -> fence -> READY -> give the claim up

Who does not get the claim serves its sample unstored; a writer that is killed leaves the slot EMPTY and claimable.
READY is set after the bytes are there and is never taken back, but by `clear` and an explicit overwrite; then readers
are the caller's business. Where memory runs short (`shortage`), or the kernel has none left, the slot stays EMPTY, with
one warning per node.

On a disk the sample has a checksum (`proof`), stored before the slot is READY. What the disk refuses is no error of the
training: the slot stays EMPTY.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.placement import NO_SLOT
from lightning_stocache.cache.proof import Proof
from lightning_stocache.cache.shortage import Shortage
from lightning_stocache.cache.slots import EMPTY, READY
from lightning_stocache.cache.turns import Turns
from lightning_stocache.node.fence import fence
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.segment import Segment

__all__ = ["Filling", "Slots"]

log = logging.getLogger(__name__)

_RETRY_SECONDS = 10.0  # after a shortage: memory seldom comes back at once, and each try costs system calls


class Slots(Protocol):
    """What has to be known about the place where samples lie to fill it."""

    count: int
    states: torch.Tensor
    """EMPTY or READY, uint8 `[count]`, live."""
    state_bytes: memoryview
    """The states, for single looks."""

    def size(self, contents: Sequence[memoryview]) -> int:
        """Bytes that a sample takes, given its parts."""

    def store(self, slot: int, contents: Sequence[memoryview]) -> bool:
        """Copy one sample in, given its parts; False if there is no room for it. Or raise OSError (ENOSPC)."""


class Filling:
    """Fills the slots of a segment.

    Args:
        segment: where the locks are.
        slots: where the samples go.
        claims: of the segment's locks.
        turns: at loading what goes into them; who has one has the claim already.
        proof: of a store on a disk.
    """

    def __init__(
        self, segment: Segment, slots: Slots, claims: Claims, turns: Turns, proof: Proof | None = None
    ) -> None:
        self._segment, self._slots, self._claims, self._proof = segment, slots, claims, proof
        self._turns = turns
        self.shortage = Shortage(segment)
        self._retry_at = 0.0

    def fill(self, slots: Iterable[int], samples: Sequence[Sequence[memoryview]]) -> Iterator[bool | None]:
        """Store samples, each if its slot is empty and nobody else is filling it, as the iterator comes to them.

        Args:
            slots: of the samples, or NO_SLOT.
            samples: the parts of each, as bytes. Whether there is memory is asked once for all of them, so a call
                should hold few megabytes.

        Yields:
            Whether this call has stored the sample; None where it has no slot, or there is no room for it in any.
        """
        states, claims, may_store = self._slots.state_bytes, self._claims, None
        has_claim = self._turns.ends
        if self._proof is not None and not self._proof.is_whole:
            may_store = False
        for slot, contents in zip(slots, samples, strict=True):
            if slot == NO_SLOT:
                yield None
                continue
            stored: bool | None = False
            if (may_store is not False and states[slot] != READY and claims.take(slot)) or has_claim(slot):
                try:
                    if may_store is not False and states[slot] != READY:
                        if may_store is None:
                            may_store = self._has_memory(sum(map(self._slots.size, samples)))
                        if may_store:
                            stored = self._publish(slot, contents)
                            may_store = stored is not False
                finally:
                    claims.give_up(slot)
            yield stored

    def put(self, slot: int, contents: Sequence[memoryview], *, overwrite: bool, same: Callable[[], bool]) -> bool:
        """Store a sample as soon as nobody else is filling the slot.

        Args:
            slot: of the sample.
            contents: its parts, as bytes.
            overwrite: whether it takes the place of another one.
            same: says whether the slot, which is READY, holds just these bytes.

        Returns:
            False if the slot holds other bytes and is not to be overwritten.
        """
        with self._claims.waiting(slot):
            if self._slots.state_bytes[slot] != READY:
                if self._has_memory(self._slots.size(contents)):
                    self._publish(slot, contents)
            elif not same():
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

    def _publish(self, slot: int, contents: Sequence[memoryview]) -> bool | None:
        """Store a sample into a slot that is claimed, and have it read; False without memory, None without room."""
        try:
            return self._store(slot, contents) or None
        except OSError as error:
            if self._proof is not None:
                self._stop(f"the disk refuses them ({error.strerror})")
            elif error.errno != errno.ENOSPC:
                raise
            else:
                self._stop(f"no space left in {memory_directory()}; enlarge it (Docker: --shm-size)")
            return False

    def _stop(self, short: str) -> None:
        """Store nothing for a while, and say why, once on the node."""
        # The lock behind those of the slots is kept until this process ends: one warning per node.
        if not self._retry_at and self._segment.lock(self._slots.count):
            more = "the job more memory" if self._proof is None else "the disk more room"
            log.warning(
                "the cache stops at %s of %s samples: %s.\nThe others are loaded every time. Give %s, or lower the "
                "budget to have no such warning",
                f"{int(self._slots.states.count_nonzero()):,}",
                f"{self._slots.count:,}",
                short,
                more,
            )
        self._retry_at = time.monotonic() + _RETRY_SECONDS

    def _store(self, slot: int, contents: Sequence[memoryview]) -> bool:
        if not self._slots.store(slot, contents):
            return False
        if self._proof is not None:
            self._proof.seal(slot, contents)
        fence()
        self._slots.state_bytes[slot] = READY
        if self._proof is not None:
            self._proof.trust(slot)
        return True
