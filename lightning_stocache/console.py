"""The lines of the package on a console: each begins with `stocache:`, and stands above a progress bar.

Where logging is set up (Hydra, basicConfig), its handlers decide. Elsewhere a handler of our own prints warnings, as
Python itself would. A line that a bar of tqdm is drawn over, or is glued to, is written by `tqdm.write`; Rich puts a
stderr of its own in place while it draws, which a handler that has kept the one of before does not use: `above_bars`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["PREFIX", "Console", "above_bars", "is_heard"]

PREFIX = "stocache: "
_OURS = logging.getLogger("lightning_stocache")


class Console(logging.Handler):
    """Prints the package's warnings where nobody has set logging up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter(f"{PREFIX}%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless somebody else does."""
        if not is_heard():
            _AboveBars("stderr").write(f"{self.format(record)}\n")


def is_heard() -> bool:
    """Whether somebody has set logging up, who gets what the package logs."""
    return bool(logging.getLogger().handlers) or any(type(handler) is not Console for handler in _OURS.handlers)


@contextmanager
def above_bars(name: str) -> Iterator[None]:
    """Have the console handlers of a logger write above the bars that are drawn."""
    before: list[tuple[logging.StreamHandler[Any], Any]] = []
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        before += [(each, each.stream) for each in logger.handlers if isinstance(each, logging.StreamHandler)]
        logger = logger.parent if logger.propagate else None
    try:
        for handler, stream in before:
            if stream in (sys.stdout, sys.__stdout__):
                handler.setStream(_AboveBars("stdout"))
            elif stream in (sys.stderr, sys.__stderr__):
                handler.setStream(_AboveBars("stderr"))
        yield
    finally:
        for handler, stream in before:
            handler.setStream(stream)


class _AboveBars:
    """Standard output or error as it is now, for whole lines."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, text: str) -> None:
        stream = getattr(sys, self.name)
        bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if getattr(bars, "_instances", None):  # those that are drawn; `write` makes a semaphore, which stays
            bars.write(text, file=stream, end="")
        else:
            stream.write(text)

    def flush(self) -> None:
        getattr(sys, self.name).flush()
