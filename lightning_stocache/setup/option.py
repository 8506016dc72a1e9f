"""What the value of an option may be. The error names the option, the rule, and what was given.

From a YAML file or a command line values come as they were typed: "yes", 2.0, a name with a slip in it.
"""

from __future__ import annotations

from typing import Any, get_args

__all__ = ["check_choice", "check_count", "check_flag"]


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Refuse a value that is none of a `Literal`'s.

    Example:
        >>> from typing import Literal
        >>> check_choice("gather", "both", Literal["auto", "main", "worker"])
        Traceback (most recent call last):
        ValueError: gather must be 'auto', 'main' or 'worker', got 'both'
    """
    *others, last = map(repr, get_args(choices))
    if value not in get_args(choices):
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
