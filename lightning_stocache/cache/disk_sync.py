"""Makes stored samples safe on a disk: an `fdatasync` has succeeded that began after they were stored.

A write gives its bytes to the page cache. Where the disk has promised more than it has (a thin volume, a sparse image,
a disk with errors), the kernel finds that out when it writes the page, and may drop it: the sample is lost, and no read
reports an error. `fdatasync` reports it. So a sample is read with its checksum until it is safe.

Samples are stored in rounds. The word of a stored slot has the number of its round, and one number says which round is
the last that is safe. So nothing is written for a slot when it becomes safe.

    [turn: the next round begins] > fdatasync > [turn: the round before it is safe]

One process at a time does that, in a thread: each minute while a process stores or reads samples that are not safe, and
at the end of an epoch. What earlier jobs have stored is verified, and is like a sample of the first round. But a writer
may die, or have no turn, when its sample has a checksum and its slot is not stored yet. So once a process has begun to
write since the file was opened, a verified sample belongs to the round in which it is verified.

After an error nothing becomes safe any more, and nothing is stored, while the file is open. As the disk may lose the
number that says so, too, the process that had the error also locks a byte until it ends. The kernel reports an error
once to each process that has the file open, but not to a process that opens it after a report. So a process that dies
during its `fdatasync` may hide an error. After such a death, a process syncs only if it had opened the file before. The
page cache may still show lost pages whole. So the first process that opens the file alone after an error, or after such
a death, drops the page cache of the file.

A process that closes the store, or ends, waits half a minute at most for its own sync: a sync that ends with its
process looks like such a death. Workers of a DataLoader do not wait when they end, because the process of the loader
syncs at the end of the epoch.
"""

from __future__ import annotations

import atexit
import logging
import struct
import threading
import time
import weakref
from contextlib import suppress

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from lightning_stocache.cache.seats import READY, are_stored
from lightning_stocache.node.processes import THREAD_PREFIX
from lightning_stocache.node.segment import Segment, view_of

__all__ = ["ROUNDS", "SYNC_SECONDS", "DiskSync"]

log = logging.getLogger(__name__)

SYNC_SECONDS = 60.0
"""Seconds between two syncs in the middle of an epoch."""

LAST_SECONDS = 30.0
"""Seconds that a process waits at most for its sync when it closes a store or ends."""

ROUNDS = struct.Struct("=6q")
"""Syncs that have begun, of which the n-th ends round n; the last safe round; the last round in which a sample was
stored; whether the disk has lost something; when the last sync began, in nanoseconds of the monotonic clock; whether a
process has begun to write a sample."""

_BEGUN, _SAFE, _STORED, _FAILED, _TIME, _WRITTEN = range(6)
_KIND_BITS = 2  # of a word, which say that a slot is stored; the other bits are the round
_KIND = (1 << _KIND_BITS) - 1
_BYTE = 1 << 41  # locked by the process that makes samples safe
_LOST = _BYTE + 1  # locked by a process whose sync has failed, until it ends: the disk may lose the number, too
_PAUSE = 0.01


class _Syncs:
    """The syncs of this process of a segment."""

    def __init__(self) -> None:
        _all_syncs.add(self)
        self.alone = threading.Lock()  # one thread syncs at a time: the kernel reports an error once to a process
        self.threads = weakref.WeakSet[threading.Thread]()  # that sync
        self.next = 0.0  # time of the monotonic clock at which the next sync is due
        self.joined: int | None = None  # number of syncs that had begun when this process opened the file
        self.has_failed = False
        self.has_written = False

    def join(self, end: float) -> None:
        """Wait for the threads that sync, up to a time of the monotonic clock. What is left is not waited for again."""
        threads, self.threads = list(self.threads), weakref.WeakSet()
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))


_all_syncs = weakref.WeakSet[_Syncs]()


@atexit.register
def _join_all() -> None:
    end = time.monotonic() + LAST_SECONDS
    for syncs in list(_all_syncs) if get_worker_info() is None else ():
        syncs.join(end)


class DiskSync:
    """The syncs of a store on a disk.

    Args:
        segment: the file.
        offset: of `ROUNDS` in it, zeroes at first.

    Example:
        >>> sync = DiskSync(Segment.create(ROUNDS.size), 0)
        >>> word = sync.stored_word()
        >>> word <= sync.safe_word, sync.make_safe(), word <= sync.safe_word
        (False, True, True)
    """

    def __init__(self, segment: Segment, offset: int) -> None:
        self._segment, self._offset = segment, offset
        self._rounds = segment.numbers_at(offset, 6, "q")
        self._view = view_of(self._rounds)
        self._process = segment.state_of(_Syncs)
        self._join()

    @property
    def safe_word(self) -> int:
        """The largest word that a slot has if its sample is safe."""
        return int(self._view[_SAFE] << _KIND_BITS | READY)

    def unsafe(self, words: npt.NDArray[np.uint32]) -> list[int]:
        """The numbers of those words of slots (uint32 `[samples]`) that do not say that the sample is safe."""
        above = words - np.uint32(READY)  # of stored slots a multiple of 4; of empty ones larger than any
        if not np.bitwise_or.reduce(above) & _KIND and np.maximum.reduce(above) < self.safe_word:  # usual, and fast
            return []
        numbers: list[int] = np.flatnonzero(~are_stored(words) | (words > self.safe_word)).tolist()
        return numbers

    @property
    def has_failed(self) -> bool:
        """Whether the disk has lost what it had taken."""
        return self._process.has_failed or self._view[_FAILED] != 0

    def note_write(self) -> None:
        """Note that a sample will be written. Raises OSError if the disk has no room for a number."""
        self._process.has_written = True
        if not self._view[_WRITTEN]:
            self._rounds[_WRITTEN] = 1

    def stored_word(self) -> int:
        """The word of a slot whose sample is stored now.

        A rolling store calls it without the turn. Then an older round may replace a newer one in `_STORED`, and
        `end_epoch` may begin no sync; the next sync makes those samples safe.
        """
        number = self._view[_BEGUN] + 1
        if self._view[_STORED] != number:
            self._rounds[_STORED] = number
        return int(number << _KIND_BITS | READY)

    def verified_word(self) -> int:
        """The word of slots that this process has verified. Call it in a turn."""
        if self._process.has_written or self._rounds[_WRITTEN]:  # the disk may have lost the number
            return self.stored_word()
        if not self._rounds[_STORED]:
            self._rounds[_STORED] = 1
        return 1 << _KIND_BITS | READY

    def note(self) -> None:
        """Note that this process has stored or read a sample that is not safe: a sync may be due."""
        if time.monotonic() >= self._process.next:
            self._start(SYNC_SECONDS)

    def end_epoch(self) -> None:
        """Begin a sync if there are samples that are not safe."""
        if self._rounds[_STORED] > self._rounds[_SAFE]:
            self._start(0.0)

    def make_safe(self, seconds: float = 0.0) -> bool:
        """Make all stored samples safe. Returns False if that failed, or if another process does not end its sync.

        A disk that hangs is waited for without end: nothing ends an `fdatasync`.

        Args:
            seconds: how long to wait for another process.
        """
        end = time.monotonic() + seconds
        alone = self._process.alone
        if not alone.acquire(timeout=seconds):
            return False
        try:
            while not self._segment.lock(_BYTE):
                if time.monotonic() >= end:
                    return False
                time.sleep(_PAUSE)
            try:
                return self._sync()
            finally:
                self._segment.unlock(_BYTE)
        finally:
            alone.release()

    def drop_lost_pages(self) -> None:
        """Drop the page cache of the file if a disk may have lost pages that it shows, so that they are read again.

        Call it before the numbers are cleared, while no other process has the file open.
        """
        begun, safe, _, has_failed, *_ = ROUNDS.unpack(self._segment.fetch(self._offset, ROUNDS.size))
        if begun != safe or has_failed:
            self._segment.drop_page_cache()
        self._process.joined = 0

    def join(self) -> None:
        """Wait for the syncs that this process has begun in threads, `LAST_SECONDS` at most."""
        self._process.join(time.monotonic() + LAST_SECONDS)

    def close(self) -> None:
        """Drop the views."""
        self._rounds = self._view = memoryview(bytearray(ROUNDS.size)).cast("q")

    def _join(self) -> None:
        if self._process.joined is None:  # through the file: pages that are mapped cannot be dropped
            self._process.joined = ROUNDS.unpack(self._segment.fetch(self._offset, ROUNDS.size))[_BEGUN]

    def _start(self, seconds: float) -> None:
        """Begin a sync in a thread, unless a sync began within the last `seconds`."""
        process = self._process
        process.next = time.monotonic() + SYNC_SECONDS
        if self.has_failed:
            return
        self._join()
        thread = threading.Thread(target=self._run, args=(seconds,), name=f"{THREAD_PREFIX}sync", daemon=True)
        with suppress(RuntimeError):  # the system has no thread left, or the interpreter ends
            thread.start()
            process.threads.add(thread)

    def _run(self, seconds: float) -> None:
        with suppress(ValueError, OSError):  # the segment has been closed meanwhile; the disk has no room for a number
            age = time.monotonic_ns() - self._rounds[_TIME]
            if not self._rounds[_TIME] or not 0 <= age < seconds * 1e9:
                self.make_safe(0.0 if seconds else SYNC_SECONDS)  # at the end of an epoch, after a sync under way

    def _sync(self) -> bool:
        segment = self._segment
        number = segment.in_turn(self._begin_round)
        if not number:
            return False
        try:
            segment.sync()
        except OSError as error:
            self._fail(error)
            return False
        return segment.in_turn(self._end_round, number) is True

    def _begin_round(self) -> int:
        """The number of the round that ends now; 0 if it can never be safe."""
        rounds = self._rounds
        has_died = rounds[_BEGUN] != rounds[_SAFE]  # a process, during its sync
        may_miss_error = has_died and (self._process.joined or 0) > rounds[_SAFE]
        if self._segment.is_locked(_LOST):
            self._process.has_failed = True
        if self.has_failed or may_miss_error:
            return 0
        rounds[_TIME] = time.monotonic_ns()
        rounds[_BEGUN] += 1
        return int(rounds[_BEGUN])

    def _end_round(self, number: int) -> bool:
        self._rounds[_SAFE] = number
        return True

    def _fail(self, error: OSError) -> None:
        self._process.has_failed = True
        self._segment.lock(_LOST)
        with suppress(OSError):
            self._rounds[_FAILED] = 1
        log.warning(
            "the disk of the cache has lost samples that it had taken (%s): nothing more is stored, and what is served "
            "is compared with its checksum. Does a thin volume or a sparse image have less room than it promises? "
            "Enlarge it, or lower the budget",
            error.strerror or error,
        )
