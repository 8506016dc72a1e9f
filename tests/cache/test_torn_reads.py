"""Nobody is ever served half of one sample and half of another, while others write and are killed."""

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cache.stores import (
    ARC,
    LAYOUTS,
    NO_PLACE,
    append_for_ever,
    attach_rolling,
    codec_of,
    infer_codec,
    memory_store,
    number_of,
    resident,
    rolling_store,
    sample,
)
from tests.processes import Child, call_many

BIG = 1 << 16
SLOTS = 12


def write_and_read(store: Any, mark: int) -> int:
    """Fill every slot with a mark and look at what is served; how many samples had words of several marks."""
    mine, torn = torch.full((BIG,), mark, dtype=torch.uint8), 0
    for index in range(ARC.size):
        store.fill(index, mine)
        place = store.place(index)
        for served in store.read(np.array([place])) if place != NO_PLACE else ():
            torn += int(served.min()) != int(served.max())
    return torn


@pytest.mark.processes
@pytest.mark.parametrize("rounds", [5, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_writers_never_tear_a_sample(layout: str, rounds: int) -> None:
    """Processes that store different bytes into the same slot at the same time: one wins, and all see it whole."""
    codec = infer_codec(layout, [torch.zeros(BIG, dtype=torch.uint8)])
    for _ in range(rounds):
        store = memory_store(codec, 64 * BIG)
        assert call_many(write_and_read, [(store, mark) for mark in (1, 2, 3)]) == [0, 0, 0]
        assert store.filled == ARC.size
        store.close()


def look(handle: Any, over: Path, seed: int) -> int:
    """Read batches of random places, each word of them; how many samples were read."""
    store, random_places, read = attach_rolling(handle), np.random.default_rng(seed), 0
    while store.filled < 3:
        time.sleep(0.01)
    while read <= 50 or not over.exists():
        places = random_places.integers(0, max(min(store.capacity, store.filled), 1), 16)
        read += len([number_of(each) for each in store.read(places)])
    return read


@pytest.mark.processes
@pytest.mark.parametrize("seconds", [2, pytest.param(600, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_reader_sees_a_torn_sample(tmp_path: Path, layout: str, seconds: float) -> None:
    """Two readers look at every word of what two writers write, who are killed again and again at random moments."""
    moments, store, over = random.Random(7), rolling_store(codec_of(layout), SLOTS), tmp_path / "over"
    readers = [Child(look, store.handle, over, 7 + number) for number in range(2)]
    writers = [Child(append_for_ever, store.handle, layout, 1_000_000 * number) for number in (1, 2)]
    killed, end = 2, time.monotonic() + seconds
    try:
        while time.monotonic() < end or killed < 10 or store.evicted <= 100:
            time.sleep(moments.uniform(0.0, 0.2))
            number = moments.randrange(2)
            writers[number].kill()
            killed += 1
            writers[number] = Child(append_for_ever, store.handle, layout, 1_000_000 * killed)
        over.touch()
        found = [reader.result() for reader in readers]
    finally:
        for writer in writers:
            writer.kill()
    assert min(found) > 50
    for number in range(200):
        assert store.append(sample(layout, number))
    last = resident(store)
    assert last == list(range(200 - len(last), 200))
    assert len(last) == store.capacity
    store.close()
