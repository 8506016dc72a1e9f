"""What the codec of rows (`rows`) and that of records (`records`) share: errors, types, words for messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "Lend",
    "Memory",
    "Parts",
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
