"""What a tree of processes takes: memory without counting a shared page twice, and CPU seconds.

Memory is read from /proc: anonymous and shared PSS (each page divided by the processes that have it mapped; the pages
of program files are left out) from `smaps_rollup`, and the allocated blocks of files that lie in memory (/dev/shm and
memfd), each file once, through the descriptors of the processes that have it open. Linux only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

__all__ = ["Footprint", "Peak", "cpu_seconds", "tree"]

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Footprint:
    """Bytes of some processes at one moment.

    Args:
        anonymous: PSS of memory that belongs to no file.
        shared: PSS of memory that is mapped from files in memory.
        blocks: allocated blocks of all such files that are open, mapped or not.
    """

    anonymous: int = 0
    shared: int = 0
    blocks: int = 0

    @property
    def held(self) -> int:
        """What the machine is short of: blocks count whether or not a process has touched them.

        Or shared PSS, where that is more: memory whose descriptor was closed after it was mapped has no blocks here.
        """
        return self.anonymous + max(self.shared, self.blocks)

    @classmethod
    def of(cls, pids: Iterable[int]) -> Footprint:
        """That of these processes and their descendants."""
        sums, files = {"Pss_Anon:": 0, "Pss_Shmem:": 0}, dict[tuple[int, int], int]()
        for pid in tree(pids):
            for name, kib in (line.split()[:2] for line in _read(f"/proc/{pid}/smaps_rollup").splitlines()[1:]):
                if name in sums:
                    sums[name] += int(kib) * 1024
            files |= _files_in_memory(pid)
        return cls(sums["Pss_Anon:"], sums["Pss_Shmem:"], sum(files.values()))


class Peak:
    """The largest footprint that some processes have while the block runs, sampled from a thread.

    Processes are read one after the other. One that forks meanwhile is counted whole, and its child's half again; so a
    sample counts only as far as the next one confirms it.

    Args:
        pids: the processes; their descendants are counted too.
        every: seconds between two samples.
    """

    def __init__(self, pids: Iterable[int], every: float = 0.02) -> None:
        self.most = Footprint()
        self._pids, self._every = list(pids), every
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        last = Footprint()
        while not self._end.wait(self._every):
            now = Footprint.of(self._pids)
            self.most = max(self.most, min(last, now, key=_held), key=_held)
            last = now


def _held(footprint: Footprint) -> int:
    return footprint.held


def tree(pids: Iterable[int]) -> set[int]:
    """These processes and all their descendants."""
    parents = {int(name): stat[1] for name in os.listdir("/proc") if name.isdigit() and (stat := _stat(name))}
    found, generation = set[int](), {int(pid) for pid in pids}
    while generation:
        found |= generation
        generation = {pid for pid, parent in parents.items() if int(parent) in generation} - found
    return found


def cpu_seconds() -> float:
    """CPU seconds so far of this process and its descendants, and of those that have ended and been waited for."""
    return sum(sum(map(int, _stat(str(one))[11:15])) for one in tree([os.getpid()])) / _TICKS


def _stat(pid: str) -> list[str]:
    """The fields of a process behind its name: state, parent, ...; none if it has ended."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _files_in_memory(pid: int) -> dict[tuple[int, int], int]:
    """Allocated bytes by device and inode."""
    found = {}
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return {}
    for descriptor in descriptors:
        try:
            if os.readlink(descriptor).startswith(("/dev/shm/", "/memfd:")):
                facts = descriptor.stat()
                found[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
        except OSError:  # closed meanwhile
            continue
    return found


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # the process has ended
        return ""
