"""Every process counts on a row of its own; sums are exact whatever is forked or killed."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.cache.counters import Counters, Counts
from tests.processes import Child, call, call_many, hanging, take_all_of_dev_shm, without_room

ROWS = 1024


@pytest.fixture
def counters() -> Iterator[Counters]:
    counters = Counters.create()
    yield counters
    counters.close()


def count(counters: Counters, times: int, rank: int | None = None) -> None:
    if rank is not None:
        counters.rank = rank
    for _ in range(times):
        counters.add(hits=1, bytes_from_cache=10)


def rows_in_use(counters: Counters) -> int:
    numbers = counters.segment.memory(0, counters.segment.size).cast("Q")
    return sum(numbers[row] != 0 for row in range(0, len(numbers), 16))


numbers = st.builds(Counts, *[st.integers(0, 2**40)] * 7)


@given(one=numbers, other=numbers)
def test_counts_add_and_subtract(one: Counts, other: Counts) -> None:
    """What an epoch counted is the difference of two sums, number by number."""
    assert (one + other) - other == one
    assert (one + other).served == one.served + other.served
    assert one.served == one.hits + one.misses + one.bypasses
    assert Counts(*one.values()) == one


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_no_count_is_lost(counters: Counters, method: str) -> None:
    """Processes that count at the same time, this one among them, add up exactly."""
    count(counters, 1)
    workers = [Child(count, counters, 2000, method=method) for _ in range(4)]
    count(counters, 2000)
    for worker in workers:
        worker.result()
    assert counters.totals() == Counts(hits=5 * 2000 + 1, bytes_from_cache=10 * (5 * 2000 + 1))


@pytest.mark.processes
def test_ranks_are_told_apart(counters: Counters) -> None:
    """Each rank's own rows sum up by themselves, and together they are all."""
    call_many(count, [(counters, 10 * (rank + 1), rank) for rank in (0, 1, 2, 1)])
    assert [counters.totals(rank).hits for rank in range(4)] == [10, 40, 30, 0]
    assert counters.totals().hits == 80


@pytest.mark.processes
def test_what_a_killed_process_counted_stays(counters: Counters) -> None:
    """SIGKILL takes no count away, and the next process of that rank goes on in the same row."""
    with hanging(count, counters, 7):
        pass
    assert counters.totals().hits == 7
    call(count, counters, 5)
    assert counters.totals().hits == 12
    assert rows_in_use(counters) == 1


@pytest.mark.processes
def test_a_row_that_nobody_has_marked_hides_no_other(counters: Counters) -> None:
    """A process that dies between its row's lock and its mark leaves a gap, behind which rows are still summed."""
    holder = counters.segment
    assert holder.lock(0)  # as a process does that is about to mark row 0
    call(count, counters, 4)
    assert counters.totals().hits == 4


@pytest.mark.processes
def test_a_forked_child_takes_a_row_of_its_own(counters: Counters) -> None:
    """A child that was forked after its parent counted does not share the parent's row."""
    count(counters, 1)
    call(count, counters, 1)
    assert rows_in_use(counters) == 2
    assert counters.totals().hits == 2


def test_closed_counters_count_nothing(counters: Counters) -> None:
    """After close, counting goes nowhere and nothing fails: off means off."""
    counters.add(hits=1)
    counters.close()
    counters.close()
    counters.add(hits=1)
    assert counters.totals() == Counts()


def count_without_room() -> int:
    counters = Counters.create()
    take_all_of_dev_shm()
    count(counters, 5)
    call_many(count, [(counters, 5)] * 3)
    return counters.totals().hits


@pytest.mark.processes
def test_counting_needs_no_more_memory() -> None:
    """Where /dev/shm is full, processes go on counting: their rows were promised when the counters were made."""
    assert without_room(count_without_room, mib=2) == 20


@pytest.mark.processes
def test_more_processes_than_rows_count_nothing(counters: Counters) -> None:
    """When all rows are taken by living processes the others go on uncounted."""
    count(counters, 1)
    for row in range(ROWS):
        assert counters.segment.lock(row)  # as the processes do that have them
    call(count, counters, 1)
    assert counters.totals().hits == 1
