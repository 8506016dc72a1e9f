"""What turns samples into bytes, and bytes into samples again: the seam behind which their form is nobody's business.

A codec knows what a sample looks like and what it costs. Rows of fixed fields (`rows`) are one, which also knows how
many of them lie in the memory of a batch; records (`records`) are another. Nothing outside this room looks into what it
gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "BatchRows",
    "Lend",
    "Memory",
    "Parts",
    "SampleCodec",
    "SampleMismatchError",
    "UnsupportedSampleError",
    "aligned",
    "module_name",
    "named",
    "type_name",
]


class SampleMismatchError(ValueError):
    """A sample differs from the spec in structure, type, dtype or shape."""


class UnsupportedSampleError(TypeError):
    """A sample holds something that cannot be kept: it has no fixed number of bytes, or cannot be pickled."""


Parts = Sequence[Any]
"""What a sample is made of, checked and otherwise as it came: tensors, arrays, numbers."""


Memory = Sequence[npt.NDArray[np.uint8]]
"""The memory of a batch, uint8 `[size]` per field, writable, aligned to 64 bytes where it is large."""

Lend = Callable[[Sequence[int]], Memory]
"""Gives memory of undefined content, uint8 `[size]` for each size."""


_ALIGNMENT = 64  # bytes; rows copied from or to less aligned memory cost up to 1.6 times as much


def aligned(size: int) -> int:
    """Bytes that so many take up, with what is left free behind them."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class SampleCodec(Protocol):
    """Between samples and their bytes.

    Raises:
        SampleMismatchError: (`encode`) a sample is not of this codec; the message says where it differs.
        UnsupportedSampleError: (`encode`) it cannot be kept as bytes.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of one sample; where they differ, the mean of those that have been seen."""

    @property
    def slot_bytes(self) -> int:
        """Bytes that a sample costs in a store, with its state."""

    @property
    def most_slot_bytes(self) -> int:
        """Bytes per sample, on average, with which all will fit, for all that is known."""

    @property
    def batch_bytes(self) -> int:
        """Bytes that a sample takes in a batch, before it is transformed."""

    @property
    def title(self) -> str:
        """What samples look like, in words that two jobs can compare."""

    def encode(self, sample: Any, index: int | None = None) -> Parts:
        """Check a sample and take it apart. `index` is named in errors."""

    def contents(self, parts: Parts) -> Sequence[memoryview]:
        """The bytes of an encoded sample, without a copy where they lie in one piece."""

    def least_bytes(self, sample: Any) -> int:
        """Bytes that a sample takes at least, without the work of encoding it."""

    def is_alike(self, sample: Any) -> bool:
        """Whether what comes after the cache finds its places in a sample which is not of this codec."""


class BatchRows(Protocol):
    """The samples of a batch, in memory that was lent for it, open one by one."""

    def put_many(self, places: Sequence[int], samples: Sequence[Parts]) -> list[list[memoryview]]:
        """Copy encoded samples to their places at once; the bytes of each there, per field."""

    def write(self, place: int, contents: Sequence[memoryview | npt.NDArray[np.uint8]]) -> None:
        """Copy the bytes of a sample to its place, per field."""


def named(path: str) -> str:
    """A place in a sample, for messages."""
    return f"field {path}" if path else "the sample"


def type_name(kind: type) -> str:
    """A type as its user knows it, for messages."""
    module = module_name(kind.__module__)
    return kind.__name__ if module in ("builtins", "torch", "numpy") else f"{module}.{kind.__qualname__}"


def module_name(module: str) -> str:
    """What a module is called in the process that a user starts: a script is `__mp_main__` in processes not forked.

    Both names lead to the script in either.

    Example:
        >>> module_name("__mp_main__"), module_name("torch")
        ('__main__', 'torch')
    """
    return "__main__" if module == "__mp_main__" else module
