"""Every store with every codec, against a dict, whatever happens: jobs that end or are killed, faults of the disk.

One machine for both: in memory and on a disk. A sample that a store serves is the one that was stored;
what was stored and not lost by a fault is served.
"""

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from lightning_stocache.cache import rolling as rolling_module
from tests.cache.stores import (
    ALL,
    HEADER_BYTES,
    KINDS,
    LAYOUTS,
    LENGTH,
    NO_SLOT,
    Disk,
    RollingDisk,
    attach_rolling,
    encoded,
    flip,
    gathered,
    memory_store,
    number_of,
    refuse_stores,
    resident,
    rolling_store,
    sample,
)

INDICES = st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=12)
SEEDS = st.integers(0, 10**6)
FLIPS = st.sampled_from([0, 0, 0, 1, 30, 1000])
SHARES = st.one_of(*[st.just(1.0)] * 3, st.floats(0, 1))
GRANTED = 2**19


class Machine(RuleBasedStateMachine):
    """A store whose jobs end and whose disk fails."""

    kind: str
    disk: Disk

    def __init__(self) -> None:
        super().__init__()
        self.folder, self.patch = Path(tempfile.mkdtemp(prefix="stores-")), pytest.MonkeyPatch()
        self.opened: list[Any] = []  # the store, and further readers of it
        self.faulty = False  # whether something of what was stored may be lost

    @property
    def store(self) -> Any:
        return self.opened[0]

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()

    def damage(self, seed: int, flips: int, share: float = 1.0) -> None:
        """Flip bits of the file, and cut it off, between two jobs."""
        content = bytearray(self.disk.path.read_bytes())
        flip(content, random.Random(seed), flips)
        self.disk.path.write_bytes(content[: HEADER_BYTES + round((len(content) - HEADER_BYTES) * share)])
        self.faulty |= flips > 0 or share < 1

    def teardown(self) -> None:
        self.patch.undo()
        self.close()
        shutil.rmtree(self.folder)


class Stores(Machine):
    """A store, compared with a set of stored indices."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: set[int] = set()  # what was said to be stored, by this job or one before
        self.full = False

    @initialize(kind=st.sampled_from(KINDS), layout=st.sampled_from(LAYOUTS))
    def begin(self, kind: str, layout: str) -> None:
        """Make a store of one kind for one codec."""
        self.kind, self.disk = kind, Disk(self.folder, layout, GRANTED)
        self.open()

    def open(self) -> None:
        store = memory_store(self.disk.codec, GRANTED) if self.kind == "memory" else self.disk.open()
        self.opened.append(store)

    @rule(indices=INDICES | st.just(ALL))
    def fill(self, indices: list[int]) -> None:
        """Store samples, several at once."""
        new = list(dict.fromkeys(indices))
        outcomes = self.store.put(new, [encoded(self.store, index) for index in new])
        if not self.full:
            self.stored |= {index for index, stored in zip(new, outcomes, strict=True) if stored}

    @rule(indices=INDICES)
    def read(self, indices: list[int]) -> None:
        """Look samples up, and read them, one by one and together: each is the one that was stored."""
        places = self.store.lookup(np.array(indices), verify=True)
        ready = places[places != NO_SLOT]
        found = [index for index, place in zip(indices, places.tolist(), strict=True) if place != NO_SLOT]
        assert [number_of(read) for read in self.store.read(ready)] == found
        assert gathered(self.store, ready) == found
        assert len(set(found)) <= self.store.filled <= LENGTH
        if not self.faulty:
            assert self.stored & set(indices) <= set(found)

    @rule(seed=SEEDS, flips=FLIPS, share=SHARES)
    def next_job(self, seed: int, flips: int, share: float) -> None:
        """The job ends, the disk may fail, and another job begins."""
        self.close()
        if self.kind == "memory":
            self.stored.clear()
        elif flips or share < 1:
            self.damage(seed, flips, share)
        self.open()
        self.read(ALL)

    @rule(full=st.booleans())
    def disk_full(self, full: bool) -> None:
        """From now on storing fails, or works again."""
        self.full = full
        if full:
            self.faulty = True
            refuse_stores(self.patch)
        else:
            self.patch.undo()
            self.next_job(seed=0, flips=0, share=1.0)  # one that was refused waits for a while before it tries again


class Rolling(Machine):
    """A store of which the oldest samples leave, and the list of all that have come."""

    def __init__(self) -> None:
        super().__init__()
        self.lasting = pytest.MonkeyPatch()
        self.lasting.setattr(rolling_module, "RETRY_SECONDS", 0)  # one that was refused tries again at once
        self.came: list[int] = []  # the last ones are resident
        self.number = 0
        self.refused = False

    @initialize(kind=st.sampled_from(KINDS), layout=st.sampled_from(LAYOUTS), samples=st.integers(12, 60))
    def begin(self, kind: str, layout: str, samples: int) -> None:
        """Make a store of one kind for one codec."""
        self.kind, self.disk = kind, RollingDisk(self.folder, layout, samples)
        self.opened.append(self.disk.open() if kind == "disk" else rolling_store(self.disk.codec, samples))

    @rule(count=st.integers(1, 40))
    def append(self, count: int) -> None:
        """Samples come."""
        for _ in range(count):
            self.come()

    @rule()
    def attach(self) -> None:
        """Another reader opens the store."""
        self.opened.append(attach_rolling(self.store.handle))

    @rule(seed=SEEDS)
    def read(self, seed: int) -> None:
        """What is resident are the last that came, each as it was, whoever reads."""
        store = random.Random(seed).choice(self.opened)
        found = resident(store)
        assert len(set(found)) == len(found) == store.filled
        assert set(found) <= set(self.came)
        assert self.faulty or found == self.came[len(self.came) - len(found) :]

    @precondition(lambda self: self.kind == "disk")
    @rule(seed=SEEDS, flips=FLIPS)
    def next_job(self, seed: int, flips: int) -> None:
        """The job ends, bits may flip, and another job finds the same samples."""
        count = self.store.filled
        self.close()
        self.damage(seed, flips)
        self.faulty |= self.refused  # then an empty slot is filled before the oldest sample leaves
        self.opened.append(self.disk.open())
        assert flips or self.store.filled == count
        self.read(0)

    @precondition(lambda self: self.number)
    @rule()
    def full(self) -> None:
        """Where there is no memory left nothing is served that was not stored."""
        refuse_stores(self.patch)
        self.refused = True
        self.come()
        self.patch.undo()

    def come(self) -> None:
        try:
            if self.store.append(sample(self.disk.layout, self.number), self.number):
                self.came.append(self.number)
            else:
                assert self.refused or self.faulty
        except (OSError, ValueError):  # too little memory for this sample, now that it may not grow
            assert self.refused
        self.number += 1

    def teardown(self) -> None:
        self.lasting.undo()
        super().teardown()


TestStores = Stores.TestCase
TestRolling = Rolling.TestCase
pytest.mark.slow(TestStores)
pytest.mark.slow(TestRolling)
TestRolling.settings = TestStores.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.soak
@pytest.mark.processes
def test_any_store_for_long() -> None:
    """Run the machines for longer."""
    for machine in (Stores, Rolling):
        run_state_machine_as_test(machine, settings=settings(max_examples=1000, stateful_step_count=40, deadline=None))
