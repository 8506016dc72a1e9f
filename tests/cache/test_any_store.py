"""Every store with every codec, against a dict, whatever happens: jobs that end or are killed, faults of the disk.

One machine for both: in memory and on a disk. A sample that a store serves is the one that was stored;
what was stored and not lost by a fault is served.
"""

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cache.disks import Disk, flip
from tests.cache.equality import same
from tests.cache.stores import (
    HEADER_BYTES,
    KINDS,
    LAYOUTS,
    LENGTH,
    NO_PLACE,
    SAMPLES,
    attach_rolling,
    codec_of,
    encoded,
    gathers,
    memory_store,
    path_of,
    refuse_stores,
    resident,
    rolling_disk_store,
    rolling_store,
)

INDICES = st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=12)
GRANTED = 2**19


class Stores(RuleBasedStateMachine):
    """A store, compared with a set of stored indices."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="stores-"))
        self.stored: set[int] = set()  # what was said to be stored, by this job or one before
        self.faulty = False  # whether something of that may be lost
        self.full = False

    @initialize(kind=st.sampled_from(KINDS), layout=st.sampled_from(LAYOUTS))
    def begin(self, kind: str, layout: str) -> None:
        """Make a store of one kind for one codec."""
        self.kind, self.disk = kind, Disk(self.folder, layout, GRANTED)
        self.store: Any = self.opened()

    def opened(self) -> Any:
        return memory_store(self.disk.codec, GRANTED) if self.kind == "memory" else self.disk.open()

    @rule()
    def fill_all(self) -> None:
        """Store all samples."""
        self.fill(list(range(LENGTH)))

    @rule(indices=INDICES)
    def fill(self, indices: list[int]) -> None:
        """Store samples, several at once."""
        new = list(dict.fromkeys(indices))
        contents = [encoded(self.disk.codec, self.disk.sample(index), index) for index in new]
        outcomes = self.store.put(new, contents)
        if not self.full:
            self.stored |= {index for index, stored in zip(new, outcomes, strict=True) if stored}

    @rule(indices=INDICES)
    def read(self, indices: list[int]) -> None:
        """Look samples up, and read them: each is the one that was stored."""
        places = self.store.lookup(np.array(indices), verify=True)
        ready = places[places != NO_PLACE]
        found = [index for index, place in zip(indices, places.tolist(), strict=True) if place != NO_PLACE]
        for index, sample in zip(found, self.store.read(ready), strict=True):
            assert same(sample, self.disk.sample(index)), index
        if not self.faulty:
            assert self.stored & set(indices) <= set(found)

    @rule(indices=INDICES)
    def gather(self, indices: list[int]) -> None:
        """Rows come out together as they do one by one."""
        places = self.store.lookup(np.array(indices), verify=True)
        ready = places[places != NO_PLACE]
        if not gathers(self.store) or not len(ready):
            return
        codec = self.disk.codec
        memory = [np.zeros(size, dtype=np.uint8) for size in codec.sizes(len(ready))]
        self.store.gather(ready, memory)
        for one, other in zip(codec.split(memory, len(ready)), self.store.read(ready), strict=True):
            assert same(one, other)

    @rule()
    def next_job(self) -> None:
        """The job ends, and another one begins."""
        self.store.close()
        self.begin_again()

    @precondition(lambda self: self.kind != "memory")
    @rule(seed=st.integers(0, 10**6), count=st.sampled_from([1, 30, 1000]))
    def bits_flip(self, seed: int, count: int) -> None:
        """Bits of the file flip between two jobs."""
        self.store.close()
        content = self.disk.bytes()
        flip(content, random.Random(seed), count)
        self.disk.write(content)
        self.faulty = True
        self.begin_again()
        self.read(list(range(LENGTH)))

    @precondition(lambda self: self.kind != "memory")
    @rule(share=st.floats(0, 1))
    def cut_off(self, share: float) -> None:
        """The file is cut off between two jobs."""
        self.store.close()
        size = self.disk.path.stat().st_size
        os.truncate(self.disk.path, HEADER_BYTES + int((size - HEADER_BYTES) * share))
        self.faulty = True
        self.begin_again()
        self.read(list(range(LENGTH)))

    @rule(full=st.booleans())
    def disk_full(self, full: bool) -> None:
        """From now on storing fails, or works again."""
        self.full = full
        refuse_stores(full)
        if full:
            self.faulty = True
        else:
            self.next_job()  # one that was refused waits for a while before it tries again

    @invariant()
    def counts(self) -> None:
        """The number of filled slots is in range."""
        assert 0 <= self.store.filled <= LENGTH

    def begin_again(self) -> None:
        if self.kind == "memory":
            self.stored.clear()
        self.store = self.opened()

    def teardown(self) -> None:
        refuse_stores(False)
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.folder)


class Rolling(RuleBasedStateMachine):
    """A store of which the oldest samples leave, and the list of all that have come."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="stores-"))
        self.resident: list[int] = []  # all that have come, the last ones of which are resident
        self.number = 0
        self.refused = False
        self.damaged = False

    @initialize(kind=st.sampled_from(KINDS), layout=st.sampled_from(LAYOUTS), samples=st.integers(12, 60))
    def begin(self, kind: str, layout: str, samples: int) -> None:
        """Make a store of one kind for one codec."""
        self.kind, self.sample, self.codec, self.samples = kind, SAMPLES[layout], codec_of(layout), samples
        self.store: Any = self.opened()
        self.readers = [self.store]

    def opened(self) -> Any:
        if self.kind == "disk":
            return rolling_disk_store(self.codec, self.samples, self.folder)
        return rolling_store(self.codec, self.samples)

    @rule(count=st.integers(1, 40))
    def append(self, count: int) -> None:
        """Samples come."""
        for _ in range(count):
            self.come()

    @rule()
    def attach(self) -> None:
        """Another reader opens the store."""
        self.readers.append(attach_rolling(self.store.handle))

    @rule(seed=st.integers(0, 10**6))
    def read(self, seed: int) -> None:
        """What is resident are the last that came, each as it was, whoever reads."""
        store = random.Random(seed).choice(self.readers)
        slots = np.array([slot for slot in resident(store).tolist() if store.is_sound(slot)], dtype=np.int64)
        last = self.resident[0 if self.damaged else len(self.resident) - len(slots) :]
        found = [next(i for i in last if same(got, self.sample(i))) for got in store.read(slots)]
        assert len(set(found)) == len(slots) == store.filled
        assert self.damaged or sorted(found) == last
        assert store.substituted == 0

    @precondition(lambda self: self.kind == "disk")
    @rule(seed=st.integers(0, 10**6), flips=st.sampled_from([0, 0, 0, 1, 30, 1000]))
    def next_job(self, seed: int, flips: int) -> None:
        """The job ends, bits may flip, and another job finds the same samples."""
        count = self.store.filled
        for store in self.readers[::-1]:
            store.close()
        content = bytearray(path_of(self.folder).read_bytes())
        flip(content, random.Random(seed), flips)
        path_of(self.folder).write_bytes(content)
        self.damaged |= flips > 0 or self.refused  # then an empty slot is filled before the oldest sample leaves
        self.store = self.opened()
        self.readers = [self.store]
        assert flips or self.store.filled == count
        self.read(0)

    @precondition(lambda self: self.number)
    @rule()
    def full(self) -> None:
        """Where there is no memory left nothing is served that was not stored."""
        refuse_stores(True)
        self.refused = True
        try:
            self.come()
        finally:
            refuse_stores(False)

    def come(self) -> None:
        try:
            if self.store.append(self.sample(self.number)):
                self.resident.append(self.number)
            else:
                assert self.refused or self.damaged
        except (OSError, ValueError):  # too little memory for this sample, now that it may not grow
            assert self.refused
        self.number += 1

    def teardown(self) -> None:
        for store in getattr(self, "readers", ())[::-1]:
            store.close()
        shutil.rmtree(self.folder)


TestStores = Stores.TestCase
TestRolling = Rolling.TestCase
TestRolling.settings = TestStores.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.soak
@pytest.mark.processes
def test_any_store_for_long() -> None:
    """Run the machines for longer."""
    from hypothesis.stateful import run_state_machine_as_test

    for machine in (Stores, Rolling):
        run_state_machine_as_test(machine, settings=settings(max_examples=300, stateful_step_count=40, deadline=None))
