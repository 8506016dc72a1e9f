"""What lies in one segment of this process: the memory that it holds, and its end."""

from __future__ import annotations

from abc import ABC, abstractmethod

from lightning_stocache.cache.shortage import keep_free
from lightning_stocache.node.header import HEADER_BYTES
from lightning_stocache.node.segment import Segment

__all__ = ["SegmentMemory"]


class SegmentMemory(ABC):
    """The part of a store that knows nothing of samples."""

    segment: Segment
    _given_up = False

    @property
    @abstractmethod
    def granted_bytes(self) -> int:
        """Bytes that it may take, as budgets count: no header, no rest of whole pages."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of them that the store holds in this node's memory right now."""
        return min(max(self.segment.allocated_bytes - HEADER_BYTES, 0), self.granted_bytes)

    @property
    def promised_bytes(self) -> int:
        """Bytes of them that it may still take."""
        return 0 if self.closed else self.granted_bytes - self.memory_bytes

    def keep_free(self, nbytes: int) -> None:
        """Leave that many bytes of the node's memory to others from now on, in all processes that fill."""
        keep_free(self.segment, nbytes)

    def unlink(self) -> None:
        """Take the name of its file away, if it has one: no other process can open the store any more."""
        self.segment.unlink()

    @property
    def closed(self) -> bool:
        """Whether this process has given it up."""
        return self._given_up or self.segment.closed
