"""What lies beside the samples of a stream: their codec, and what is known of each.

Layout of the segment: bytes of the pickled codec and the number of places (two uint64), the pickle, up to 64 KiB; then
an entry per number of a sample (two uint64): its mark, by which it is found again, and its position, which orders all
that is kept. Who writes holds a lock of the ledger.
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

__all__ = ["Entry", "StreamIndex"]

Entry = tuple[int, int]
"""Mark and position of a sample."""

_CODEC_BYTES = 1 << 16
_TWO = struct.Struct("<QQ")


class StreamIndex:
    """The index of a stream.

    Args:
        segment: where it lies.

    Example:
        >>> index = StreamIndex.create(places=10)
        >>> index.write(3, (77, 5)), index.entries(4)[3].tolist()
        (True, [77, 5])
        >>> index.segment.close()
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    @classmethod
    def create(cls, places: int, backend: Backend | None = None) -> StreamIndex:
        """Make one for so many samples at most.

        Raises:
            OSError: there is no memory for its codec.
        """
        return cls(Segment.create(_CODEC_BYTES + places * _TWO.size, backend, reserved=_CODEC_BYTES))

    @property
    def places(self) -> int:
        """For how many samples there are entries."""
        return (self.segment.size - _CODEC_BYTES) // _TWO.size

    def layout(self) -> tuple[SampleCodec, int] | None:
        """The codec, and the number of places that the samples have; None as long as none has come."""
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

    def write(self, number: int, entry: Entry) -> bool:
        """Note what is known of a sample; False where there is no memory."""
        try:
            self.segment.store(_CODEC_BYTES + number * _TWO.size, memoryview(_TWO.pack(*entry)))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return False
        return True

    def entries(self, count: int) -> npt.NDArray[np.uint64]:
        """Mark and position of the first samples, uint64 `[count, 2]`."""
        memory = self.segment.memory(_CODEC_BYTES, count * _TWO.size)
        entries = np.frombuffer(memory, dtype=np.uint64).reshape(count, 2).copy()
        memory.release()
        return entries

    def clear(self) -> None:
        """Forget everything, and give the memory of the entries back; that of the codec might not be had again."""
        self.segment.store(0, memoryview(bytes(_TWO.size)))
        self.segment.discard(_CODEC_BYTES)
