"""Processes of ours that end with the process that has started them, however that ends.

A process that is killed tells nobody. Its children are given another parent, though, so who looks at its parent's id
now and then knows. Under forkserver the parent is the server, which ends with the process that uses it.

One that is not forked is sent what it works with as a pickle: `not_sent` says to people that something cannot be. It
imports what it is sent, and ends at once where it cannot: `why_not_begun` says that.
"""

from __future__ import annotations

import os
import signal
import threading
import time

__all__ = ["end_with_parent", "not_sent", "why_not_begun"]

_LOOK_SECONDS = 0.5
_FORK = 'say multiprocessing_context="fork" (Linux\'s default until Python 3.13)'


def end_with_parent() -> None:
    """Have a thread end this process when its parent has ended, also in the middle of a load."""
    threading.Thread(target=_end_without, args=(os.getppid(),), daemon=True).start()


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def why_not_begun(method: str) -> str:
    """What may have ended a process before it did anything, in words; empty where it was forked.

    Args:
        method: how it was started.

    Example:
        >>> why_not_begun("fork")
        ''
        >>> why_not_begun("spawn").partition(":")[0]
        "A process that is started by 'spawn' imports what it is sent"
    """
    if method == "fork":
        return ""
    return (
        f"A process that is started by {method!r} imports what it is sent: it finds no class or function that a "
        'notebook\'s cell has made, and runs a script again that has no `if __name__ == "__main__":`. Move them into '
        f"a module, or {_FORK}"
    )


def not_sent(method: str, error: Exception) -> str:
    """Why a source cannot be sent to a process, in words.

    Args:
        method: how it is started.
        error: what sending has raised.
    """
    return (
        f"the source cannot be sent to a process that is started by {method!r} ({type(error).__name__}: {error}). Make "
        f"it of what can be pickled (no lambda, local class, generator or open file; at most 200 tensors), or "
        f"{_FORK}"
    )
