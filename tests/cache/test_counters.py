"""Every process counts on a row of its own; sums are exact whatever is forked or killed."""

from collections.abc import Iterator
from typing import Any

import pytest

from lightning_stocache.cache.counters import Counters, Counts
from tests.processes import Child, call, call_many, hanging, take_all_of

ROWS = 1024


@pytest.fixture
def counters() -> Iterator[Counters]:
    counters = Counters.create()
    yield counters
    counters.close()


def count(counters: Counters, times: int, rank: int = 0) -> None:
    counters.rank = rank
    for _ in range(times):
        counters.add(hits=1, bytes_from_cache=10)


def rows_in_use(counters: Counters) -> int:
    numbers = counters.segment.memory(0, counters.segment.size).cast("Q")
    return sum(numbers[row] != 0 for row in range(0, len(numbers), 16))


@pytest.mark.processes
def test_no_count_is_lost(counters: Counters, crowd: Any) -> None:
    """Many processes that count at the same time, this one among them, add up exactly, per rank and together."""
    count(counters, 1)
    worker = Child(count, counters, 2000, 1, method="forkserver")
    crowd(lambda number: count(counters, 200, number % 4), method="fork")
    count(counters, 2000)
    worker.result()
    assert [counters.totals(rank).hits for rank in range(5)] == [3601, 3600, 1600, 1600, 0]
    assert counters.totals() == Counts(hits=10_401, bytes_from_cache=104_010)


@pytest.mark.processes
def test_what_a_killed_process_counted_stays(counters: Counters) -> None:
    """The next process of that rank goes on in the same row, behind a gap that another one has left. When living
    processes have all rows, the others go on uncounted; after close, nothing is counted."""
    assert counters.segment.lock(0)  # as a process does that is about to mark row 0
    with hanging(count, counters, 7):
        count(counters, 1)
        assert rows_in_use(counters) == 2
    call(count, counters, 5)
    assert counters.totals().hits == 13
    assert rows_in_use(counters) == 2
    assert all(counters.segment.lock(row) for row in range(ROWS))
    call(count, counters, 1)
    assert counters.totals().hits == 13
    counters.close()
    counters.add(hits=1)
    assert counters.totals() == Counts()


def count_without_room() -> int:
    counters = Counters.create()
    take_all_of("/dev/shm")
    count(counters, 5)
    call_many(count, [(counters, 5)] * 3)
    return counters.totals().hits


@pytest.mark.processes
def test_counting_needs_no_more_memory(small_shm: Any) -> None:
    """Where /dev/shm is full, processes go on counting: their rows were promised when the counters were made."""
    assert small_shm(count_without_room, mib=2) == 20
