"""What starts processes: noted as it happens, so that a test that does it unmarked can be told so.

Python announces forks and subprocesses to audit hooks. What multiprocessing starts by other calls (a spawned child, a
child of the fork server, its servants) is noted where it does.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing import process, util
from pathlib import Path
from typing import Any

__all__ = ["Starts"]

_EVENTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
_HERE = str(Path(__file__).parent)


class Starts:
    """Notes what this process starts, from now on: what, and the line of a test that has led to it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._seen: list[str] = []
        sys.addaudithook(self._hear)
        for owner, name in ((process.BaseProcess, "start"), (util, "spawnv_passfds")):
            self._wrap(owner, name)

    def take(self) -> list[str]:
        """What has been started since it was asked last."""
        seen = list(dict.fromkeys(self._seen))
        self._seen.clear()
        return seen

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _EVENTS:
            self._note(event)

    def _wrap(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            self._note(f"{owner.__name__}.{name}")
            return plain(*args, **options)

        setattr(owner, name, noted)

    def _note(self, what: str) -> None:
        if os.getpid() != self._pid:  # a child may do as it likes
            return
        for frame, line in traceback.walk_stack(None):
            path = frame.f_code.co_filename
            if path.startswith(_HERE) and path != __file__:
                what += f" from {os.path.relpath(path, _HERE)}:{line}"
                break
        self._seen.append(what)
