"""One contract for every way to reach a cache: what was stored is served, by every process, whole or not at all."""

from __future__ import annotations

import os
import pickle
import random
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lightning_stocache.cache.codec import SampleMismatchError
from lightning_stocache.cache.compat import SharedCache
from lightning_stocache.cache.layout import EMPTY
from lightning_stocache.cache.placement import NO_SLOT, Arc, Ring
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import Store
from lightning_stocache.node.files import Backend
from tests.cache.test_claims import holding
from tests.logs import Log
from tests.processes import Child, call, context, without_room
from tests.sources import CountedSource

SOURCE = CountedSource(40, (3, 5, 7))
SPEC = SampleSpec.infer(SOURCE[0])


def made(share: float = 1.0, backend: Backend | None = None) -> Store:
    arc = Ring.cut(len(SOURCE), (1.0,), (round(len(SOURCE) * share),)).arcs[0]
    return Store.create(SPEC, arc, backend)


@pytest.fixture
def cache() -> Iterator[Store]:
    cache = made()
    yield cache
    cache.close()


def gathered(cache: Store, slots: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint8]]:
    """The rows of those slots, in fresh memory."""
    into = [np.empty(len(slots) * nbytes, dtype=np.uint8) for nbytes in cache.codec.row_bytes]
    cache.gather(slots, into)
    return into


def same(one: Any, other: Any) -> bool:
    return torch.equal(one[0], other[0]) and one[1] == other[1] and type(one[1]) is type(other[1])


# --- one contract, however the process was started


def test_a_sample_that_differs_is_refused_even_without_a_slot() -> None:
    """Whether an index happens to have a slot does not decide whether its sample is checked."""
    for share in (0.0, 1.0):
        cache = made(share)
        with pytest.raises(SampleMismatchError, match=r"sample 7: field \[0\] must be"):
            cache.fill(7, (torch.zeros(3, 5, 8, dtype=torch.uint8), 0))
        assert cache.filled == 0
        cache.close()


def test_memory_is_taken_by_what_is_stored_only() -> None:
    """An empty cache holds its states; a stored sample adds its own pages; closing gives all back."""
    spec = SampleSpec.infer(torch.zeros(1 << 20, dtype=torch.uint8))
    cache = Store.create(spec, Arc(64, 64))
    assert cache.memory_bytes <= 2 * 4096
    cache.fill(5, torch.ones(1 << 20, dtype=torch.uint8))
    assert 1 << 20 <= cache.memory_bytes <= (1 << 20) + 3 * 4096
    cache.clear()
    assert cache.memory_bytes <= 2 * 4096
    cache.close()
    assert cache.memory_bytes == 0


@pytest.mark.parametrize("shape", [(3,), (600,), (5000,)])
def test_memory_is_never_more_than_the_slots_may_take(shape: tuple[int, ...]) -> None:
    """Neither the header nor the rest of a page is counted: a budget counts neither."""
    sample = torch.ones(shape, dtype=torch.uint8)
    cache = Store.create(SampleSpec.infer(sample), Arc(7, 7))
    assert cache.memory_bytes <= 7 * cache.codec.slot_bytes
    for index in range(7):
        cache.fill(index, sample)
    assert 7 * sample.numel() <= cache.memory_bytes <= 7 * cache.codec.slot_bytes
    cache.close()


# --- nobody is handed a view


# --- several processes at once


def do(cache: Store, what: str, index: int, value: int) -> Any:
    sample = (torch.full((3, 5, 7), value, dtype=torch.uint8), value)
    if what == "get":
        got = SharedCache.around(cache).get_slot(index)
        return None if got is None else (got[0].unique().tolist(), got[1])
    if what == "clear":
        return cache.clear()
    try:
        return SharedCache.around(cache).set_slot(index, sample, allow_overwrite=what == "overwrite")
    except RuntimeError:
        return "occupied"


@pytest.mark.processes
def test_overwriting_and_clearing_agree_with_a_dict(cache: Store, rng: random.Random) -> None:
    """Sets, overwrites and clears, each by a process drawn at random, leave what they would leave in a dict."""
    plain: dict[int, int] = {}
    with context("forkserver").Pool(2) as pool:
        for _ in range(400):
            what = rng.choices(["get", "set", "overwrite", "clear"], [10, 6, 3, 0.2])[0]
            index, value = rng.randrange(12), rng.randrange(3)
            came = do(cache, what, index, value) if rng.random() < 0.5 else pool.apply(do, (cache, what, index, value))
            if what == "get":
                assert came == (([plain[index]], plain[index]) if index in plain else None)
            elif what == "clear":
                plain.clear()
            elif what == "set" and plain.get(index, value) != value:
                assert came == "occupied"
            else:
                assert came is None
                plain[index] = value
    assert {index: cache.get(index)[1] for index in range(12) if cache.get(index)} == plain  # type: ignore[index]


# --- death and shortage


def encoded(indices: list[int]) -> list[list[memoryview]]:
    return [SPEC.contents(SPEC.encode(SOURCE.expected(index))) for index in indices]


def hold_claim(cache: Store, ready: str) -> None:
    with holding(cache.segment, cache.arc.slot(5)):
        Path(ready).touch()
        time.sleep(300)


@pytest.mark.processes
def test_a_lost_claim_serves_the_sample_unstored(cache: Store, tmp_path: Path) -> None:
    """While another process fills a slot, nobody waits for it; when that one dies, the slot is free."""
    other = Child(hold_claim, cache, str(tmp_path / "ready"))
    while not (tmp_path / "ready").exists():
        time.sleep(0.005)
    assert not cache.fill(5, SOURCE.expected(5))
    assert cache.fill(6, SOURCE.expected(6))
    assert list(cache.put([4, 5, 7], encoded([4, 5, 7]))) == [True, False, True]
    other.kill()
    assert cache.fill(5, SOURCE.expected(5))


MIB = 1 << 20


@contextmanager
def a_minute_later() -> Iterator[None]:
    """The clock of this process shows a minute more, after which what failed is tried again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 60)
        yield


def fill_without_room() -> dict[str, Any]:
    log, cache = Log(), Store.create(SampleSpec.infer(torch.zeros(MIB, dtype=torch.uint8)), Arc(100, 100))
    with open("/dev/shm/other", "wb") as other:
        os.posix_fallocate(other.fileno(), 0, 40 * MIB)

    def sample(index: int) -> torch.Tensor:
        return torch.full((MIB,), index, dtype=torch.uint8)

    contents = [[sample(index).numpy().data] for index in range(100)]
    stored = [index for index, was_stored in enumerate(cache.put(range(100), contents)) if was_stored]
    seen: dict[str, Any] = {"stored": stored}
    SharedCache.around(cache).set_slot(99, sample(99))  # as a user of the ancestor's interface does
    SharedCache.around(cache).set_slot(stored[0], sample(77), allow_overwrite=True)
    seen["overwritten"] = int(cache.get(stored[0]).max())  # type: ignore[union-attr]
    seen["served"] = [index for index in range(100) if cache.get(index) is not None]
    seen["right"] = all(torch.equal(cache.get(index), sample(index)) for index in stored[1:])  # type: ignore[arg-type]
    seen["counted"] = cache.filled, int((SharedCache.around(cache).aux_array == 1).sum())
    seen["in a child"] = call(lambda: cache.fill(98, sample(98)))
    seen["lines"] = list(log.lines)
    os.unlink("/dev/shm/other")
    seen["before the next try"] = cache.fill(98, sample(98))
    with a_minute_later():
        seen["with room again"] = cache.fill(98, sample(98)), int(cache.get(98).max())  # type: ignore[union-attr]
    cache.close()
    return seen


@pytest.mark.processes
def test_without_room_the_cache_stops_growing_and_goes_on() -> None:
    """At ENOSPC a slot stays empty, with one warning; what is stored is served, can be overwritten, and grows later."""
    seen = without_room(fill_without_room)
    assert 20 <= len(seen["stored"]) <= 24
    assert seen["served"] == seen["stored"] == list(range(len(seen["stored"])))
    assert seen["overwritten"] == 77
    assert seen["right"]
    assert seen["counted"] == (len(seen["stored"]), len(seen["stored"]))
    assert seen["in a child"] is False
    assert len(seen["lines"]) == 1
    assert f"stops at {len(seen['stored'])} of 100 samples: no space left in /dev/shm" in seen["lines"][0]
    assert seen["before the next try"] is False
    assert seen["with room again"] == (True, 98)


def warn_elsewhere(cache: Store) -> list[str]:
    log, same = Log(), pickle.loads(pickle.dumps(cache))  # as in a process that has not tried yet
    same.fill(3, torch.ones(MIB, dtype=torch.uint8))
    return log.lines


def look_without_room(create_before: bool) -> tuple[Any, ...]:
    spec, arc = SampleSpec.infer(torch.zeros(MIB, dtype=torch.uint8)), Arc(100_000, 100_000)
    cache = Store.create(spec, arc) if create_before else None
    with open("/dev/shm/other", "wb", buffering=0) as other:
        try:
            while True:
                other.write(bytes(65536))
        except OSError:
            pass
    if cache is None:
        try:
            Store.create(spec, arc)
        except OSError as error:
            return (error.strerror,)
        return ("made",)
    log = Log()
    fills = [cache.fill(index, torch.ones(MIB, dtype=torch.uint8)) for index in (0, 50_000, 99_999)]
    looks = cache.get(70_000), cache.filled, int(cache.lookup(np.arange(100_000)).max())
    elsewhere = call(warn_elsewhere, cache)
    with a_minute_later():
        cache.fill(3, torch.ones(MIB, dtype=torch.uint8))
    try:
        SharedCache.around(cache)[5]
    except OSError as error:
        looks = (*looks, error.strerror)  # type: ignore[assignment]
    cache.clear()
    cache.close()
    return (*fills, *looks, len(log.lines), len(elsewhere))


@pytest.mark.processes
def test_looking_needs_no_room() -> None:
    """In a full /dev/shm empty slots are looked at without SIGBUS, and all processes together warn once."""
    seen = without_room(look_without_room, True, mib=4)
    assert seen == (False, False, False, None, 0, NO_SLOT, "No space left on device", 1, 0)


@pytest.mark.processes
def test_a_cache_that_does_not_fit_at_all_is_an_error_at_once() -> None:
    """Where there is no memory for the states, making the cache raises ENOSPC."""
    assert without_room(look_without_room, False, mib=4) == ("No space left on device",)


# --- life


def test_a_closed_cache_gives_its_memory_back_even_with_a_copy(cache: Store) -> None:
    """A copy that was unpickled in this process drops its own views, whichever of the two is closed first."""
    cache.fill(1, SOURCE.expected(1))
    copy = pickle.loads(pickle.dumps(cache))
    assert same(copy.get(1), SOURCE.expected(1))
    mapped = weakref.ref(cache.segment.memory(0, 1).obj)
    cache.close()
    assert copy.closed
    assert mapped() is not None
    copy.close()
    cache.close()
    assert mapped() is None


@pytest.mark.processes
def test_clear_empties_the_cache_for_everybody(cache: Store) -> None:
    """After clear all slots are EMPTY in every process, read as zeroes, and can be filled again."""
    for index in range(len(SOURCE)):
        cache.fill(index, SOURCE.expected(index))
    call(cache.clear)
    assert cache.filled == 0
    assert cache.get(7) is None
    assert set(cache.layout.states) == {EMPTY}
    assert int(SharedCache.around(cache)[3][0].max()) == 0
    assert cache.fill(7, SOURCE.expected(7))
    assert same(cache.get(7), SOURCE.expected(7))
