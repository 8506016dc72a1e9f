"""Near a limit of memory the cache stops taking slots, in all processes, before the kernel kills."""

import mmap
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.cache import shortage
from lightning_stocache.cache.compat import SharedCache
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import NO_SLOT, Store
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.named import open_named
from lightning_stocache.node.segment import Segment
from tests.cache.stores import LAYOUTS, infer_codec, memory_store
from tests.jobs import Log, cgroup, has_killed, peak_of
from tests.processes import call, call_many, hanging, take_all_of

MIB = 2**20
SLOTS = 200


class Memory:
    """A machine whose memory is held by the cache, by others, or is free."""

    def __init__(self, total: int) -> None:
        self.total, self.others = total, 0
        self.cache = Store.create(SampleSpec.infer(sample(0)), Arc(SLOTS, SLOTS))

    def now(self) -> FreeMemory:
        return FreeMemory(None, None, max(self.total - self.others - self.cache.memory_bytes, 0))

    def fill(self, indices: range) -> int:
        return sum(self.cache.fill(index, sample(index)) for index in indices)


def sample(index: int) -> torch.Tensor:
    return torch.full((MIB,), index % 256, dtype=torch.uint8)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    memory = Memory(100 * MIB)
    monkeypatch.setattr(shortage, "FreeMemory", memory)
    yield memory
    memory.cache.close()


def test_filling_stops_before_the_limit(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """What is to stay free stays free; what is stored is served; one warning of two lines says what to do."""
    memory.cache.keep_free(50 * MIB)
    assert 47 <= memory.fill(range(SLOTS)) <= 50
    assert torch.equal(memory.cache.get(40), sample(40))
    assert memory.fill(range(SLOTS)) == 0
    [record] = caplog.records
    first, second = record.getMessage().splitlines()
    assert f"stops at {memory.cache.filled} of 200 samples: the cgroup's memory limit (at times" in first
    assert "50 MiB kept for the training" in first
    assert first.endswith("; give the job more memory.")
    assert second == "The others are loaded every time. A lower budget has no such warning"


def test_without_a_word_64_mib_stay_free(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the free memory is unknown, nothing stops."""
    with monkeypatch.context() as patch:
        patch.setattr(memory, "now", lambda: FreeMemory(None, None, None))
        assert memory.fill(range(SLOTS)) == SLOTS
    memory.cache.clear()
    assert 33 <= memory.fill(range(SLOTS)) <= 36


@pytest.mark.processes
def test_a_peak_of_the_training_is_remembered(memory: Memory) -> None:
    """What a step takes and gives back is not filled in between, by no process, until the cache opens anew."""
    memory.cache.keep_free(20 * MIB)
    memory.others = 50 * MIB
    assert call(memory.fill, range(10)) == 10
    memory.others = 0
    assert 16 <= call(memory.fill, range(10, SLOTS)) <= 20
    memory.cache.keep_free(20 * MIB)
    assert 48 <= call(memory.fill, range(SLOTS)) <= 54


def join(name: str, nbytes: int) -> Store:
    """Join a named store as a job that keeps so many bytes free."""
    spec = SampleSpec.infer(0)
    segment, manifest = open_named(name, *Store.plan(spec, Arc(8, 8)))
    store = Store.open(segment, spec, manifest.geometry, 8)
    store.keep_free(nbytes)
    return store


def kept(name: str, nbytes: int) -> int:
    """How many bytes all jobs leave free when such a job has joined."""
    with join(name, nbytes).segment.numbers as numbers:
        return numbers[0]


@pytest.mark.named
@pytest.mark.processes
def test_the_strictest_of_the_jobs_of_a_name_holds(name: str) -> None:
    """A job that joins leaves no less free than those before it need, until they have ended."""
    with hanging(join, name, 20 * MIB):
        assert call(kept, name, MIB) == 20 * MIB
        assert call(kept, name, 30 * MIB) == 30 * MIB
    assert call(kept, name, MIB) == MIB


def fill_limited(cgroup: Path) -> int:
    """In a cgroup: three processes fill a cache that is larger than it, at once. Returns how many samples it has."""
    torch.set_num_threads(1)  # a forked child would wait for the threads of its parent for ever
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    FreeMemory.measure(None)  # finds the cgroup, as where a cache opens
    cache, log = Store.create(SampleSpec.infer(sample(0)), Arc(400, 400)), Log()
    call_many(fill_every_third, [(cache, log, start) for start in range(3)])
    ready = [index for index in range(400) if cache.get(index) is not None]
    assert all(torch.equal(cache.get(index), sample(index)) for index in ready)
    cache.close()
    return len(ready)


def fill_every_third(cache: Store, log: Log, start: int) -> None:
    for index in range(start, 400, 3):
        cache.fill(index, sample(index))
    assert len(log.lines) <= 1


@pytest.mark.processes
def test_the_kernel_kills_nobody() -> None:
    """In a real cgroup three processes fill what there is, leave the default part of it free, and live."""
    with cgroup(300 * MIB) as folder:
        filled = call(fill_limited, folder, method="forkserver")  # small, as a rank is before its training
        assert not has_killed(folder)
        assert peak_of(folder) < 290 * MIB
    assert 100 < filled <= 236


# ---- a full /dev/shm ----


@contextmanager
def a_minute_later() -> Iterator[None]:
    """The clock of this process shows a minute more, after which storing is tried again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 60)
        yield


def fill_without_room(layout: str) -> None:
    log, store = Log(), memory_store(infer_codec(layout, [sample(0)]), 90 * MIB, Arc(100, 100))
    with open("/dev/shm/other", "wb") as other:
        os.posix_fallocate(other.fileno(), 0, 40 * MIB)
    stored = [index for index in range(100) if store.fill(index, sample(index))]
    assert stored == list(range(store.filled))
    assert 20 <= len(stored) <= 24
    assert layout == "rows" or store.layout.free < (len(stored) + 1) * MIB  # no room is lost
    assert all(torch.equal(store.get(index), sample(index)) for index in stored)
    assert all(store.get(index) is None for index in range(len(stored), 100))
    assert not call(store.fill, 98, sample(98))
    [line] = log.lines
    assert f"stops at {len(stored)} of 100 samples: no space left in /dev/shm" in line
    os.unlink("/dev/shm/other")
    assert not store.fill(98, sample(98))  # it is not tried again at once
    with a_minute_later():
        assert store.fill(98, sample(98))
    assert torch.equal(store.get(98), sample(98))
    store.close()


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_room_the_store_stops_growing_and_goes_on(layout: str, small_shm: Any) -> None:
    """At ENOSPC a slot stays empty, with one warning; what is stored is served, and the store grows later."""
    small_shm(fill_without_room, layout)


def warn_elsewhere(store: Store) -> list[str]:
    log, same = Log(), pickle.loads(pickle.dumps(store))  # as in a process that has not tried yet
    same.fill(3, sample(3))
    return log.lines


def look_without_room() -> None:
    shared = SharedCache(100, 100_000, (MIB,))
    store = shared.store
    shared.set_slot(1, sample(1))
    take_all_of("/dev/shm")
    with pytest.raises(OSError, match="No space left on device"):
        Store.create(SampleSpec.infer(sample(0)), Arc(100_000, 100_000))
    log = Log()
    assert not any(store.fill(index, sample(7)) for index in (0, 50_000, 99_999))
    shared.set_slot(99, sample(99))
    shared.set_slot(1, sample(2), allow_overwrite=True)
    assert torch.equal(store.get(1), sample(2))  # type: ignore[arg-type]
    assert (store.get(99), store.get(70_000), store.filled) == (None, None, 1)
    assert np.flatnonzero(store.lookup(np.arange(100_000)) != NO_SLOT).tolist() == [1]
    assert int(shared[5].max()) == 0
    assert call(warn_elsewhere, store) == []
    with a_minute_later():
        assert not store.fill(3, sample(3))
    assert len(log.lines) == 1
    store.clear()
    store.close()


@pytest.mark.processes
def test_looking_needs_no_room(small_shm: Any) -> None:
    """In a full /dev/shm nothing ends in SIGBUS, what is stored can be overwritten, and all processes warn once."""
    small_shm(look_without_room, mib=4)


def fill_up() -> None:
    log, cache = Log(), Store.create(SampleSpec.infer(sample(0)), Arc(80, 80))
    cache.keep_free(MIB)
    stored = sum(cache.fill(index, sample(index)) for index in range(80))
    assert 54 <= stored <= 56
    assert log.lines[0].startswith(f"the cache stops at {stored} of 80 samples: /dev/shm (")
    assert "8 MiB kept for loaders' batches" in log.lines[0]
    cache.close()


@pytest.mark.processes
def test_the_last_bytes_of_dev_shm_are_for_batches(small_shm: Any) -> None:
    """During training, 8 MiB of /dev/shm stay free for the batches of workers."""
    small_shm(fill_up)


SMALL = 30_000  # samples of 64 bytes in two fields, and an empty one


def small(index: int) -> tuple[torch.Tensor, int, None]:
    return torch.full((7,), index), index, None


def put_small(store: Store, first: int, last: int) -> list[bool | None]:
    """Store small rows in calls of 256."""
    outcomes: list[bool | None] = []
    for begin in range(first, last, 256):
        indices = range(begin, min(begin + 256, last))
        outcomes += store.put(indices, [store.codec.contents(store.codec.encode(small(index))) for index in indices])
    return outcomes


def check_small(store: Store, least: int) -> int:
    """How many small rows are stored, each of which is whole."""
    places = store.lookup(np.arange(SMALL))
    found = np.flatnonzero(places != NO_SLOT)
    assert len(found) >= least
    for index, (numbers, number, _) in zip(found.tolist(), store.read(places[found]), strict=True):
        assert number == index
        assert (numbers == index).all()
    return len(found)


def test_small_rows_are_written_without_a_system_call_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is reserved once. Rows of single samples, and those of a disk, are written as all rows are."""
    writes, reserved = [], []
    for name, calls in (("store", writes), ("reserve", reserved)):
        plain = getattr(Segment, name)
        monkeypatch.setattr(Segment, name, partialmethod(counted, plain, calls))
    store = Store.create(SampleSpec.infer(small(0)), Arc(SMALL, SMALL))
    reserved.clear()
    assert all(put_small(store, 0, SMALL))
    assert writes == []
    assert len(reserved) <= SMALL * 64 // 2**12 + 3
    assert check_small(store, SMALL) == SMALL
    store.clear()
    writes.clear()
    assert store.fill(5, small(5))
    assert len(writes) == 2
    assert all(put_small(store, 6, 300))
    assert check_small(store, 295) == 295
    store.close()


def test_small_rows_take_no_other_memory_than_their_pages() -> None:
    """As rows that are written one by one: else a few rows would take what is left for the batches of workers."""
    store = Store.create(SampleSpec.infer(small(0)), Arc(SMALL, SMALL))
    before = store.segment.allocated_bytes
    indices = range(0, SMALL, SMALL // 16)
    assert all(store.put(indices, [store.codec.contents(store.codec.encode(small(index))) for index in indices]))
    assert store.segment.allocated_bytes - before <= 2 * len(indices) * 2 * mmap.PAGESIZE
    store.close()


def counted(segment: Segment, plain: Any, calls: list[Any], *args: Any) -> Any:
    calls.append(args)
    return plain(segment, *args)


def fill_small_without_room() -> None:
    log = Log()
    store = Store.create(SampleSpec.infer(small(0)), Arc(SMALL, SMALL))
    put_small(store, 0, 2000)
    take_all_of("/dev/shm")
    outcomes = put_small(store, 0, SMALL)
    stored = check_small(store, 2000)
    assert stored == 2000 + outcomes.count(True) < SMALL
    assert len(log.lines) == 1
    store.clear()
    take_all_of("/dev/shm")
    with a_minute_later():
        assert put_small(store, 0, 2000).count(True) < 2000, "what was cleared has no memory any more"
        assert call(put_small_elsewhere, store) == 0
    check_small(store, 0)
    store.close()


def put_small_elsewhere(store: Store) -> int:
    """Store small rows in another process."""
    return put_small(store, 20_000, 22_000).count(True)


@pytest.mark.processes
def test_small_rows_without_room_are_not_stored(small_shm: Any) -> None:
    """Nothing ends in SIGBUS, after the store was cleared, too."""
    small_shm(fill_small_without_room, mib=4)
