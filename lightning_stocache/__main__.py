"""The command line: `python -m lightning_stocache <command>`.

Each command is one function, listed in `COMMANDS`: it is given its own parser, declares its arguments, and returns what
is to be run with them. Its docstring is its help. What a command needs is imported when it runs, so that `--help`
costs nothing. Input that is no good is one sentence on stderr and exit code 2; a traceback is a bug of ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["COMMANDS", "main"]

Action = Callable[[argparse.Namespace], None]


def report(parser: argparse.ArgumentParser) -> Action:
    """Show what the cache gave: one HTML page of the runs in these folders."""
    parser.add_argument(
        "folders", metavar="RUN_DIR", nargs="+", type=Path, help="folder of a run, or one above several"
    )
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")
    parser.add_argument("--png", type=Path, help="the same panels as a picture, too (needs matplotlib)")

    def run(arguments: argparse.Namespace) -> None:
        from lightning_stocache.insight.logs import LogError
        from lightning_stocache.insight.report import report

        try:
            left_out = report(arguments.folders, arguments.output, arguments.png)
        except (LogError, ModuleNotFoundError, OSError) as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
        for sentence in left_out:
            sys.stderr.write(f"{parser.prog}: left out: {sentence}\n")
        for path in (arguments.output, arguments.png):
            if path is not None:
                sys.stdout.write(f"{path}\n")

    return run


COMMANDS: tuple[Callable[[argparse.ArgumentParser], Action], ...] = (report,)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        arguments: The command line, without the program's name; None: that of this process.

    Raises:
        SystemExit: With code 2, for arguments or input that are no good.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lightning_stocache", description="Stochastic caching for PyTorch Lightning."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        text = command.__doc__ or ""
        own = commands.add_parser(command.__name__, help=text, description=text)
        own.set_defaults(run=command(own))
    chosen = parser.parse_args(arguments)
    chosen.run(chosen)


if __name__ == "__main__":
    main()
