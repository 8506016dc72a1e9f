"""Memory through which samples pass from workers to the main process.

It lies in a memfd where the system has that, not in /dev/shm: that one may be small (Docker's 64 MiB), and what is
left of it belongs to the cache and to torch, which dies of SIGBUS where it finds it full. A memfd is limited by nothing
but the machine's memory and the cgroup's, above which the kernel kills; so these are looked at before any is taken.
What a cache has been granted but has not filled yet counts as taken: it will be, and it is not asked again.
"""

from __future__ import annotations

import errno
import os

from lightning_stocache.node.files import Backend, memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.segment import Segment

__all__ = ["transit_memory"]


def transit_memory(size: int, promised: int = 0) -> Segment:
    """A segment, all of it reserved.

    Args:
        size: payload bytes.
        promised: bytes that are free now and belong to somebody else.

    Raises:
        OSError: there is no memory for it.

    Example:
        >>> segment = transit_memory(4096)
        >>> segment.size
        4096
        >>> segment.close()
    """
    backend: Backend | None = "memfd" if hasattr(os, "memfd_create") else None
    free = FreeMemory.measure(memory_directory() if backend is None else None)
    if size > free.bytes - promised:
        left = max(free.bytes - promised, 0)
        raise OSError(errno.ENOMEM, f"{size} bytes are more than the {left} that {free.limited_by} leaves")
    segment = Segment.create(size, backend)
    try:
        segment.reserve(0, size)
    except OSError:
        segment.close()
        raise
    return segment
