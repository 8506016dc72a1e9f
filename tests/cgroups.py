"""Commands and processes in a memory cgroup of their own, above whose limit the kernel kills.

One is made below that of this process (v1), or below the mount's root (v2, where a cgroup with processes has no
children that are limited). Making one takes root; a test is skipped where it is refused.
"""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import wait_until

__all__ = ["Outcome", "cgroup", "has_killed", "peak_of", "run_limited"]

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Outcome(NamedTuple):
    """Whether the kernel killed a process of a command for memory, the command's exit code, the most bytes that were
    charged to it at once, droppable page cache included, and what it wrote."""

    killed: bool
    code: int
    peak: int
    out: str
    error: str


def run_limited(command: Sequence[str], limit: int, timeout: float = 240) -> Outcome:
    """Run a command with that many bytes of memory; skips the test where no cgroup can be made."""
    with cgroup(limit) as folder, tempfile.TemporaryDirectory() as place:
        script = 'echo $$ > "$0/cgroup.procs" && out="$1" && shift && exec "$@" >"$out/out" 2>"$out/error"'
        process = subprocess.Popen(["sh", "-c", script, str(folder), place, *command])
        try:
            code = process.wait(timeout)
        finally:
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            process.wait()
        out, error = Path(place, "out").read_text(), Path(place, "error").read_text()
        return Outcome(has_killed(folder), code, peak_of(folder), out, error)


def has_killed(folder: Path) -> bool:
    """Whether the kernel has killed a process of the cgroup with this folder."""
    events = (folder / ("memory.oom_control" if _V1.is_dir() else "memory.events")).read_text()
    return int(dict(line.split() for line in events.splitlines())["oom_kill"]) > 0


def peak_of(folder: Path) -> int:
    """The most bytes that were charged at once, or 0 where the kernel does not say."""
    peak = folder / ("memory.max_usage_in_bytes" if _V1.is_dir() else "memory.peak")
    return int(peak.read_text()) if peak.exists() else 0


@contextlib.contextmanager
def cgroup(limit: int) -> Iterator[Path]:
    """The folder of a cgroup with that many bytes of memory, which a process enters by its file `cgroup.procs`."""
    folder = _parent() / f"stocache-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        try:
            (folder / ("memory.limit_in_bytes" if _V1.is_dir() else "memory.max")).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield folder
    finally:
        wait_until(lambda: _is_removed(folder))  # a process that was killed is charged for a moment longer


def _is_removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def _parent() -> Path:
    if not _V1.is_dir():
        return _V2
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _V1 / path.lstrip("/")
    return _V1
