"""The package's lines on a console: each begins with `stocache:`, fits a terminal, and stands above a progress bar.

All lines are records of `logging`: `say` logs them, modules log their warnings. If logging is set up (by Hydra or
basicConfig), its handlers print them. Otherwise `Console` does, on stderr.

A progress bar would overwrite a printed line, or continue in the same line. So while tqdm draws a bar, lines go through
`tqdm.write`. Rich replaces `sys.stderr` while it draws, and a handler that was made earlier still has the former
stream: `above_bars` gives the handler the present stream.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import wrap
from typing import Any

__all__ = ["Console", "above_bars", "say", "wrapped"]

_PREFIX = "stocache: "
_WIDTH = 79  # columns; a bar that is drawn anew may erase what a terminal of 80 has wrapped by itself
_OURS = logging.getLogger("lightning_stocache")
_LINES = logging.getLogger("lightning_stocache.lines")
_LINES.setLevel(logging.INFO)


class Console(logging.Handler):
    """Prints the package's lines and warnings if logging is not set up."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless another handler prints it."""
        is_set_up = logging.getLogger().handlers or any(type(handler) is not Console for handler in _OURS.handlers)
        is_line = record.name == _LINES.name
        if is_set_up or not (is_line or record.levelno >= logging.WARNING):
            return
        try:
            text = self.format(record)
            _AboveBars("stderr").write(f"{text if is_line else wrapped(_PREFIX + text)}\n")
        except Exception:  # as every handler of logging: a line that cannot be printed stops no training
            self.handleError(record)


def say(text: str) -> None:
    """Log a line for people, unless the level of the logger `lightning_stocache` forbids it."""
    if _OURS.level <= logging.INFO:
        with above_bars(_LINES.name):
            _LINES.info(wrapped(_PREFIX + text))


def wrapped(text: str, indent: int = 0) -> str:
    r"""A text in lines that fit a terminal. All lines but the first are indented by four more spaces.

    Example:
        >>> print(wrapped(f"stocache: {'a sentence, ' * 7}\nand one of its own"))
        stocache: a sentence, a sentence, a sentence, a sentence, a sentence, a
            sentence, a sentence,
            and one of its own
    """
    lines: list[str] = []
    for part in text.split("\n"):
        lines += wrap(
            part,
            _WIDTH,
            initial_indent=" " * (indent + 4 if lines else indent),
            subsequent_indent=" " * (indent + 4),
            break_on_hyphens=False,  # of options of commands
            break_long_words=False,  # paths
        )
    return "\n".join(lines)


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
