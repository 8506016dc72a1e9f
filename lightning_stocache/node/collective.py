"""One collective over gloo, whose end leaves nothing to do for gloo's threads.

A thread of gloo lets go of a work some time after the work has ended. If it is the last to do so, it frees the tensors,
for which it takes Python's lock. A process that is forked in the moment in which a thread of C++ asks for that lock
waits for ever in CPython 3.11 and before: there the fork renews the lock of the list of threads too late. And what
comes after our collectives is a fork, of the look's process or of the loader's workers. So the works are kept here
for longer than any thread takes to let go of them, and freed by the thread that starts the next ones.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["KEPT_SECONDS", "all_gather"]

KEPT_SECONDS = 30.0  # after the end of a work: a thread takes moments

# The works of each group, and when each was last seen running. They end with their group.
_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, list[tuple[float, dist.Work]]] = weakref.WeakKeyDictionary()


def all_gather(message: torch.Tensor, group: dist.ProcessGroup) -> tuple[Sequence[torch.Tensor], dist.Work]:
    """Begin to send a tensor to every rank of a gloo group, and to receive theirs.

    Args:
        message: of the same shape and dtype on each rank.
        group: whose ranks take part; each makes the same calls in the same order.

    Returns:
        Every rank's tensor, by rank, and the work that is to be waited for until they are there.
    """
    messages = [torch.empty_like(message) for _ in range(group.size())]
    work = dist.all_gather(messages, message, group=group, async_op=True)
    assert work is not None  # this rank is in the group
    now = time.monotonic()
    running = [(seen if old.is_completed() else now, old) for seen, old in _kept.get(group, [])]
    _kept[group] = [(seen, old) for seen, old in running if now - seen < KEPT_SECONDS] + [(now, work)]
    return messages, work
