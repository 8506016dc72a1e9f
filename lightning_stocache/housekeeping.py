"""The commands for caches that lie on this machine: doctor, list and clean."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from lightning_stocache.terminal import say, yes

if TYPE_CHECKING:
    from lightning_stocache.node.named import NamedSegment

__all__ = ["clean", "doctor", "list_"]

Action: TypeAlias = Callable[[argparse.Namespace], None]


def doctor(parser: argparse.ArgumentParser) -> Action:
    """Say what this machine allows a cache, who holds memory, and how to mend what is wrong."""
    _take_directories(parser, "a directory on a disk that is to hold caches; may be given several times")

    def run(arguments: argparse.Namespace) -> None:
        from lightning_stocache.insight.doctor import as_text, examine

        try:
            findings = examine(directories=arguments.dir)
        except OSError as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
        say(as_text(findings))

    return run


def list_(parser: argparse.ArgumentParser) -> Action:
    """Show the named caches of this user on this node, by job."""
    _take_directories(parser, "a directory whose caches are shown, too; may be given several times")

    def run(arguments: argparse.Namespace) -> None:
        from lightning_stocache.insight.inventory import named_lines
        from lightning_stocache.node.header import printable

        for line in named_lines(_named(parser)):
            say(line)
        for directory in arguments.dir:
            say(f"\nin {printable(directory)}")
            for line in named_lines(_named(parser, directory), directory):
                say(line)

    return run


def clean(parser: argparse.ArgumentParser) -> Action:
    """Remove named caches that no process uses."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="only this one, or those of the job of this name")
    parser.add_argument(
        "--dir", metavar="DIR", help="a directory on a disk, whose caches are meant; else those in memory"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")

    def run(arguments: argparse.Namespace) -> None:
        from lightning_stocache.insight.inventory import count, describe, of_job
        from lightning_stocache.node.named import clean, is_foreign

        known = _named(parser, arguments.dir)
        if arguments.name is not None:
            known = of_job(arguments.name, known)
        dead = [cache for cache in known if not cache.in_use]
        if arguments.name is not None and not dead:
            why = "is in use" if known else "does not exist"
            if is_foreign(arguments.name, arguments.dir):
                why = "is none: what lies under its name is no segment of this user, and stays as it is"
            parser.exit(2, f"{parser.prog}: the cache {arguments.name!r} {why}; python -m lightning_stocache list\n")
        for cache in known:
            say(f"{'stays, ' if cache.in_use else ''}{describe(cache)}")
        if dead and not arguments.yes and not yes(f"remove {count(dead)}? [y/N] "):
            say("nothing removed; --yes removes without asking")
            return
        shown = [cache.name for cache in dead]  # what has come since was not
        removed = [gone for cache in shown for gone in clean(cache, arguments.dir)]
        say(f"removed {count(removed)}" if dead else "nothing to remove")

    return run


def _take_directories(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--dir", metavar="DIR", action="append", default=[], help=text)


def _named(parser: argparse.ArgumentParser, directory: str | None = None) -> Sequence[NamedSegment]:
    if sys.platform == "win32":
        parser.exit(2, f"{parser.prog}: Windows has no named caches\n")
    from lightning_stocache.cache.layout import contents_of
    from lightning_stocache.node.header import printable
    from lightning_stocache.node.named import named_segments

    if directory is not None and not os.path.isdir(directory):
        parser.exit(2, f"{parser.prog}: --dir {printable(directory)} is not a directory\n")
    return named_segments(contents_of, directory)
