"""The package's lines on a console: each begins with `stocache:`, and stands above a progress bar.

If logging is set up (by Hydra or basicConfig), its handlers print the lines. Otherwise `Console` prints the warnings,
as Python itself would.

A progress bar would overwrite a printed line, or continue in the same line. So while tqdm draws a bar, lines go through
`tqdm.write`. Rich replaces `sys.stderr` while it draws, and a handler that was made earlier still has the former
stream: `above_bars` gives the handler the present stream.
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
    """Prints the package's warnings if logging is not set up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter(f"{PREFIX}%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless another handler prints it."""
        try:
            if not is_heard():
                _AboveBars("stderr").write(f"{self.format(record)}\n")
        except Exception:  # as every handler of logging: a line that cannot be printed stops no training
            self.handleError(record)


def is_heard() -> bool:
    """Whether logging is set up: a handler other than `Console` gets the package's records."""
    return bool(logging.getLogger().handlers) or any(type(handler) is not Console for handler in _OURS.handlers)


@contextmanager
def above_bars(name: str) -> Iterator[None]:
    """Let the console handlers of a logger write above progress bars."""
    before: list[tuple[logging.StreamHandler[Any], Any]] = []
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        for handler in logger.handlers:  # a FileHandler may replace its stream meanwhile, by its delay or its rotation
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                before.append((handler, handler.stream))
        logger = logger.parent if logger.propagate else None
    try:
        for handler, stream in before:
            if stream in (sys.stdout, sys.__stdout__):
                handler.stream = _AboveBars("stdout")  # not by `setStream`, which flushes: a full disk would raise
            elif stream in (sys.stderr, sys.__stderr__):
                handler.stream = _AboveBars("stderr")
        yield
    finally:
        for handler, stream in before:
            handler.stream = stream


class _AboveBars:
    """A stream for whole lines, which writes to the present `sys.stdout` or `sys.stderr`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, text: str) -> None:
        stream = getattr(sys, self.name)
        bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if getattr(bars, "_instances", None):  # a bar is drawn; without one, `write` would make a semaphore for ever
            bars.write(text, file=stream, end="")
        else:
            stream.write(text)

    def flush(self) -> None:
        getattr(sys, self.name).flush()
