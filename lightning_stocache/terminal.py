"""What the commands have in common on a terminal: an option for a picture, a question, a line, an error."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["add_png", "one_line", "say", "yes"]


def add_png(parser: argparse.ArgumentParser, default: Path, what: str) -> None:
    """Give a parser the option --png, whose path may be left out: it is `default` then."""

    def path(text: str) -> Path:
        if not text.endswith(".png"):  # a folder or an override that stands behind --png
            raise argparse.ArgumentTypeError(f"a path that ends in .png, or none, got {text}; write --png last")
        return Path(text)

    parser.add_argument("--png", type=path, nargs="?", const=default, help=f"{what} (needs matplotlib)")


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
    from lightning_stocache.insight.planner import PlanError
    from lightning_stocache.source.lmdb_file import LMDBError
    from lightning_stocache.source.pack import PackError

    while type(error).__name__ == "InstantiationException" and isinstance(error.__cause__, Exception):
        error = error.__cause__
    words = " ".join(str(error).split())
    ours = isinstance(error, PlanError | LMDBError | PackError | ModuleNotFoundError)
    return words if ours else f"{type(error).__name__}: {words}"
