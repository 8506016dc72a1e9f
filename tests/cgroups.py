"""Processes in a memory cgroup of their own, above whose limit the kernel kills; making one takes root, or it skips.

It is made below the mount's root, because in v2 a cgroup with processes has no children that are limited.
"""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import wait_until

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_ROOT = _V1 if _V1.is_dir() else _V2
_LIMIT, _EVENTS, _PEAK = {
    _V1: ("memory.limit_in_bytes", "memory.oom_control", "memory.max_usage_in_bytes"),
    _V2: ("memory.max", "memory.events", "memory.peak"),
}[_ROOT]


def has_killed(folder: Path) -> bool:
    """Whether the kernel has killed a process of the cgroup with this folder."""
    return re.search("^oom_kill [1-9]", (folder / _EVENTS).read_text(), re.MULTILINE) is not None


def peak_of(folder: Path) -> int:
    """The most bytes that were charged at once, droppable page cache included; 0 where the kernel does not say."""
    peak = folder / _PEAK
    return int(peak.read_text()) if peak.exists() else 0


@contextlib.contextmanager
def cgroup(limit: int) -> Iterator[Path]:
    """The folder of a cgroup with that many bytes of memory, which a process enters by its file `cgroup.procs`."""
    folder = _ROOT / f"stocache-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / _LIMIT).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield folder
    finally:
        wait_until(lambda: _is_removed(folder))  # a process that was killed is charged for a moment longer


def _is_removed(folder: Path) -> bool:
    """Remove a cgroup. A DataLoader's worker whose trainer was killed while it started would stay in it for ever."""
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        folder.rmdir()
    return not folder.exists()
