"""The address of a segment."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SegmentHandle"]


@dataclass(frozen=True)
class SegmentHandle:
    """What another process of the node needs to find a segment. Plain values: it can be pickled and sent anywhere."""

    data: str  # paths: of a name, or of the creator's descriptors below /proc
    locks: str
    inode: int
    token: bytes
    size: int
