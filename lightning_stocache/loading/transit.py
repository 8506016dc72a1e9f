"""Memory through which samples pass from workers to the main process.

It lies in a memfd where the system has that, not in /dev/shm: that one may be small (Docker's 64 MiB), and what is
left of it belongs to the cache and to torch, which dies of SIGBUS where it finds it full. A memfd is limited by nothing
but the machine's memory and the cgroup's, above which the kernel kills; so these are looked at before any is taken.
"""

from __future__ import annotations

import errno
import os

from lightning_stocache.node.files import Backend, memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.segment import Segment

__all__ = ["transit_memory"]


def transit_memory(size: int) -> Segment:
    """A segment of `size` bytes, all of them reserved.

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
    if size > free.bytes:
        raise OSError(errno.ENOMEM, f"{size} bytes are more than the {free.bytes} that {free.limited_by} leaves")
    segment = Segment.create(size, backend)
    try:
        segment.reserve(0, size)
    except OSError:
        segment.close()
        raise
    return segment
