"""The segments in which a stream is kept: made by one process of a node, reached by the others, given up by each.

Three of them: the ledger, the samples as their store lays them out with an index behind them, and their codec. Memory
for samples is taken when they come; the files of the others are as long as the memory that they have, so that other
jobs see a promise of what was granted, and no more.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from lightning_stocache.cache.shortage import keep_free
from lightning_stocache.cache.stream_index import StreamIndex
from lightning_stocache.cache.stream_ledger import StreamLedger
from lightning_stocache.node.files import Backend
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["StreamHandle", "StreamSegments"]

_SLACK = 4096  # bytes beyond what is granted, for what is as large in every store


@dataclass(frozen=True)
class StreamHandle:
    """How another process of the node opens the same."""

    ledger: SegmentHandle
    samples: SegmentHandle
    index: SegmentHandle
    ranks: int
    granted: int


@dataclass(frozen=True)
class StreamSegments:
    """The segments of one stream.

    Args:
        ledger: how far the stream has come.
        samples: the memory for samples.
        index: their codec, and what is known of each.
        granted: bytes that samples may take, with their index.

    Example:
        >>> segments = StreamSegments.create(2**20)
        >>> segments.granted, segments.ledger.generation
        (1048576, 0)
        >>> segments.close()
    """

    ledger: StreamLedger
    samples: Segment
    index: StreamIndex
    granted: int

    @classmethod
    def create(cls, granted: int, ranks: int = 1, backend: Backend | None = None, free: int = 0) -> StreamSegments:
        """Make them, empty.

        Args:
            granted: bytes that samples may take.
            ranks: ranks of the node that read the stream.
            backend: kind of segments.
            free: bytes of the node's memory that filling leaves to others; 0: as many as it does by itself.

        Raises:
            OSError: the memory cannot be had.
        """
        with contextlib.ExitStack() as undo:
            ledger = StreamLedger.create(ranks, backend)
            undo.callback(ledger.close)
            samples = Segment.create(granted + _SLACK, backend)
            undo.callback(samples.close)
            index = StreamIndex.create(samples, backend)
            undo.callback(index.segment.close)
            if free:
                keep_free(samples, free)
            undo.pop_all()
        return cls(ledger, samples, index, granted)

    @classmethod
    def attach(cls, handle: StreamHandle) -> StreamSegments:
        """Open those that another process of the node made.

        Raises:
            OSError: they cannot be reached from here.
        """
        ledger = StreamLedger(Segment.attach(handle.ledger), handle.ranks)
        samples = Segment.attach(handle.samples)
        return cls(ledger, samples, StreamIndex(Segment.attach(handle.index), samples), handle.granted)

    @property
    def handle(self) -> StreamHandle:
        """What another process of the node needs to open them."""
        ledger = self.ledger
        return StreamHandle(ledger.handle, self.samples.handle, self.index.segment.handle, ledger.ranks, self.granted)

    def unlink(self) -> None:
        """Take the names of their files away, if they have any."""
        for part in (self.ledger, self.samples, self.index.segment):
            part.unlink()

    def close(self) -> None:
        """Give them up in this process."""
        for part in (self.ledger, self.samples, self.index.segment):
            part.close()
