"""Threads that gather large rows together.

One thread copies 5 to 13 GB/s; memory gives 1.5 to 4 times that. The caller cuts a gather into parts, which it and
the threads take one by one. A thread that gets no core takes no part, and the caller does not wait for it. On busy
cores the caller copies alone: a thread that is interrupted within a part costs more than the others gain (beside other
jobs on two cores 65 ms for 48 batches of 9.6 MB, alone 44). NumPy's `take` holds no lock of the interpreter.

torch's `index_select` would divide the copy among threads of OpenMP. A process that is forked later would then hang at
its own first parallel operation, because libgomp waits there for threads that the fork does not have. So these threads
are Python's. They belong to the process that has started them: a forked child copies with one thread.

The pool is made for the process that trains. DataLoader's workers, which share the cores, have none.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import FileIO

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.placement import Integers
from lightning_stocache.node.group import NodeGroup, job_ranks
from lightning_stocache.node.processes import THREAD_PREFIX

__all__ = ["ALONE", "GatherPool", "gather_threads"]

_MOST_THREADS = 8  # on 16 cores: 5.8 GB/s by one thread, 22.9 by eight
_LEAST_ROW_BYTES = 64 << 10  # two threads gain nothing where rows have 12 KiB
_LEAST_THREAD_BYTES = 4 << 20  # 300 to 800 us of copying: a thread wakes in 40 to 90 us
_PARTS_PER_THREAD = 2  # so that a thread that wakes late, or is interrupted, leaves little to wait for


def gather_threads(group: NodeGroup) -> int:
    """The number of threads that gather in this process: its share of the node's cores, and no more than torch uses.

    Call it on the thread that trains: torch has a number for each thread.

    Args:
        group: the ranks of the job. Before ranks share a cache, all of them are taken to be on this node.
    """
    ranks = len(group.members) if group.world > 1 else job_ranks()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(cores // ranks, torch.get_num_threads(), _MOST_THREADS), 1)


class GatherPool:
    """Threads that copy rows with their caller. They start when they are first needed, and end with `close`.

    One caller at a time.

    Args:
        threads: the number of threads that copy, the caller included.

    Example:
        >>> pool, rows = GatherPool(threads=2), np.arange(64, dtype=np.uint8).repeat(2**16).reshape(64, 2**16)
        >>> memory = np.empty((128, 2**16), dtype=np.uint8)
        >>> pool.take(rows, np.arange(128) % 64, memory)
        >>> memory[62:66, 0].tolist()
        [62, 63, 0, 1]
        >>> pool.close()
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._pid = os.getpid()
        self._executor: ThreadPoolExecutor | None = None
        self._load: FileIO | None = None

    def take(self, rows: npt.NDArray[np.uint8], slots: Integers, memory: npt.NDArray[np.uint8]) -> None:
        """Copy `rows[slots]`, uint8 `[samples, nbytes]`, into contiguous memory of that shape."""
        threads = self.threads
        if threads > 1:
            threads = self._useful_threads(rows.shape[1], memory.nbytes)
        if threads < 2:
            _take(rows, slots, memory)
            return
        step = -(-len(slots) // (threads * _PARTS_PER_THREAD))
        parts = deque(slice(first, first + step) for first in range(0, len(slots), step))

        def copy_parts() -> None:
            with suppress(IndexError):
                while True:
                    part = parts.popleft()
                    _take(rows, slots[part], memory[part])

        helpers = self._start(copy_parts, threads - 1)
        copy_parts()
        for helper in helpers:
            if not helper.cancel():  # it has begun
                helper.result()

    def _useful_threads(self, row_bytes: int, nbytes: int) -> int:
        """The number of threads that a gather of so many bytes is worth at this moment."""
        useful = min(self.threads, nbytes // _LEAST_THREAD_BYTES)
        if useful < 2 or row_bytes < _LEAST_ROW_BYTES or os.getpid() != self._pid:
            return 1
        return min(useful, 1 + self._idle_cores())

    def _idle_cores(self) -> int:
        """Cores of the machine for which there is nothing to run now, in 1 us; all where the system does not tell."""
        cores = os.cpu_count() or 1
        try:
            if self._load is None:
                self._load = open("/proc/loadavg", "rb", buffering=0)  # noqa: SIM115  `close` closes it
            running, _, _ = os.pread(self._load.fileno(), 64, 0).split()[3].partition(b"/")
            return max(cores - int(running), 0)  # this thread runs, too
        except (OSError, ValueError, IndexError):
            return cores

    def _start(self, work: Callable[[], None], count: int) -> list[Future[None]]:
        """Give work to threads. Returns their futures; fewer where the system has no more threads."""
        helpers: list[Future[None]] = []
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.threads - 1, f"{THREAD_PREFIX}gather")
        with suppress(RuntimeError):  # no thread can be started: the system's limit, or the interpreter ends
            for _ in range(count):
                helpers.append(self._executor.submit(work))
        return helpers

    def close(self) -> None:
        """End the threads. A later gather starts new ones."""
        executor, self._executor = self._executor, None
        load, self._load = self._load, None
        if load is not None:
            load.close()
        if executor is not None and os.getpid() == self._pid:
            executor.shutdown()


ALONE = GatherPool()
"""The caller alone copies."""


def _take(rows: npt.NDArray[np.uint8], slots: Integers, memory: npt.NDArray[np.uint8]) -> None:
    # The mode "raise" would copy first, to leave the memory unchanged after an error.
    rows.take(slots, 0, memory, "clip")
