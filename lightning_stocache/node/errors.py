"""Errors in words, whatever their classes do.

The class of an error may be the user's, and its `__str__`, `__repr__` and `__bool__` may raise anything. So an error is
compared with None, never tested for truth, which the traceback module does.
"""

from __future__ import annotations

import traceback

__all__ = ["description", "text_of", "trace_of"]


def description(error: BaseException) -> str:
    """The `repr` of an error, or the name of its class if its `repr` is empty or raises.

    Example:
        >>> description(ValueError("no sample"))
        "ValueError('no sample')"
    """
    try:
        return repr(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def text_of(error: BaseException) -> str:
    """The `str` of an error, or "unreadable" if it raises.

    Example:
        >>> text_of(ValueError("no sample"))
        'no sample'
    """
    try:
        return str(error)
    except Exception:
        return "unreadable"


def trace_of(error: BaseException) -> str:
    """The traceback of an error with its causes; without the causes if the class's `__bool__` or `__len__` raises."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return "".join([*traceback.format_tb(error.__traceback__), f"{type(error).__name__}: {text_of(error)}\n"])
