"""Messages between a loader and its workers: requests for batches, and replies.

A batch is sent as a pickle. Its large tensors and arrays lie beside the pickle, in the memory that the request names
(`arena`), as far as there is room. Its other tensors lie in the pickle. Torch's own way to send a tensor takes fresh
memory in /dev/shm, and the process dies of SIGBUS if /dev/shm is full. So only tensors that bytes, dtype and shape do
not describe (sparse tensors, subclasses) are sent in torch's way. The worker keeps their memory until the batch is
unpacked.

A reply also carries the worker's error. An error that torch sends in its own way does not name its request, so the
trainer would not know which slot is free again.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.codec import memory_of
from lightning_stocache.cache.counters import Served
from lightning_stocache.loading.arena import Slot, arena_of
from lightning_stocache.loading.collate import is_dense
from lightning_stocache.torch_internals import ExceptionWrapper, pinned, wrapped_error

__all__ = ["Reply", "Request"]


class Request(NamedTuple):
    """A request for a batch.

    Args:
        number: number of the request.
        keys: indices, int64 `[samples]`, or a sampler's keys, which only the source understands.
        slot: the slot for the batch, if there is one.
        most_bytes: bytes that the slot may keep.
    """

    number: int
    keys: Any
    slot: int | None = None
    most_bytes: int = 0


class Reply:
    """The reply to a request.

    The class is no tuple, because older versions of torch pin a tuple item by item and never call `pin_memory`.

    Args:
        number: number of the request.
        served: where the samples of the batch came from.
        token: of the arena, if a slot is leased to the request.
        error: the error that the worker has raised instead of a batch.

    Attributes:
        batch: the batch, once it is unpacked.
        is_refused: whether there was no memory for the slot.
    """

    def __init__(
        self,
        number: int,
        served: Served = (0, 0, 0),
        *,
        token: bytes | None = None,
        error: ExceptionWrapper | None = None,
    ) -> None:
        self.number = number
        self.served = served
        self.error = error
        self.batch: Any = None
        self.is_refused = False
        self._token = token
        self._pickle: bytes | None = None
        self._spans: list[tuple[int, int]] = []  # offsets and sizes of the buffers in the slot
        self._size = 0  # bytes of the slot that the batch takes
        self._is_kept = False  # whether the worker keeps memory of the batch until it is unpacked

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._is_kept:  # nobody may want the batch, after a break
            self.unpack(lend=False)

    def pack(self, batch: Any, slot: Slot) -> None:
        """Pickle a batch, in a worker. Large buffers that lie outside of the slot are copied to it."""

        def is_in_pickle(buffer: pickle.PickleBuffer) -> bool:
            content = buffer.raw()
            offset = slot.place(np.frombuffer(content, dtype=np.uint8)) if content.nbytes else None
            if offset is not None:
                self._spans.append((offset, content.nbytes))
            return offset is None

        file = io.BytesIO()
        packer = _Packer(file, 5, True, is_in_pickle)
        packer.dump(batch)
        self._pickle, self._is_kept = file.getvalue(), packer.shares_memory
        self._size, self.is_refused = slot.end, slot.is_refused

    def unpack(self, *, lend: bool) -> None:
        """Make the batch from the pickle. Call it once.

        Args:
            lend: whether the batch uses the memory of the slot. Else the buffers are copied.
        """
        token = self._token
        packed = self._pickle
        self._token = self._pickle = None
        memory: Any = None
        if token is not None and self._size:
            memory = arena_of(token).lend(self.number, self._size)
        elif token is not None:
            arena_of(token).end_lease(self.number)
        if packed is None:
            return
        try:
            buffers = [_buffer(memory, offset, nbytes) for offset, nbytes in self._spans]
            self.batch = pickle.loads(packed, buffers=buffers if lend else [buffer.copy() for buffer in buffers])
        except Exception:  # of the user's classes
            self.error = wrapped_error("where a batch of a worker is unpacked")

    def pin_memory(self) -> Reply:
        """The reply with its batch in page-locked memory. Torch's thread for that calls it."""
        self.unpack(lend=True)  # the loan ends here
        try:
            self.batch = pinned(self.batch)
        except Exception:
            self.batch = None
            self.error = wrapped_error("in the thread that pins batches")
        return self


class _Packer(ForkingPickler):
    """Pickles a batch, and its dense tensors as buffers. A tensor that comes twice stays one tensor.

    Attributes:
        shares_memory: whether torch has put a tensor into memory that it shares.
    """

    shares_memory = False

    def reducer_override(self, node: Any) -> Any:
        """Pickle a dense, contiguous tensor as a buffer. Torch's own way keeps the strides of the others.

        NumPy's arrays come as DataLoader's queues send them, by Python's default protocol: writable, in native order.
        """
        if type(node) is np.ndarray:
            is_kept = node.flags.writeable and node.flags.forc and node.dtype.isnative
            return NotImplemented if is_kept else node.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        if isinstance(node, torch.UntypedStorage):
            self.shares_memory = True
        if not isinstance(node, torch.Tensor) or not is_dense(node) or not node.is_contiguous():
            return NotImplemented
        buffer = pickle.PickleBuffer(cast(Any, memory_of(node)))
        return _tensor, (buffer, node.dtype, tuple(node.shape), node.stride())


def _buffer(memory: memoryview, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Some bytes of lent memory. They refer to the view, because the loan ends with it; a slice would not."""
    buffer: npt.NDArray[np.uint8] = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset).numpy()
    return buffer


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor. An axis of one row may have any stride, which tells the order of the axes."""
    if not len(content):
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).as_strided(shape, strides)
