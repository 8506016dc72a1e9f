"""Text for people: rows of words whose columns stand one below the other, and lines of at most 80 characters."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

__all__ = ["aligned", "wrapped"]


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    r"""The rows as lines, with two spaces between columns; numbers stand to the right.

    Args:
        rows: all with as many cells.
        left: how many columns, from the first on, stand to the left.

    Example:
        >>> print("\n".join(aligned([["part", "ms"], ["forward", "4.00"], ["rest", "12.50"]], left=1)))
        part        ms
        forward   4.00
        rest     12.50
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        names = map(str.ljust, row[:left], widths[:left])
        numbers = map(str.rjust, row[left:], widths[left:])
        lines.append("  ".join([*names, *numbers]).rstrip())
    return lines


def wrapped(text: str, indent: int = 0) -> list[str]:
    """A sentence as lines of 80 columns, all but the first four further to the right.

    Options of commands are not cut at their hyphens.
    """
    first, later = " " * indent, " " * (indent + 4)
    return wrap(text, 80, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
