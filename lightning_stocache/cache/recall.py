"""What an earlier job has left on a disk, read for the first time: checked, and trusted from then on.

The disk is read by a thread. A disk that stands still would otherwise stop who waits for a batch, and with it all
ranks: after some seconds the samples are loaded from their source instead, and the disk is left alone for a while. So
it is after a block that could not be read.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.placement import NO_SLOT
from lightning_stocache.cache.proof import Proof
from lightning_stocache.cache.slots import EMPTY

__all__ = ["PATIENCE", "Recall"]

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that are waited for a disk."""

_REST = 30.0  # seconds for which one that was sick is left alone


_Job = tuple[list[int], threading.Event]


class CheckedSlots(Protocol):
    """Slots that can be read through the file, and set EMPTY."""

    state_bytes: memoryview

    def fetch(self, slot: int) -> Sequence[bytes] | None:
        """The parts of the sample in a slot; None if it can hold none. Or raise OSError (EIO)."""


class Recall:
    """Checks slots that are READY and not trusted yet.

    Args:
        slots: of a store on a disk.
        proof: of that store.
        claims: on its slots.
    """

    def __init__(self, slots: CheckedSlots, proof: Proof, claims: Claims) -> None:
        self._slots, self._proof, self._claims = slots, proof, claims
        self._sick_until = 0.0
        self._jobs: SimpleQueue[_Job | None] | None = None
        self._pid = 0

    def check(self, slots: Sequence[int]) -> bool:
        """Have those of the slots trusted that are sound, what is not EMPTY; whether there were any to look at."""
        states, proof = self._slots.state_bytes, self._proof
        if time.monotonic() < self._sick_until or not proof.is_whole:
            return False
        wanted = [slot for slot in slots if slot != NO_SLOT and states[slot] != EMPTY and not proof.trusts(slot)]
        if not wanted:
            return False
        jobs, done = self._running(), threading.Event()
        jobs.put((wanted, done))
        if not done.wait(PATIENCE):
            self._jobs = None  # its thread is left to itself
            self._leave_alone(f"it took more than {PATIENCE:.0f} s for {len(wanted)} samples")
        return True

    def _leave_alone(self, why: str) -> None:
        self._sick_until = time.monotonic() + _REST
        log.warning("the disk of the cache is left alone for %.0f s, samples are loaded meanwhile: %s", _REST, why)

    def _running(self) -> SimpleQueue[_Job | None]:
        """The queue of a thread that runs in this process."""
        if self._jobs is None or self._pid != os.getpid():
            self._jobs, self._pid = SimpleQueue(), os.getpid()
            threading.Thread(target=_work, args=(weakref.ref(self), self._jobs), name="recall", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        return self._jobs

    def look(self, slots: Sequence[int]) -> None:
        """Check slots, on the thread."""
        try:
            for slot in slots:
                self._check(slot)
        except OSError as error:
            self._leave_alone(str(error))
        except ValueError:
            log.debug("the store was closed while it was looked through")

    def _check(self, slot: int) -> None:
        error = None
        try:
            parts = self._slots.fetch(slot)
            if parts is not None and self._proof.holds(slot, parts):
                self._proof.trust(slot)
                return
        except OSError as failure:
            error = failure
        if self._claims.take(slot):
            try:
                if not self._proof.trusts(slot):
                    self._slots.state_bytes[slot] = EMPTY
            finally:
                self._claims.give_up(slot)
        if error is not None:
            raise error


def _work(recall: weakref.ref[Recall], jobs: SimpleQueue[_Job | None]) -> None:
    """Look at what is asked for, by one that may go meanwhile."""
    while (job := jobs.get()) is not None:
        slots, done = job
        try:
            if (this := recall()) is not None:
                this.look(slots)
            del this
        finally:
            done.set()
