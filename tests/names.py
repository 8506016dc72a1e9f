"""A folder in memory for the caches' names of each process of tests: in one folder they are in each other's way."""

import os
import shutil
import tempfile
from pathlib import Path

from lightning_stocache.node import files, named

_plain = files.memory_directory
_made: list[str] = []


def folder() -> str:
    """Where named segments lie now."""
    return files.memory_directory()


def path_of(name: str) -> Path:
    """The file of a name."""
    return Path(folder(), f"lsc-{os.getuid()}-{name}")


def use(path: str | None = None) -> None:
    """Have named segments lie in a folder from now on, by default the one of this process."""
    if path is None:
        if not _made:
            _made.append(tempfile.mkdtemp(prefix="stocache-tests-", dir=_plain()))
            os.chmod(_made[0], 0o1777)  # as /dev/shm is: other users may put files there
        path = _made[0]
    for module in (files, named):
        module.memory_directory = _plain if path == _plain() else lambda: path  # type: ignore[attr-defined]


def leave() -> None:
    """Have named segments lie where users have them."""
    use(_plain())


def remove() -> None:
    """Remove the folder of this process."""
    while _made:
        shutil.rmtree(_made.pop())
