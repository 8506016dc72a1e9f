"""Tell a process that can never go on from a slow one.

A forked process has one thread of its parent's. If that thread waits for another one, it waits for ever. Linux shows
the system call of each thread: such a wait is a private futex without a time limit. A sleep, a wait with a time limit,
a read from a file or a socket, and a lock that processes share are other calls.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

__all__ = ["LOOK_SECONDS", "HangWatch"]

LOOK_SECONDS = 0.15
"""Seconds between two looks."""

_LOOKS = 3  # that show the same
_BLIND_SECONDS = 10.0  # without a change, where the system does not show the calls
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine if hasattr(os, "uname") else "")
_WAITS = {0, 6, 9, 11, 13}  # WAIT, LOCK_PI, WAIT_BITSET, WAIT_REQUEUE_PI, LOCK_PI2
_OPERATION, _PRIVATE = 127, 128


class _Thread(NamedTuple):
    """What the system shows of a thread.

    Args:
        number: its number.
        switches: its context switches, in words.
        run_time: its processor time, in words.
        waits: whether it waits for another thread of its process, without a time limit; None: unknown.
    """

    number: str
    switches: tuple[str, ...]
    run_time: str
    waits: bool | None


class HangWatch:
    """Looks at the threads of a process every `LOOK_SECONDS`.

    Args:
        pid: the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: list[_Thread] | None = None
        self._equal = 0
        self._changed = time.monotonic()

    def look(self) -> bool:
        """Look once. Returns whether the process can never go on."""
        threads = _threads(self._pid)
        if threads != self._seen:
            self._seen, self._equal, self._changed = threads, 1, time.monotonic()
            return False
        self._equal += 1
        if threads is None or any(thread.waits is None for thread in threads):
            return time.monotonic() - self._changed > _BLIND_SECONDS
        return self._equal >= _LOOKS and bool(threads) and all(thread.waits for thread in threads)


def _threads(pid: int) -> list[_Thread] | None:
    """The threads of a process; None if the system does not show them."""
    directory = f"/proc/{pid}/task"
    try:
        return [_thread(f"{directory}/{number}", number) for number in sorted(os.listdir(directory))]
    except OSError:
        return None


def _thread(directory: str, number: str) -> _Thread:
    with open(f"{directory}/status") as status:
        switches = tuple(line for line in status if "ctxt_switches" in line)
    try:
        with open(f"{directory}/schedstat") as schedule:
            run_time = schedule.read().split()[0]
    except (OSError, IndexError):  # a kernel without it
        run_time = ""
    return _Thread(number, switches, run_time, _waits_for_thread(directory))


def _waits_for_thread(directory: str) -> bool | None:
    try:
        with open(f"{directory}/syscall") as file:
            call = file.read().split()
    except OSError:  # Yama or a container forbids it
        return None
    if _FUTEX is None:
        return None
    if len(call) < 5 or call[0] != str(_FUTEX):
        return False
    operation, time_limit = int(call[2], 16), int(call[4], 16)
    is_private = bool(operation & _PRIVATE)
    return is_private and operation & _OPERATION in _WAITS and time_limit == 0
