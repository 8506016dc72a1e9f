"""One gathering over gloo, which leaves gloo's threads nothing to free.

A thread of gloo lets go of a work some time after the work has ended. If it is the last to do so, it frees the work's
tensors, and takes Python's lock for that. Until CPython 3.12 a process that is forked while a thread of C++ asks for
that lock may wait for ever: the child takes the mutex of the interpreter's threads (HEAD_LOCK, in
`_PyEval_ReInitThreads`) before it has been made anew. And what comes after the gatherings of this package is a fork, of
a process that looks at a source or of the loader's workers. So a work is kept for longer than any thread takes to let
go of it, and is freed by a thread that gathers later. The memory of its messages is given back at once.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["KEPT_SECONDS", "Gathering"]

KEPT_SECONDS = 30.0  # after the end of a work has been seen: a thread takes moments


@dataclass
class _Kept:
    """The works of a group.

    Args:
        turned: when it was last seen which of them had ended.
        ended: that had by then.
        others: that had not, or have begun since.
    """

    turned: float
    ended: list[dist.Work] = field(default_factory=list)
    others: list[dist.Work] = field(default_factory=list)


_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, _Kept] = weakref.WeakKeyDictionary()  # they end with their group


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
        _keep(work, group)
        self._work: dist.Work | None = work
        self._contents: list[bytes] = []

    def wait(self, timeout: timedelta | None = None) -> list[bytes]:
        """Every rank's bytes, by rank.

        Args:
            timeout: None: that of the group. After one that was too short, it may be called again.

        Raises:
            RuntimeError: the time is over, or a rank has ended.
        """
        if self._work is not None:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timeout)
            self._work = None  # it would hold the group's connections
            self._contents = [message.clone().numpy().tobytes() for message in self._messages]
            for message in (self._message, *self._messages):  # NumPy would have fixed their size
                message.untyped_storage().resize_(0)
        return self._contents


def _keep(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Keep it for once to twice the time after its end, if others follow; else until the group's end."""
    now = time.monotonic()
    kept = _kept.setdefault(group, _Kept(now))
    if now - kept.turned >= KEPT_SECONDS:
        ended, running = list[dist.Work](), list[dist.Work]()
        for other in kept.others:
            (ended if other.is_completed() else running).append(other)
        kept.turned, kept.ended, kept.others = now, ended, running
    kept.others.append(work)
