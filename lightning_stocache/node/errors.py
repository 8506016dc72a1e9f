"""Errors in words.

An error may be of the user's class, whose methods may raise anything: `str`, `repr`, and `bool`, which the traceback
module asks. So an error is compared with None, never tested by its truth.
"""

from __future__ import annotations

import traceback

__all__ = ["description", "text_of", "trace_of"]


def description(error: BaseException) -> str:
    """An error in words, never empty.

    Example:
        >>> description(ValueError("no sample"))
        "ValueError('no sample')"
    """
    try:
        return repr(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def text_of(error: BaseException) -> str:
    """The text of an error, as `str` gives it; "unreadable" if it gives none.

    Example:
        >>> text_of(ValueError("no sample"))
        'no sample'
    """
    try:
        return str(error)
    except Exception:
        return "unreadable"


def trace_of(error: BaseException) -> str:
    """The traceback of an error, with the error's text; the place alone if the error has no truth."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return "".join([*traceback.format_tb(error.__traceback__), f"{type(error).__name__}: {text_of(error)}\n"])
