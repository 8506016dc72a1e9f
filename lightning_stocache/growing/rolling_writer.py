"""`RollingWriter`: appends samples to a rolling cache from any process of the user's."""

from __future__ import annotations

import logging
from typing import Any

from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.store import StoreHandle
from lightning_stocache.node.processes import poll

__all__ = ["RollingWriter"]

log = logging.getLogger(__name__)


class RollingWriter:
    """Appends samples to a rolling cache that another process of this node has open.

    Args:
        store: the store of the rolling cache.

    Raises:
        OSError: (`attach`) this process cannot reach the cache, or the cache's process has ended; (`append`) there is
            no memory for the very first sample.
        SampleMismatchError: (`append`, rows) a sample differs from the first ones in structure, dtype or shape.

    Example:
        >>> import torch
        >>> from lightning_stocache import RollingCache
        >>> pool = RollingCache(budget="1MiB", spec=torch.zeros(3), minimum=1)
        >>> with RollingWriter.attach(pool.handle) as writer:  # in any process that was sent the handle
        ...     writer.append(torch.tensor([1.0, 2.0, 3.0]))
        >>> pool[0]
        tensor([1., 2., 3.])
        >>> pool.close()
    """

    def __init__(self, store: RollingStore) -> None:
        self._store = store

    @classmethod
    def attach(cls, handle: StoreHandle) -> RollingWriter:
        """Open the cache with this handle. A handle is plain values: send it by a queue, a pipe or a file of yours.

        A cache on a disk can be opened from another container that shares its directory and /dev/shm.
        """
        return cls(RollingStore.attach(handle))

    def append(self, sample: Any, index: int = -1) -> None:
        """Store a sample. When the budget is full, it replaces the oldest sample.

        While the system refuses to store samples (a full disk), they are not stored, with one warning. Nor is a sample
        that is larger than a cache that has stopped growing.

        Args:
            sample: matches the first samples of the cache.
            index: of the sample in its source, for messages, and on a disk for the next job; -1 without one.
        """
        for seconds in poll(pause=0.001):
            if self._store.append(sample, index) is not False or self._store.refuses:
                return
            if seconds:
                words = "all are being written, or a process that writes is stopped"
                log.warning("a RollingWriter has been waiting for a slot for %.0f s: %s", seconds, words)

    def close(self) -> None:
        """Close the cache in this process."""
        self._store.close()

    def __enter__(self) -> RollingWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
