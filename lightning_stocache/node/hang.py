"""Tell a process that can never go on from a slow one.

A forked process has one thread of its parent's. If that thread waits for another one, it waits for ever. Linux shows
the system call of each thread: such a wait is a private futex without a time limit. A sleep, a wait with a time limit,
a read from a file or a socket, and a lock that processes share are other calls.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

__all__ = ["LOOK_SECONDS", "HangWatch"]

LOOK_SECONDS = 0.15
"""Seconds between two looks."""

_LOOKS = 3  # that show the same
_BLIND_SECONDS = 10.0  # without a change, where the system does not show the calls
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(os.uname().machine if hasattr(os, "uname") else "")
_WAITS = {0, 6, 9, 11, 13}  # WAIT, LOCK_PI, WAIT_BITSET, WAIT_REQUEUE_PI, LOCK_PI2
_OPERATION, _PRIVATE = 127, 128


class HangWatch:
    """Looks at the threads of a process every `LOOK_SECONDS`.

    Args:
        pid: the process.
    """

    def __init__(self, pid: int) -> None:
        self._directory = f"/proc/{pid}/task"
        self._seen: dict[str, tuple[str, str]] = {}
        self._equal = 0
        self._changed = time.monotonic()

    def look(self) -> bool:
        """Look once. Returns whether the process can never go on."""
        threads = self._threads()
        if threads != self._seen:
            self._seen, self._equal, self._changed = threads, 1, time.monotonic()
            return False
        self._equal += 1
        calls = [call for _, call in threads.values()]
        if _FUTEX is None or not calls or not all(calls):  # Yama or a container forbids it
            return time.monotonic() - self._changed > _BLIND_SECONDS
        return self._equal >= _LOOKS and all(_waits_for_thread(call) for call in calls)

    def _threads(self) -> dict[str, tuple[str, str]]:
        """How far each thread has run (its context switches and processor time), and its system call, by its number."""
        threads = {}
        with suppress(OSError):
            for number in os.listdir(self._directory):
                directory = f"{self._directory}/{number}"
                lines = _content(f"{directory}/status").splitlines()
                switches = "".join(line for line in lines if "ctxt_switches" in line)
                threads[number] = switches + _content(f"{directory}/schedstat"), _content(f"{directory}/syscall")
        return threads


def _content(path: str) -> str:
    """The content of a file; "" where the system does not show it."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _waits_for_thread(call: str) -> bool:
    """Whether a system call waits for another thread of its process, without a time limit."""
    words = call.split()
    if len(words) < 5 or words[0] != _FUTEX:
        return False
    operation, time_limit = int(words[2], 16), int(words[4], 16)
    is_private = bool(operation & _PRIVATE)
    return is_private and operation & _OPERATION in _WAITS and time_limit == 0
