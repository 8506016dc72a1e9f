"""One gathering over gloo, which leaves gloo's threads nothing to free.

A thread of gloo lets go of a work some time after the work has ended. If it is the last to do so, it frees the work's
tensors, and takes Python's lock for that. Until CPython 3.12 a process that is forked while a thread of C++ asks for
that lock may wait for ever: the child takes the mutex of the interpreter's threads (HEAD_LOCK, in
`_PyEval_ReInitThreads`) before it has been made anew. And what comes after the gatherings of this package is a fork, of
a process that looks at a source or of the loader's workers. So a work is kept for longer than any thread takes to let
go of it, and is freed by the thread that gathers next. The memory of its messages is given back at once.
"""

from __future__ import annotations

import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["KEPT_SECONDS", "Gathering"]

KEPT_SECONDS = 30.0  # after the end of a work has been seen: a thread takes moments

# The works of each group, and when each was first seen to have ended. They end with their group.
_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, list[tuple[float | None, dist.Work]]] = weakref.WeakKeyDictionary()


class Gathering:
    """As many bytes of every rank, under way to all ranks. Every rank begins the same gatherings in the same order.

    Args:
        content: of this rank, of the same length on each.
        group: a group of gloo whose ranks take part.
    """

    def __init__(self, content: bytes, group: dist.ProcessGroup) -> None:
        # On the CPU, whatever the user's default device is; all of it memory of torch's, which can be given back.
        self._message = torch.empty(len(content), dtype=torch.uint8, device="cpu")
        self._message.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self._messages = [torch.empty_like(self._message) for _ in range(group.size())]
        work = dist.all_gather(self._messages, self._message, group=group, async_op=True)
        assert work is not None  # this rank is in the group
        self._work = work
        self._contents: list[bytes] | None = None
        _keep(work, group)

    def wait(self, timeout: timedelta | None = None) -> list[bytes]:
        """Every rank's bytes, by rank.

        Args:
            timeout: None: that of the group. After one that was too short, it may be called again.

        Raises:
            RuntimeError: the time is over, or a rank has ended.
        """
        if self._contents is None:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timeout)
            self._contents = [message.clone().numpy().tobytes() for message in self._messages]
            for message in (self._message, *self._messages):  # NumPy would have fixed their size
                message.untyped_storage().resize_(0)
        return self._contents


def _keep(work: dist.Work, group: dist.ProcessGroup) -> None:
    now = time.monotonic()
    seen = [(now if ended is None and old.is_completed() else ended, old) for ended, old in _kept.get(group, [])]
    recent = [(ended, old) for ended, old in seen if ended is None or now - ended < KEPT_SECONDS]
    _kept[group] = [*recent, (None, work)]
