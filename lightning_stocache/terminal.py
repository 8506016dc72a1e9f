"""What the commands have in common on a terminal: options for a picture and numbers, a question, lines, an error."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["add_png", "numbers", "one_line", "progress", "say", "yes"]


def add_png(parser: argparse.ArgumentParser, default: Path, what: str) -> None:
    """Give a parser the option --png, whose path may be left out: it is `default` then."""

    def path(text: str) -> Path:
        if not text.endswith(".png"):  # a folder or an override that stands behind --png
            raise argparse.ArgumentTypeError(f"a path that ends in .png, or none, got {text}; write --png last")
        return Path(text)

    parser.add_argument("--png", type=path, nargs="?", const=default, help=f"{what} (needs matplotlib)")


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them.

    Example:
        >>> numbers("0,1,2")
        [0, 1, 2]
    """
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"whole numbers with commas between them, as 0,1,2,4, got {text}") from error


def progress(done: int, count: int, left: float, words: str) -> None:
    """Write what was measured last, on a line of its own; on a terminal, over the line before, how much is left."""
    over = "\r\x1b[K" if sys.stderr.isatty() else ""
    text = f"{done} of {count} measurements, about {left:.0f} s left" if over and done < count else ""
    sys.stderr.write(over + (f"{words}\n" if words else "") + text)
    sys.stderr.flush()


def yes(question: str) -> bool:
    """Ask. A script that gives no answer has not said yes."""
    sys.stdout.write(question)
    sys.stdout.flush()
    try:
        answer = sys.stdin.readline() if sys.stdin else ""
    except (KeyboardInterrupt, UnicodeDecodeError):
        answer = ""
    return answer.strip().lower() in ("y", "yes")


def say(line: str) -> None:
    """Write a line, and what the terminal's encoding has not as escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def one_line(error: Exception) -> str:
    """The words of an exception: Hydra wraps what a constructor raises, and tells on several lines."""
    from lightning_stocache.insight.measurement import PlanError
    from lightning_stocache.source.lmdb_file import LMDBError
    from lightning_stocache.source.pack import PackError

    while type(error).__name__ == "InstantiationException" and isinstance(error.__cause__, Exception):
        error = error.__cause__
    words = " ".join(str(error).split())
    ours = isinstance(error, PlanError | LMDBError | PackError | ModuleNotFoundError)
    return words if ours else f"{type(error).__name__}: {words}"
