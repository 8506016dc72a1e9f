"""Stored samples can be invalidated: no call that begins afterwards returns one, in any process, torn or whole."""

import mmap
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import NO_SLOT, UNREADABLE, Store
from lightning_stocache.node import segment as segment_module
from tests.odds import stop
from tests.processes import Child, call, hanging, wait_until

SAMPLES = 24
ALL = np.arange(SAMPLES)
NUMBERS = 600  # of a sample, so that a copy can meet a write


def sample(index: int, version: int) -> torch.Tensor:
    """What an index gives in a version: one can see which, and whether it is whole."""
    return torch.arange(NUMBERS) * (index + 1) + 1000 * version


def version_in(index: int, found: torch.Tensor) -> int:
    """The version of a sample, which is whole."""
    version = int(found[0]) // 1000
    assert torch.equal(found, sample(index, version)), "torn"
    return version


@pytest.fixture(params=["rows", "records", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Store]:
    codec = RecordCodec.infer([sample(0, 0)]) if request.param == "records" else SampleSpec.infer(sample(0, 0))
    directory = str(tmp_path) if request.param == "disk" else None
    store = Store.create(codec, Arc(SAMPLES, SAMPLES), granted=SAMPLES * 8 * NUMBERS * 3 // 2, directory=directory)
    yield store
    store.close()


def contents(store: Store, indices: Any, version: int) -> list[Any]:
    return [store.codec.contents(store.codec.encode(sample(int(index), version))) for index in indices]


def put(store: Store, indices: Any, version: int, seen: int | None = None) -> list[bool | None]:
    return store.put([int(index) for index in indices], contents(store, indices, version), seen)


def versions(store: Store) -> dict[int, int]:
    places = store.lookup(ALL)
    found = ALL[places != NO_SLOT].tolist()
    read = store.read(places[places != NO_SLOT])
    return {index: version_in(index, torch.as_tensor(sample)) for index, sample in zip(found, read, strict=True)}


def test_what_is_invalidated_is_stored_anew(store: Store) -> None:
    """The other samples stay; indices without a slot do no harm; all of them, again and again, find room."""
    put(store, ALL, 1)
    assert store.invalidate(np.array([2, 5, 99, -1]))
    assert versions(store) == {int(index): 1 for index in ALL if index not in (2, 5)}
    assert (store.filled, store.full) == (SAMPLES - 2, False)
    for version in range(2, 9):
        assert store.invalidate()
        assert versions(store) == {}
        assert put(store, ALL, version) == [True] * SAMPLES
    assert store.full
    assert set(versions(store).values()) == {8}


def test_what_was_looked_up_before_is_not_stored(store: Store) -> None:
    """Nor is what was claimed before it, and written meanwhile. The slots are free afterwards."""
    before = store.changes
    assert store.invalidate(ALL[:1])
    assert put(store, ALL[:3], 1, before) == [None] * 3 or versions(store) == {}
    assert versions(store) == {}

    layout_write = store.layout.write

    def late(*args: Any) -> Any:
        written = layout_write(*args)
        store.invalidate(ALL[10:])
        return written

    now = store.changes
    store.layout.write = late  # type: ignore[method-assign]
    put(store, ALL[:3], 1, now)
    del store.layout.write
    assert versions(store) == {}
    assert put(store, ALL[:3], 2, store.changes) == [True] * 3
    assert versions(store) == {0: 2, 1: 2, 2: 2}


def records_of_many_sizes(directory: str | None) -> tuple[Store, random.Random]:
    dice = random.Random(1)
    codec = RecordCodec.infer([of_any_size(dice, 0)])
    return Store.create(codec, Arc(SAMPLES, SAMPLES), granted=(SAMPLES + 1) * 8 * NUMBERS, directory=directory), dice


def of_any_size(dice: random.Random, index: int) -> torch.Tensor:
    return torch.full((dice.randint(NUMBERS // 2, NUMBERS),), index)


def store_all(store: Store, dice: random.Random) -> None:
    """As an epoch does: what is stored is whole, and what is missing is stored if it finds room."""
    for index in ALL.tolist():
        found = store.get(index)
        assert found is None or set(found.tolist()) == {index}
        if found is None:
            store.fill(index, of_any_size(dice, index))


@pytest.mark.parametrize("count", [SAMPLES // 4, SAMPLES])
@pytest.mark.parametrize("on_disk", [False, True])
def test_lost_room_of_records_is_used_again(on_disk: bool, count: int, tmp_path: Any) -> None:
    """However often samples change, and whatever their new sizes, the run does not fill with room of nobody."""
    store, dice = records_of_many_sizes(str(tmp_path) if on_disk else None)
    filled = []
    for _ in range(60):
        store_all(store, dice)
        filled.append(store.filled)
        assert store.invalidate(np.array(dice.sample(range(SAMPLES), count)))
    assert min(filled) >= SAMPLES / 2
    assert np.mean(filled[20:]) >= SAMPLES * 3 / 4
    store.close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_record_that_finds_no_room_gives_up_the_room_of_its_slot(on_disk: bool, tmp_path: Any) -> None:
    """It is larger than that. The next change finds the room lost, and begins the run anew."""
    store, _ = records_of_many_sizes(str(tmp_path) if on_disk else None)
    for numbers, changed in ((NUMBERS - 10, ALL[::2]), (NUMBERS, ALL[:1])):
        for index in ALL.tolist():
            store.fill(index, torch.full((numbers,), index))
        assert store.invalidate(changed)
    assert store.filled == 0
    assert [store.fill(index, torch.full((NUMBERS,), index)) for index in ALL.tolist()] == [True] * SAMPLES
    store.close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_no_room_is_used_again_while_a_record_is_written(on_disk: bool, tmp_path: Any) -> None:
    """Its writer has taken room, and writes without the turn. The next change begins the run anew."""
    store, _ = records_of_many_sizes(str(tmp_path) if on_disk else None)
    for index in ALL.tolist():
        store.fill(index, torch.full((NUMBERS,), index))
    assert store.invalidate(ALL[1:])
    for index in ALL[1:-1].tolist():
        store.fill(index, torch.full((NUMBERS // 2,), index))
    layout_write = store.layout.write

    def late(*args: Any) -> Any:
        assert store.invalidate(ALL[1:2])
        return layout_write(*args)

    store.layout.write = late  # type: ignore[method-assign]
    assert store.fill(SAMPLES - 1, torch.full((NUMBERS // 2,), SAMPLES - 1))
    del store.layout.write
    assert store.filled == SAMPLES - 1
    assert store.invalidate(ALL[2:3])
    assert store.filled == 0
    assert [store.fill(index, torch.full((NUMBERS,), index)) for index in ALL.tolist()] == [True] * SAMPLES
    store.close()


def test_what_was_invalidated_is_not_lost(tmp_path: Any) -> None:
    """A reader that copies while the run begins anew looks up again. Its process reads these slots later."""
    store, dice = records_of_many_sizes(str(tmp_path))
    store_all(store, dice)
    slots = store.lookup(ALL)
    seen = store.changes
    assert store.invalidate()
    assert set(store.read(slots)) == {UNREADABLE}
    assert store.changes == seen + 2
    store_all(store, dice)
    assert store.full
    store.close()


@pytest.mark.processes
def test_a_change_whose_process_has_died_is_ended(store: Store) -> None:
    """Its number is odd. Whoever fills next makes it even first: no reader takes a torn sample for a whole one."""
    put(store, ALL, 1)

    def die() -> None:
        store.layout.reuse_room = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        store.invalidate()

    with pytest.raises(Exception, match="child"):
        call(die)
    assert store.changes % 2 == 1
    with hanging(store.invalidate, ALL[:2]):
        assert store.changes % 2 == 0
    assert versions(store) == {}


@pytest.mark.processes
def test_without_the_turn_nothing_changes(store: Store, stopped: Any, monkeypatch: Any) -> None:
    """Its holder is stopped: the samples stay, and the caller is told."""
    monkeypatch.setattr(segment_module, "_PATIENCE", 0.05)
    put(store, ALL, 1)
    holder = stopped(lambda: store.segment.in_turn(stop))
    assert not store.invalidate()
    assert set(versions(store)) == set(ALL.tolist())
    holder.go_on()
    wait_until(store.invalidate)
    assert versions(store) == {}


# --- a soak


def work(store: Store, shared: Any, seed: int) -> None:
    """Serve as a loader does. Each sample that comes from the store is whole, and no older than when the call began."""
    dice = random.Random(seed)
    now, least = shared
    while True:
        indices = np.array(dice.sample(range(SAMPLES), dice.choice([1, 8])))
        floor = [least[index] for index in indices]
        while True:
            seen = store.changes
            places = store.lookup(indices)
            if dice.random() < 0.1:
                time.sleep(0.002 * dice.random())
            hits = places != NO_SLOT
            memory = [np.empty(size, np.uint8) for size in store.codec.sizes(int(hits.sum()))]
            store.gather(places[hits], memory)
            if store.changes == seen:
                break
        rows = store.codec.split(memory, int(hits.sum()))
        for index, oldest, row in zip(indices[hits], np.array(floor)[hits], rows, strict=True):
            assert version_in(int(index), row) >= oldest, "stale"
        missing = indices[~hits]
        seen = store.changes
        loaded = contents(store, missing, 0)
        loaded = [contents(store, [index], now[index])[0] for index in missing]
        if dice.random() < 0.1:
            time.sleep(0.002 * dice.random())
        store.put(missing.tolist(), loaded, seen)


def change(store: Store, shared: Any, seed: int) -> None:
    """Samples change: first the source, then the store, and then every new call must see it."""
    dice = random.Random(seed)
    now, least = shared
    while True:
        indices = dice.sample(range(SAMPLES), dice.choice([1, 5, SAMPLES]))
        for index in indices:
            now[index] += 1
        while not store.invalidate(None if len(indices) == SAMPLES else np.array(indices)):
            pass
        for index in indices:
            least[index] = now[index]
        time.sleep(0.01 * dice.random())


@pytest.mark.processes
@pytest.mark.parametrize("seconds", [3, pytest.param(120, marks=pytest.mark.soak)])
def test_readers_fillers_and_changes_at_once(seconds: float) -> None:
    """Beside processes that change samples, and are killed and stopped at random, no sample is torn or stale."""
    store = Store.create(SampleSpec.infer(sample(0, 0)), Arc(SAMPLES, SAMPLES))
    now, least = np.frombuffer(mmap.mmap(-1, 16 * SAMPLES), np.int64).reshape(2, SAMPLES)
    shared = now, least
    dice = random.Random(1)
    jobs = [work, work, work, change]
    children = [Child(job, store, shared, number) for number, job in enumerate(jobs)]
    end = time.monotonic() + seconds
    changes = fills = 0
    try:
        while time.monotonic() < end:
            time.sleep(0.1 * dice.random())
            number = dice.randrange(len(jobs))
            child = children[number]
            if not child.is_running():
                child.result()
                pytest.fail("a child has ended")
            if dice.random() < 0.5:
                child.kill()
                children[number] = Child(jobs[number], store, shared, dice.random())
            else:
                with suppress(ProcessLookupError):
                    os.kill(child.process.pid, signal.SIGSTOP)
                    time.sleep(0.02 * dice.random())
                    os.kill(child.process.pid, signal.SIGCONT)
            changes = max(changes, store.changes)
            fills = max(fills, store.filled)
    finally:
        for child in children:
            child.kill()
    assert changes > 10
    assert fills > 1
    assert store.invalidate()
    assert put(store, ALL, 1) == [True] * SAMPLES
    store.close()
