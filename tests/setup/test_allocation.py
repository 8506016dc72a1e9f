"""A node's memory is divided by arithmetic alone: the loaders' batches first, pots in order, their members by size."""

import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Reserve
from lightning_stocache.setup import allocation
from lightning_stocache.setup.allocation import Allocation, allocate, holds_all
from lightning_stocache.setup.request import CacheRequest, LoaderSettings
from lightning_stocache.source.draws import Draws

MIB = 2**20
MARGIN = 64 * MIB
WORKER = 32 * MIB
PLENTY = FreeMemory(2**44, 2**44, None, "/dev/shm")


def divided(
    requests: Sequence[CacheRequest],
    slot_bytes: Sequence[int | None],
    budgets: dict[str, int | str],
    *,
    free: FreeMemory | Callable[[str | None], FreeMemory] = PLENTY,
    ranks: int = 1,
    choice: Any = "auto",
    **more: Any,
) -> Allocation:
    measure = free if callable(free) else lambda directory: free
    samples = [None if size is None else torch.empty(size - 4, dtype=torch.uint8) for size in slot_bytes]
    specs = [None if sample is None else SampleSpec.infer(sample) for sample in samples]  # with the word of a slot
    with mock.patch.object(allocation.FreeMemory, "measure", measure):
        parsed = {pot: Budget.parse(one) for pot, one in budgets.items()}
        return allocate(requests, specs, parsed, ranks, choice, **more)


def request(length: int, pot: str = "", reader: LoaderSettings | None = None) -> CacheRequest:
    return CacheRequest(range(length), pot, reader=reader)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    members=st.lists(st.tuples(st.integers(1, 10**6), st.integers(8, 2**14)), min_size=1, max_size=5),
    budget=st.one_of(st.just("auto"), st.integers(1, 100).map("{}%".format), st.integers(0, 2**40).map("{}B".format)),
    free=st.integers(0, 2**36),
)
def test_a_division_stays_within_every_bound(members: list[tuple[int, int]], budget: str, free: int) -> None:
    """No more than wish, datasets and free memory; slots cost what was granted; shares are alike."""
    lengths, sizes = zip(*members, strict=True)
    whole = sum(length * size for length, size in members)
    got = divided([request(length) for length in lengths], sizes, {"": budget}, free=FreeMemory(None, free, None))
    given_bytes = sum(got.granted)
    assert given_bytes <= min(whole, free, Budget.parse(budget).wanted(whole, free))
    for slots, granted, length, size in zip(got.slots, got.granted, lengths, sizes, strict=True):
        assert 0 <= slots <= length
        assert slots * size <= granted < (slots + 1) * size
        assert abs(slots - length * given_bytes / whole) < 2


def test_pots_are_served_in_order() -> None:
    """What one pot has taken is not free for the next, which says so; a share of free is of what is left."""
    free = FreeMemory(None, MARGIN + 1000, None)
    pots = [request(10, "val"), request(10, "train")]
    got = divided(pots, [100, 100], {"train": "800B", "val": "auto"}, free=free)
    assert (got.slots, got.granted) == ((2, 8), (200, 800))
    [warning] = got.warnings
    assert warning.startswith("the cache (val) has room for 2 of 10 samples")
    pots = [request(100, "train"), request(100, "val")]
    got = divided(pots, [10, 10], {"train": "50% of free", "val": "50% of free"}, free=free)
    assert (got.slots, got.warnings) == ((50, 25), ())
    got = divided([request(10), request(30)], [None, 100], {"": "1500B", "test": "10B"})
    assert (got.slots, got.granted, got.warnings) == ((0, 15), (0, 1500), ())


def test_loaders_are_kept_back() -> None:
    """Each rank's workers, what they load and make ahead, five batches, and what the training takes are not granted."""
    reader = LoaderSettings(10, 2, 4, "fork")
    kept_back = 2 * (5 + 8 + 2) * 960 + 2 * 2 * WORKER + 40_000
    free = FreeMemory(None, MARGIN + kept_back + 50_000, None)
    options: dict[str, Any] = {"free": free, "ranks": 2, "later": Reserve(0, 40_000)}
    assert divided([request(1000, reader=reader)], [100], {"": "auto"}, **options).granted == (50_000 * 512 // 518,)
    requests = [request(10, reader=LoaderSettings(10, workers, 2, "fork")) for workers in (1, 2)]
    got = divided(requests, [100, 100], {"": "auto"}, free=FreeMemory(None, 10 * 2**30, None, own=600 * MIB))
    assert got.keep_free == (300 * MIB + 2 * WORKER + 11 * 960, 300 * MIB + WORKER + 8 * 960)


def docker(directory: str | None) -> FreeMemory:
    """64 MiB of /dev/shm, and a GiB of memory."""
    return FreeMemory(None if directory is None else 64 * MIB, 1024 * MIB, None, directory)


def test_a_memfd_is_taken_where_dev_shm_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under "auto" only, and only if more samples fit; else the warning names what limits it."""
    table: list[tuple[str, str, str | None, int, bool]] = [
        ("auto", "40MiB", None, 40, False),  # /dev/shm is large enough
        ("auto", "100MiB", "memfd", 100, False),
        ("auto", "auto", "memfd", 960, True),  # memory is short, too: 64 MiB margin
        ("auto", "10B", None, 0, True),  # below one sample: a memfd gains nothing
        ("file", "100MiB", "file", 48, True),
        ("memfd", "100MiB", "memfd", 100, False),
    ]
    for choice, budget, backend, slots, limited in table:
        got = divided([request(2000)], [MIB], {"": budget}, free=docker, choice=choice)
        assert (got.backend, got.slots, bool(got.warnings)) == (backend, (slots,), limited)
    monkeypatch.delattr(os, "memfd_create", raising=False)
    got = divided([request(2000)], [MIB], {"": "100MiB"}, free=docker)
    assert (got.backend, got.slots) == (None, (48,))
    assert got.warnings == (
        "the cache has room for 48 of 2,000 samples, 48 MiB of the 100 MiB that budget='100MiB' asks for: limited by "
        f"{memory_directory()} (64 MiB free)",
    )
    [warning] = divided([request(2000, "val")], [MIB], {"val": "1MB"}).warnings
    assert warning.startswith("the cache (val) has room for 0 of 2,000 samples, 976.6 KiB of the 976.6 KiB")
    assert warning.endswith(": less than one sample")


def test_the_budget_of_a_pool_is_divided_into_slots() -> None:
    """As many as fit, and no more than the source has; one sample more than the writers write has to be readable."""
    spec, slot = SampleSpec.infer(torch.zeros(1000, dtype=torch.uint8)), 1016  # with its generation and its time

    def pool(budget: int | str, length: int | None = None, writers: int = 1) -> tuple[int, bool]:
        """The slots of a rolling cache, and whether all of its source has room."""
        draws = Draws(None if length is None else range(length))
        asked = CacheRequest(draws.source, "", draws=draws, writers=writers, as_stream=length is None)
        got = allocate([asked], [spec], {"": Budget.parse(budget)}, 1)
        return got.slots[0], holds_all(asked, spec, got.granted[0])

    assert pool(100 * slot) == (100, False)
    assert pool(100 * slot, length=40) == (40, True)
    assert pool(100 * slot, length=400) == (100, False)
    assert pool("50%", length=400) == (200, False)
    assert pool(1 * slot, length=1, writers=4) == (1, True)
    for budget, writers, words in (
        (5 * slot, 4, "room for 6 samples"),
        (0, 1, "room for"),
        ("auto", 1, "for a stream, got auto"),
    ):
        with pytest.raises(ValueError, match=words):
            pool(budget, writers=writers)
