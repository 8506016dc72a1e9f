"""The address of a segment; and whether a process that is being started gets that, or the descriptors themselves."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from multiprocessing import context
from typing import Any

__all__ = ["SegmentHandle", "takes_descriptors"]

# A fork server takes 251 descriptors with a process. A segment has two, and torch sends one for each tensor.
_MOST_SENT = 80
_sent: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class SegmentHandle:
    """What another process of the node needs to find a segment. Plain values: it can be pickled and sent anywhere."""

    data: str  # paths: of a name, or of the creator's descriptors below /proc
    locks: str
    inode: int
    token: bytes
    size: int


def takes_descriptors() -> bool:
    """Whether a process is being started that can be sent the descriptors of one more segment, which then count."""
    child = context.get_spawning_popen()
    if child is None:
        return False
    _sent[child] = _sent.get(child, 0) + 1
    return _sent[child] <= _MOST_SENT
