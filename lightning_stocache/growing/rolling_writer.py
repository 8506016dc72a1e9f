"""The way into a rolling cache for processes of the user's own."""

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
        store: where they go.

    Raises:
        OSError: (`attach`) the cache cannot be reached from here, or its process has ended; (`append`) there is no
            memory for a single sample.
        SampleMismatchError: (`append`, rows) a sample differs from the first ones in structure, dtype or shape.

    Example:
        >>> import torch
        >>> from lightning_stocache import RollingCache, SampleSpec
        >>> pool = RollingCache(budget="1MiB", spec=SampleSpec.infer(torch.zeros(3)), minimum=1)
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
        """Open the cache that has this handle, which is plain values: send it by a queue, a pipe or a file of yours."""
        return cls(RollingStore.attach(handle))

    def append(self, sample: Any, index: int = -1) -> None:
        """Store a sample, in the place of the oldest once the budget is full; `index`: in its source, for messages."""
        for seconds in poll(pause=0.001):
            if self._store.append(sample, index):
                return
            if seconds:
                words = "all are being written, or a process that writes is stopped"
                log.warning("a RollingWriter has been waiting for a slot for %.0f s: %s", seconds, words)

    def close(self) -> None:
        """Give the cache up in this process."""
        self._store.close()

    def __enter__(self) -> RollingWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
