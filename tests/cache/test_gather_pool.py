"""Gathers by several threads: the same bytes, never in a child, and as many threads as cores are the process's own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_stocache.cache.gather_pool import GatherPool, gather_threads
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.isolation import descriptors
from tests.processes import call

ROW = 64 << 10
ROWS = 130  # 8 MiB and a bit: work for two threads


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with more cores than anything else can use."""
    monkeypatch.setattr(os, "cpu_count", lambda: 10**6)


@pytest.fixture
def pool() -> Iterator[GatherPool]:
    """A pool of two threads."""
    pool = GatherPool(threads=2)
    yield pool
    pool.close()


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen cores, of which torch uses all."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)


class Noted(np.ndarray[Any, Any]):
    """Rows that note which threads copy them. The first copy of each waits until `meeting` has all of them."""

    threads: set[str]
    meeting: threading.Barrier

    @classmethod
    def of(cls, rows: npt.NDArray[np.uint8], parties: int = 1) -> Noted:
        noted = rows.view(cls)
        noted.threads, noted.meeting = set(), threading.Barrier(parties)
        return noted

    def take(self, *args: Any) -> Any:
        name = threading.current_thread().name
        if name not in self.threads:
            self.threads.add(name)
            self.meeting.wait(60)
        return np.asarray(self).take(*args)


class NeverBegun(Future[None]):
    """Work that no thread begins."""

    def result(self, timeout: float | None = None) -> None:
        raise AssertionError("the caller would wait for ever")


def noise(rows: int, row_bytes: int = ROW) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (rows, row_bytes), dtype=np.uint8)


@pytest.mark.parametrize(
    ("rows", "samples", "row_bytes", "threads"),
    [(40, 128, ROW, 2), (40, 197, ROW + 7, 3), (3, 263, 2 * ROW, 8), (70, 150, 3 * ROW, 7), (5, 3, 5 << 20, 4)],
)
def test_several_threads_copy_what_one_copies(rows: int, samples: int, row_bytes: int, threads: int) -> None:
    """Whatever the number of threads, and whether or not it divides the samples."""
    pool = GatherPool(threads)
    source = noise(rows, row_bytes)
    slots = np.random.default_rng(1).integers(0, rows, samples)
    memory = np.zeros((samples, row_bytes), dtype=np.uint8)
    for _ in range(3):
        memory[:] = 0
        pool.take(source, slots, memory)
        assert np.array_equal(memory, source[slots])
    pool.close()


def test_large_rows_are_copied_by_two_threads_at_once(pool: GatherPool) -> None:
    """The caller is one of them; the other one is the package's own."""
    rows = Noted.of(noise(ROWS), parties=2)
    pool.take(rows, np.arange(ROWS), np.empty((ROWS, ROW), dtype=np.uint8))
    here, other = sorted(rows.threads, key=lambda name: name.startswith("stocache-"))
    assert here == threading.current_thread().name
    assert other.startswith("stocache-gather")


@pytest.mark.parametrize(("samples", "row_bytes"), [(200, ROW - 1), (127, ROW), (1, ROW)])
def test_small_gathers_are_left_to_the_caller(pool: GatherPool, samples: int, row_bytes: int) -> None:
    """Small rows, and few large ones: to wake a thread would take as long as the copy."""
    rows = Noted.of(noise(4, row_bytes))
    pool.take(rows, np.zeros(samples, dtype=np.int64), np.empty((samples, row_bytes), dtype=np.uint8))
    assert rows.threads == {threading.current_thread().name}


def test_busy_cores_are_left_alone(pool: GatherPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is something to run for each core, the caller copies alone."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    rows = Noted.of(noise(ROWS))
    pool.take(rows, np.arange(ROWS), np.empty((ROWS, ROW), dtype=np.uint8))
    assert rows.threads == {threading.current_thread().name}


def test_a_thread_that_gets_no_core_is_not_waited_for(pool: GatherPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller copies its parts, too."""
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda self, work: NeverBegun())
    rows, memory = noise(ROWS), np.zeros((ROWS, ROW), dtype=np.uint8)
    pool.take(rows, np.arange(ROWS), memory)
    assert np.array_equal(memory, rows)


def test_a_gather_needs_no_thread_that_the_system_refuses(pool: GatherPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of processes no thread starts: the caller copies alone."""

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    rows, memory = noise(ROWS), np.zeros((ROWS, ROW), dtype=np.uint8)
    pool.take(rows, np.arange(ROWS), memory)
    assert np.array_equal(memory, rows)


def test_the_threads_end_with_the_pool(pool: GatherPool) -> None:
    """And start again for a later gather. No descriptor stays open."""
    rows, memory = noise(ROWS), np.zeros((ROWS, ROW), dtype=np.uint8)
    before = descriptors()
    for _ in range(2):
        pool.take(rows, np.arange(ROWS), memory)
        assert any(thread.name.startswith("stocache-gather") for thread in threading.enumerate())
        pool.close()
        assert not any(thread.name.startswith("stocache-gather") for thread in threading.enumerate())
        assert descriptors() == before


@pytest.mark.processes
def test_a_forked_child_gathers_alone_and_can_compute_in_parallel(pool: GatherPool) -> None:
    """Its parent's threads are not there. Neither the pool nor OpenMP waits for them."""
    rows, memory = noise(ROWS), np.zeros((ROWS, ROW), dtype=np.uint8)
    pool.take(rows, np.arange(ROWS), memory)

    def child() -> None:
        torch.set_num_threads(2)
        noted = Noted.of(rows)
        for _ in range(3):  # the first may count on a thread of the parent's that looks idle
            memory[:] = 0
            pool.take(noted, np.arange(ROWS), memory)
            assert np.array_equal(memory, rows)
        assert noted.threads == {threading.current_thread().name}
        assert not any(thread.name.startswith("stocache-gather") for thread in threading.enumerate())
        torch.ones(1 << 20).sin().sum()
        pool.close()

    call(child)


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, 8), (2, 8), (3, 5), (8, 2), (16, 1), (40, 1)], ids=lambda number: str(number)
)
@pytest.mark.usefixtures("cores")
def test_a_rank_takes_its_share_of_the_cores(ranks: int, expected: int) -> None:
    """At most eight threads, at least one. Ranks on other nodes have cores of their own."""
    node, other = tuple(range(ranks)), tuple(range(ranks, 2 * ranks))
    assert gather_threads(NodeGroup(rank=0, nodes=(node, other))) == expected


@pytest.mark.usefixtures("cores")
def test_ranks_that_share_no_cache_yet_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's variables tell how many there are."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert gather_threads(NodeGroup()) == 4


@pytest.mark.usefixtures("cores")
def test_torch_limits_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.set_num_threads`, and OMP_NUM_THREADS, which torchrun sets to one."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert gather_threads(NodeGroup()) == 3


class Threads(Dataset[int]):
    """The number of threads that would gather in the process that loads."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return gather_threads(NodeGroup())


@pytest.mark.processes
def test_a_worker_gathers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers share the cores already: torch gives each of them one thread."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert list(DataLoader(Threads(), batch_size=None, num_workers=1)) == [1, 1]
