"""Near a limit of memory the cache stops taking slots, in all processes, before the kernel kills."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_stocache.cache import shortage
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import Store
from lightning_stocache.node.free import FreeMemory
from tests.cgroups import cgroup, has_killed, peak_of
from tests.logs import Log
from tests.processes import call, call_many, without_room

MIB = 2**20
SLOTS, SAMPLE = 200, MIB


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
    return torch.full((SAMPLE,), index % 256, dtype=torch.uint8)


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
    assert "Give the job more memory" in second


def test_without_a_word_64_mib_stay_free(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the free memory is unknown, nothing stops."""
    with monkeypatch.context() as patch:
        patch.setattr(memory, "now", lambda: FreeMemory(None, None, None))
        assert memory.fill(range(SLOTS)) == SLOTS
    memory.cache.clear()
    assert 33 <= memory.fill(range(SLOTS)) <= 36


@pytest.mark.processes
def test_a_peak_of_the_training_is_remembered(memory: Memory) -> None:
    """A step that takes 50 MiB and gives them back will take them again: they are not filled in between, by no process
    of the node, until the cache opens anew."""
    memory.cache.keep_free(20 * MIB)
    memory.others = 50 * MIB
    assert call(memory.fill, range(10)) == 10
    memory.others = 0
    assert 16 <= call(memory.fill, range(10, SLOTS)) <= 20
    memory.cache.keep_free(20 * MIB)
    assert 48 <= call(memory.fill, range(SLOTS)) <= 54


def fill_limited(cgroup: Path) -> int:
    """In a cgroup: three processes fill a cache that is larger than it, at once. Returns how many samples it has."""
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    FreeMemory.measure(None)  # finds the cgroup, as where a cache opens
    cache, log = Store.create(SampleSpec.infer(sample(0)), Arc(600, 600)), Log()
    cache.keep_free(200 * MIB)  # a process that was forked copies what it touches of its parent's memory
    call_many(fill_every_third, [(cache, log, start) for start in range(3)])
    ready = [index for index in range(600) if cache.get(index) is not None]
    assert all(torch.equal(cache.get(index), sample(index)) for index in ready)
    cache.close()
    return len(ready)


def fill_every_third(cache: Store, log: Log, start: int) -> None:
    for index in range(start, 600, 3):
        cache.fill(index, sample(index))
    assert len(log.lines) <= 1


@pytest.mark.processes
def test_the_kernel_kills_nobody() -> None:
    """In a real cgroup three processes fill what there is, leave a part of it free, and live."""
    with cgroup(400 * MIB) as folder:
        filled = call(fill_limited, folder)
        assert not has_killed(folder)
        assert peak_of(folder) < 390 * MIB
    assert 100 < filled <= 200


def fill_up() -> None:
    log, cache = Log(), Store.create(SampleSpec.infer(sample(0)), Arc(80, 80))
    cache.keep_free(MIB)
    stored = sum(cache.fill(index, sample(index)) for index in range(80))
    assert 54 <= stored <= 56
    assert log.lines[0].startswith(f"the cache stops at {stored} of 80 samples: /dev/shm (")
    assert "8 MiB kept for loaders' batches" in log.lines[0]
    cache.close()


@pytest.mark.processes
def test_the_last_bytes_of_dev_shm_are_for_batches() -> None:
    """During training, 8 MiB of /dev/shm stay free for the batches of workers."""
    without_room(fill_up)
