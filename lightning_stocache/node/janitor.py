"""Who lies in memory under a name, and taking away what nobody uses.

Who removes a segment must get the exclusive lock on its file, so nobody uses it (`named` has the protocol), and looks
again whether the name still leads to that file. Only what is a segment of this user by its magic number is removed,
and of lock files without a segment those that are this user's own, empty and unlocked. Whatever else has such a name
is left as it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_stocache.node.files import memory_directory, token_of
from lightning_stocache.node.locks import SEPARATE, is_unlocked
from lightning_stocache.node.named import LOCKS, check_name, is_name, prefix, still_there, try_exclusive
from lightning_stocache.node.owned import open_own

__all__ = ["NamedSegment", "clean", "clean_locks", "is_stranger", "named_segments", "segments_of_others"]

_PREFIX = re.compile(r"lsc-[0-9]+-")


@dataclass(frozen=True)
class NamedSegment:
    """What lies under a name.

    Args:
        name: the name.
        key: device and inode of the file.
        allocated_bytes: memory that it holds.
        in_use: whether a living process uses it.
        contents: what a look made of it.
    """

    name: str
    key: tuple[int, int]
    allocated_bytes: int
    in_use: bool
    contents: Any


def named_segments(look: Callable[[int], Any] = token_of, directory: str | None = None) -> list[NamedSegment]:
    """The named segments of this user on this node, by name.

    Args:
        look: what is to be known of one, from a descriptor of its file; ValueError if it is none.
        directory: on a disk, whose segments are meant; by default those in memory.
    """
    return list(_inspect(directory, remove=False, look=look))


def segments_of_others(directory: str | None = None) -> dict[int, tuple[int, int]]:
    """By user, how many files of other users have names of caches, and their bytes; nothing of them is opened."""
    found: dict[int, tuple[int, int]] = {}
    for entry in _entries(directory):
        with contextlib.suppress(OSError):
            facts = entry.lstat()
            if facts.st_uid != os.getuid() and stat.S_ISREG(facts.st_mode) and facts.st_blocks:
                count, size = found.get(facts.st_uid, (0, 0))
                found[facts.st_uid] = count + 1, size + facts.st_blocks * 512
    return dict(sorted(found.items()))


def clean(name: str | None = None, directory: str | None = None) -> list[NamedSegment]:
    """Remove the named segments of this user that nobody uses, or the one of a name, in memory or in a directory.

    Returns:
        What was removed.
    """
    if name is not None:
        check_name(name)
    return [found for found in _inspect(directory, remove=True, only=name) if not found.in_use]


def clean_locks(directory: str | None = None) -> None:
    """Remove the lock files of this user whose segments have gone, if they are empty and nobody has them locked."""
    for path in _own_paths(directory):
        if not path.endswith(LOCKS) or os.path.lexists(path.removesuffix(LOCKS)):
            continue
        try:
            locks = open_own(path)
        except OSError:
            continue
        try:
            unused = (not SEPARATE or try_exclusive(locks)) and is_unlocked(locks)
            if unused and not os.fstat(locks).st_size and still_there(locks, path):
                os.unlink(path)
        finally:
            os.close(locks)


def is_stranger(name: str, directory: str | None = None) -> bool:
    """Whether something lies under a name that is no segment of this user."""
    path = os.path.join(directory or memory_directory(), prefix() + name)
    return is_name(name) and os.path.lexists(path) and not any(_inspect(directory, remove=False, only=name))


def _entries(directory: str | None) -> list[Path]:
    """The files that have names of caches, whosoever's."""
    try:
        return sorted(path for path in Path(directory or memory_directory()).iterdir() if _PREFIX.match(path.name))
    except OSError:
        return []


def _own_paths(directory: str | None) -> list[str]:
    """Those of this user, by their names."""
    return [str(path) for path in _entries(directory) if path.name.startswith(prefix())]


def _inspect(
    directory: str | None, *, remove: bool, only: str | None = None, look: Callable[[int], Any] = token_of
) -> Iterator[NamedSegment]:
    for path in _own_paths(directory):
        name = os.path.basename(path).removeprefix(prefix())
        if only not in (None, name) or not is_name(name):
            continue
        try:
            data = open_own(path)
        except OSError:
            continue
        try:
            try:
                contents = look(data)
            except ValueError:  # it is no segment
                continue
            in_use = not try_exclusive(data)
            facts = os.fstat(data)
            if remove and not in_use and still_there(data, path):
                _remove(path)
            yield NamedSegment(name, (facts.st_dev, facts.st_ino), facts.st_blocks * 512, in_use, contents)
        finally:
            os.close(data)


def _remove(path: str) -> None:
    """Take the names of a segment away, the lock file's first if it is our own: it may be another user's."""
    with contextlib.suppress(OSError):
        os.close(open_own(path + LOCKS))
        os.unlink(path + LOCKS)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
