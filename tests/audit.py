"""What this process does that a test answers for: it starts processes, and takes memory that others could see.

Python tells audit hooks of forks, subprocesses, files and mappings. What multiprocessing starts by other calls (a
spawned child, a child of the fork server, its servants) is noted where it does.
"""

import os
import sys
import traceback
from multiprocessing import process, util
from pathlib import Path
from typing import Any

__all__ = ["Audit"]

_STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
_HERE = str(Path(__file__).parent)


class Audit:
    """Notes what this process does from now on; what its children do is not noted.

    Attributes:
        started: what has been started, with the line of a test that has led to it; who looks may clear it.
        memory: how many files have been mapped, or opened in /dev/shm. torch's own shared tensors are not among them.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self.memory = 0
        self._pid = os.getpid()
        sys.addaudithook(self._hear)
        for owner, name in ((process.BaseProcess, "start"), (util, "spawnv_passfds")):
            self._wrap(owner, name)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _STARTS:
            self._note(event)
        elif event == "mmap.__new__" or (event == "open" and str(args[0]).startswith("/dev/shm")):
            self.memory += 1

    def _wrap(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            self._note(f"{owner.__name__}.{name}")
            return plain(*args, **options)

        setattr(owner, name, noted)

    def _note(self, what: str) -> None:
        if os.getpid() != self._pid:
            return
        for frame, line in traceback.walk_stack(None):
            path = frame.f_code.co_filename
            if path.startswith(_HERE) and path != __file__:
                what += f" from {os.path.relpath(path, _HERE)}:{line}"
                break
        self.started.append(what)
