"""Processes of ours that end with the process that has started them, however that ends.

A process that is killed tells nobody. Its children are given another parent, though, so who looks at its parent's id
now and then knows. Under forkserver the parent is the server, which ends with the process that uses it.
"""

from __future__ import annotations

import os
import signal
import threading
import time

__all__ = ["end_with_parent"]

_LOOK_SECONDS = 0.5


def end_with_parent() -> None:
    """Have a thread end this process when its parent has ended, also in the middle of a load."""
    threading.Thread(target=_end_without, args=(os.getppid(),), daemon=True).start()


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
