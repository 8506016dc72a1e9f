"""What lies beside the samples of a stream: their codec, and what is known of each.

The codec has a segment of its own: the bytes of its pickle and the number of slots (two uint64), and the pickle, up to
64 KiB. An entry per slot (two uint64) lies at the end of the segment of the samples, so that one budget is for both:
the mark of a sample, by which it is found again, and its position, which orders all that is kept. Who writes holds a
lock of the ledger.
"""

from __future__ import annotations

import errno
import pickle
import struct

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.node.files import Backend
from lightning_stocache.node.segment import Segment

__all__ = ["ENTRY_BYTES", "Entry", "StreamIndex"]

Entry = tuple[int, int]
"""Mark and position of a sample."""

_CODEC_BYTES = 1 << 16
_TWO = struct.Struct("<QQ")
ENTRY_BYTES = _TWO.size


class StreamIndex:
    """The index of a stream.

    Args:
        segment: where the codec lies.
        samples: where the samples lie, and the entries.

    Example:
        >>> index = StreamIndex.create(Segment.create(4096))
        >>> index.write(10, 3, (77, 5)), index.entries(10, 4)[3].tolist()
        (True, [77, 5])
    """

    def __init__(self, segment: Segment, samples: Segment) -> None:
        self.segment, self._samples = segment, samples

    @classmethod
    def create(cls, samples: Segment, backend: Backend | None = None) -> StreamIndex:
        """Make one for these samples.

        Raises:
            OSError: there is no memory for its codec.
        """
        return cls(Segment.create(_CODEC_BYTES, backend, reserved=_CODEC_BYTES), samples)

    def layout(self) -> tuple[SampleCodec, int] | None:
        """The codec, and the number of slots; None as long as no sample has come."""
        head = self.segment.memory(0, _CODEC_BYTES)
        nbytes, slots = _TWO.unpack_from(head)
        codec = pickle.loads(head[_TWO.size : _TWO.size + nbytes]) if nbytes else None
        head.release()
        return None if codec is None else (codec, slots)

    def lay_out(self, codec: SampleCodec, slots: int) -> bool:
        """Say what samples look like; whether there is room for that."""
        content = pickle.dumps(codec)
        if len(content) > _CODEC_BYTES - _TWO.size:
            return False
        self.segment.store(0, memoryview(_TWO.pack(len(content), slots) + content))
        return True

    def write(self, slots: int, number: int, entry: Entry) -> bool:
        """Note what is known of a sample, where there are so many slots; False where there is no memory."""
        try:
            self._samples.store(self._samples.size - (slots - number) * ENTRY_BYTES, memoryview(_TWO.pack(*entry)))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return False
        return True

    def entries(self, slots: int, count: int) -> npt.NDArray[np.uint64]:
        """Mark and position of the first samples, uint64 `[count, 2]`, where there are so many slots."""
        memory = self._samples.memory(self._samples.size - slots * ENTRY_BYTES, count * ENTRY_BYTES)
        entries = np.frombuffer(memory, dtype=np.uint64).reshape(count, 2).copy()
        memory.release()
        return entries

    def clear(self) -> None:
        """Forget the codec, but keep its memory, which might not be had again."""
        self.segment.store(0, memoryview(bytes(_TWO.size)))
