"""Whether two sources are the same, in one process, as far as their whole state tells it.

A sweep makes its dataset anew for every trial: another object, with the same paths, lists and transforms in it. Two
sources are taken for the same if they are pickled to the same bytes, which hold the class by its name and every
attribute, down to the last. Tensors are told by their own bytes, for a pickle has the whole memory below a view. What
cannot be pickled, or holds more than a gigabyte, is the same as nothing. What lies outside of the object (a file under
a path, a global variable) is not seen.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

import torch

__all__ = ["UnknownSourceError", "source_digest"]

_MOST = 2**30  # bytes: about a second


class UnknownSourceError(ValueError):
    """A source cannot be known again; the message says why."""


def source_digest(source: Any) -> str:
    """A digest of all that a source consists of.

    Raises:
        UnknownSourceError: it cannot be pickled, or holds too much.

    Example:
        >>> from torch.utils.data import Subset
        >>> first, second = (Subset(range(10), [1, index]) for index in (2, 3))
        >>> (
        ...     source_digest(first) == source_digest(second),
        ...     source_digest(first) == source_digest(Subset(range(10), [1, 2])),
        ... )
        (False, True)
    """
    for as_a_tree in (True, False):
        digest = _Digest()
        pickler = _Pickler(digest, 5)
        # Which of two equal strings are one object depends on who made them: without a memo that does not matter. What
        # refers to itself needs one.
        pickler.fast = as_a_tree
        try:
            pickler.dump(source)
            return digest.hexdigest()
        except UnknownSourceError:
            raise
        except Exception as error:  # whatever the code of the user's classes raises when they are pickled
            reason = f"it cannot be pickled ({type(error).__name__}: {error})"
    raise UnknownSourceError(reason)


class _Digest(io.RawIOBase):
    """Digests what is written."""

    def __init__(self) -> None:
        self._digest, self._size = hashlib.sha256(), 0

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        self._size += size
        if self._size > _MOST:
            raise UnknownSourceError("it holds more than 1 GiB")
        self._digest.update(content)
        return size

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            whole = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return str, (str(obj.dtype), tuple(obj.shape), whole.numpy().tobytes())
        return NotImplemented
