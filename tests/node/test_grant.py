"""A grant stays below what is free, now and when workers, batches and the training have come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.node.budget import Budget
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Grant, Reserve, grant, loader_reserve, margin

MIB, GIB = 2**20, 2**30
AUTO = Budget.parse("auto")


AMPLE = FreeMemory(32 * GIB, 32 * GIB, None, "/dev/shm")
TIGHT = FreeMemory(12 * GIB, 20 * GIB, 220 * MIB, "/dev/shm", own=480 * MIB)


@pytest.mark.parametrize(
    ("budget", "dataset", "free", "reserve", "granted"),
    [
        ("8GiB", 20 * GIB, AMPLE, Reserve(GIB), Grant(8 * GIB, 8 * GIB, None)),
        ("8GiB", GIB, AMPLE, Reserve(), Grant(GIB, 8 * GIB, None)),
        ("8GiB", GIB, FreeMemory(4 * GIB, None, None), Reserve(), Grant(GIB, 8 * GIB, None)),
        ("auto", 400 * GIB, FreeMemory(None, 500 * GIB, 100 * GIB), Reserve(), 98 * GIB),
        ("auto", GIB, TIGHT, Reserve(private=64 * MIB), 0),
        ("auto", GIB, FreeMemory(None, None, None), Reserve(), Grant(0, GIB, "memory that cannot be measured here")),
        (
            "50% of free",
            400 * GIB,
            FreeMemory(None, 100 * GIB, None),
            Reserve(8 * GIB),
            Grant(45 * GIB, 45 * GIB, None),
        ),
    ],
)
def test_grant(budget, dataset, free, reserve, granted):
    """With enough memory a budget gets what it asks for, and no more than the dataset, which is no shortage. Below a
    cgroup's limit two percent are kept back; where the training needs all that is left there is no cache. A share of
    free memory is one of what is left after reserve and margin, so nothing limits it."""
    got = grant(Budget.parse(budget), dataset, free, reserve)
    assert (got if isinstance(granted, Grant) else got.bytes) == granted


def test_grant_in_a_small_dev_shm():
    """In Docker's 64 MiB /dev/shm batches and 16 MiB are kept back, not what lies elsewhere, and the limit is named."""
    free = FreeMemory(64 * MIB, 32 * GIB, None, "/dev/shm")
    reserve = Reserve(files=8 * MIB, private=2 * GIB, readers=9)
    assert grant(AUTO, GIB, free, reserve) == Grant(40 * MIB, GIB, "/dev/shm (64 MiB free)")


def test_all_that_is_to_come_is_kept_back():
    """Batches, processes, and as much again as the trainers hold already; the words say how much that is."""
    free = FreeMemory(None, 500 * GIB, 10 * GIB, own=512 * MIB)
    given_ = grant(AUTO, 400 * GIB, free, Reserve(files=GIB, private=2 * GIB), ranks=2)
    assert given_.bytes == 6 * GIB
    assert given_.limited_by == "the cgroup's memory limit (10 GiB free, 4 GiB kept for the training)"


@given(
    budget=st.one_of(
        st.integers(0, 2**45), st.sampled_from(["auto", "60%", "60% of free", "100% of free", "8GiB", "0"])
    ).map(Budget.parse),
    dataset=st.integers(0, 2**45),
    limits=st.tuples(*[st.none() | st.integers(0, 2**45)] * 3),
    own=st.integers(0, 2**34),
    reserve=st.builds(Reserve, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 1000)),
)
def test_grant_is_within_every_bound(budget, dataset, limits, own, reserve):
    """A grant is never negative or above wish, dataset and safely free memory, and it says when memory was short."""
    free = FreeMemory(*limits, own=own)
    given_ = grant(budget, dataset, free, reserve)
    assert 0 <= given_.bytes <= min(given_.wanted, dataset)
    filesystem, *memory = limits
    if given_.bytes and filesystem is not None:
        assert given_.bytes <= filesystem - reserve.files - 16 * MIB
    for limit in memory:
        if given_.bytes and limit is not None:
            tables = given_.bytes * reserve.readers // 512
            assert given_.bytes + tables <= limit - reserve.bytes - max(64 * MIB, own)
    assert (given_.limited_by is not None) == (given_.bytes < min(given_.wanted, dataset))


@pytest.mark.parametrize(
    ("free", "ranks", "expected"),
    [
        (FreeMemory(None, 20 * GIB, None), 8, 20 * GIB // 50),
        (FreeMemory(None, GIB, None), 8, 64 * MIB),
        (FreeMemory(None, 20 * GIB, None, own=500 * MIB), 2, 1000 * MIB),
        (FreeMemory(10 * GIB, None, None), 1, 64 * MIB),
    ],
)
def test_margin(free, ranks, expected):
    """Two percent of memory, what the trainers hold, or 64 MiB: the largest."""
    assert margin(free, ranks) == expected


@pytest.mark.parametrize(
    ("num_workers", "prefetch_factor", "ranks", "batches"),
    [(0, None, 1, 5), (0, None, 4, 20), (4, None, 1, 13), (4, 2, 1, 13), (4, 5, 2, 50), (4, 2, 0, 0)],
)
def test_batches_of_a_loader(num_workers, prefetch_factor, ranks, batches):
    """Files hold the batches that workers make ahead and five more, per rank. Every process reads the cache."""
    reserve = loader_reserve(1000, num_workers, prefetch_factor, ranks, start_method="fork")
    assert reserve.files == batches * 1000
    assert reserve.private == ranks * num_workers * (32 * MIB + 1000)
    assert reserve.readers == ranks * (num_workers + 1)


@pytest.mark.parametrize(
    ("method", "own", "expected"),
    [("fork", GIB, 32 * MIB), ("spawn", GIB, GIB), ("forkserver", GIB, GIB), ("spawn", 0, 32 * MIB)],
)
def test_memory_of_a_worker(method, own, expected):
    """A forked worker shares most pages with the trainer; any other worker takes as much memory as the trainer."""
    assert loader_reserve(0, 1, None, 1, start_method=method, own=own).private == expected


def test_reserves_add_up():
    """The reserve of two loaders is the sum of their reserves."""
    assert Reserve(1, 2, 3) + Reserve(10, 20, 30) == Reserve(11, 22, 33)
    assert Reserve(1, 2, 3).bytes == 3
