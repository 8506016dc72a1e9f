"""Stops filling where memory runs short, or where storing is slower than loading.

A full /dev/shm is an error that storing a sample reports. Above a cgroup's limit the kernel kills. So a process looks
at the free memory again while it fills: at least ten times a second (0.1 ms a look), and after it has filled a small
part of what is left, so that many processes that fill at once do not overrun the limit.

A training step takes memory and gives it back. A slot that is filled in between must not take what the next step needs.
So every look adds the bytes of the cache to the free bytes: the cache could have so many bytes if all else stayed the
same. The lowest sum of any process of the node lies in the segment's header, and limits all processes. It is never
raised, because a process that starts in a quiet moment would fill too much.

For a store on a disk the bytes that are free on the disk count. A store in /dev/shm also leaves the last bytes there to
the batches of workers, which would die without them.

On a disk the process that has loaded a sample stores it, so a slow disk delays that process's batches. Where storing
takes longer than loading, storing pauses, and samples are served unstored (`Pace`).
"""

from __future__ import annotations

import errno
import time
from contextlib import suppress

from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.segment import Segment

__all__ = ["PAUSE_SECONDS", "Pace", "Shortage", "refused"]

PAUSE_SECONDS = 10.0
"""Length of a pause."""

_MOST_NS = 500_000_000  # delay by storing before a pause: a slow disk costs training half a second in ten
_LEAST = 64 * 2**20  # bytes that are left free unless `keep_free` was called
_SHARE = 64  # a process fills 1/64 of what is left before it looks again
_ENLARGE = "enlarge it (Docker: --shm-size)"
_EVERY = 0.1  # seconds between two looks
_LEAST_FILES = 8 * 2**20  # half of the margin that `node.grant` leaves in /dev/shm beside the batches of loaders


class Shortage:
    """Looks at the free memory while the cache in a segment is filled."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._unchecked = self._next_look = 0.0  # bytes that may be filled, and time, before the next look

    def comes_with(self, nbytes: int) -> str | None:
        """The shortage that filling so many bytes would cause, in words; None if there is none."""
        now = time.monotonic()
        self._unchecked -= nbytes
        if self._unchecked >= 0 and now < self._next_look:
            return None
        segment, allocated = self._segment, self._segment.allocated_bytes
        measured = (segment.free_bytes or 0, "the disk") if segment.on_disk else FreeMemory.now().memory
        if measured is None:  # unknown memory limits nothing
            return None
        free, name = measured
        with segment.numbers as numbers:  # bytes to leave free, and the lowest sum; 0 before there is one
            reserve, numbered = numbers[0] or _LEAST, numbers[0] > 0
            lowest = max(free + allocated, 1)
            if not segment.on_disk:
                lowest = numbers[1] = min(lowest, numbers[1] or lowest)
        left = lowest - allocated - reserve
        self._unchecked, self._next_look = left // _SHARE, now + _EVERY
        room = segment.free_bytes if numbered and not segment.on_disk else None
        if room is not None:
            batches = max((room + allocated) // 100, _LEAST_FILES)
            self._unchecked = min(left, room - batches) // _SHARE
            if room - batches < nbytes:
                free_text, batches_text = format_bytes(room), format_bytes(batches)
                where = memory_directory()
                return f"{where} ({free_text} free, {batches_text} kept for loaders' batches); {_ENLARGE}"
        if left >= nbytes:
            return None
        least, kept = format_bytes(max(lowest - allocated, 0)), format_bytes(reserve)
        if segment.on_disk:
            return f"{name} ({least} free, {kept} kept for others); give it more room"
        return f"{name} (at times {least} free, {kept} kept for the training); give the job more memory"

    def keep_free(self, nbytes: int) -> None:
        """Leave so many bytes free, and forget earlier looks, in all processes that fill the cache.

        Jobs that share a name leave what the strictest of them has asked for, until none of them has the cache open.
        """
        with self._segment.numbers as numbers, suppress(OSError):  # a full disk has no room for a number, either
            if self._segment.path is not None and numbers[0]:
                numbers[0] = max(numbers[0], nbytes)
            else:
                numbers[0], numbers[1] = max(nbytes, 1), 0


def refused(error: OSError, *, on_disk: bool = False) -> str:
    """The reason why the system does not store a sample, in words."""
    if error.errno == errno.EFBIG:
        return f"files may not be larger, see ulimit -f ({error.strerror or error})"
    if on_disk:
        return f"the disk refuses more samples ({error.strerror or error})"
    if error.errno == errno.ENOSPC:
        return f"no space left in {memory_directory()}; {_ENLARGE}"
    return f"the system refuses memory in {memory_directory()} ({error.strerror or error})"


class Pace:
    """Compares the time of storing with the time of loading.

    Example:
        >>> pace = Pace()
        >>> pace.note(load_ns=9_000_000, store_ns=1_000_000), pace.note(load_ns=0, store_ns=600_000_000), pace.pauses
        (False, True, True)
    """

    def __init__(self) -> None:
        self._behind_ns = 0
        self._paused_until = 0.0

    @property
    def pauses(self) -> bool:
        """Whether storing pauses now."""
        return time.monotonic() < self._paused_until

    def note(self, load_ns: int, store_ns: int) -> bool:
        """Add the time of loading some samples, and of storing them. Returns whether a pause begins now."""
        self._behind_ns = max(self._behind_ns + store_ns - load_ns, 0)
        if self._behind_ns < _MOST_NS:
            return False
        self._behind_ns, self._paused_until = 0, time.monotonic() + PAUSE_SECONDS
        return True
