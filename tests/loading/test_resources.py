"""The life of loaders, iterators, workers, threads and memory: whatever is broken off, nothing outlives its loader."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.jobs import job_environment
from tests.loading.twins import Numbers, copied, same, to_float, uncached

LENGTH = 40

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.processes]


gathered_or_made = pytest.mark.parametrize("transform", [None, to_float], ids=["gathered", "made"])
WAYS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "alone, gathered": ({}, "auto", None),
    "alone, made": ({}, "50%", to_float),
    "workers, gathered": ({"num_workers": 2}, "50%", None),
    "workers, made": ({"num_workers": 2}, "auto", to_float),
    "persistent, gathered": ({"num_workers": 2, "persistent_workers": True}, "50%", None),
    "persistent, made": ({"num_workers": 2, "persistent_workers": True}, "auto", to_float),
}
in_every_way = pytest.mark.parametrize(("arguments", "budget", "transform"), WAYS.values(), ids=WAYS)


def plain(transform: Callable[[Any], Any] | None) -> list[Any]:
    return list(DataLoader(uncached(Numbers(LENGTH), transform), 4))


def threads() -> int:
    return sum(thread.name == "stocache-prefetch" for thread in threading.enumerate())


def worker_pids() -> set[int | None]:
    return {process.pid for process in active_children()}


@in_every_way
def test_an_epoch_that_is_broken_off_leaves_nothing_behind_and_another_one_follows(arguments, budget, transform):
    """Thread and workers end with the iterator, unless they are persistent, and then the same go on. They end with
    `close`, too. What has been handed out stays, and the next epoch is complete."""
    expected = plain(transform)
    with closing(CachedDataset(Numbers(LENGTH), budget, transform=transform)) as dataset:
        loader, pids = CachedLoader(dataset, 4, **arguments), set[int | None]()
        for stop in (0, 3, 6):
            iterator = iter(loader)
            batches = [next(iterator) for _ in range(stop + 1)]
            pids |= worker_pids()
            del iterator
            assert threads() == 0
            assert worker_pids() == (pids if loader.persistent_workers else set())
            assert same(batches, expected[: stop + 1])
        assert not loader.persistent_workers or len(pids) == 2
        assert same([copied(batch) for batch in loader], expected)
        if transform is not None and loader.num_workers:  # batches that nobody asked for any more gave theirs back
            del batches
            gc.collect()
            assert loader.resources.pool.shared_left == 7
        iterator = iter(loader)
        batch, ours = next(iterator), loader.resources is not None
        loader.close()
        assert active_children() == []
        assert threads() == 0
        if ours:  # without workers, transformed samples come by DataLoader's own iterator
            assert next(iterator, None) is None
        assert same(batch, expected[0])
        assert same([copied(batch) for batch in loader], expected)
        loader.close()
        assert active_children() == []


FOLD = list(range(1, LENGTH, 4))


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("indices", "make"),
    [
        (FOLD, lambda: {"batch_size": 4, "sampler": SubsetRandomSampler(list(FOLD))}),
        (None, lambda: {"batch_sampler": BatchSampler(list(FOLD), 3, drop_last=False)}),
    ],
    ids=["slots for a fold", "slots for all"],
)
def test_workers_end_when_all_that_is_drawn_is_cached(indices, make, persistent):
    """Of a fold, too; where another one is drawn then, there are workers again, and batches are DataLoader's."""
    arguments: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
    with closing(CachedDataset(Numbers(LENGTH), indices=indices)) as dataset:
        given, plainly = make(), make()
        loader, plainly_made = CachedLoader(dataset, **given, **arguments), DataLoader(Numbers(LENGTH), **plainly)
        working = []
        for epoch in range(4):
            if epoch == 2:  # the sampler draws others, which the user has changed in place
                for order in (given, plainly):
                    sampler: Any = order.get("sampler") or order["batch_sampler"].sampler
                    getattr(sampler, "indices", sampler)[:] = range(0, LENGTH, 4)
            state = torch.get_rng_state()
            expected = list(plainly_made)
            torch.set_rng_state(state)
            if persistent and epoch:
                torch.empty((), dtype=torch.int64).random_()  # the seed of workers, which are there already
            served = [(copied(batch), len(active_children())) for batch in loader]
            assert same([batch for batch, _ in served], expected)
            working.append(served[0][1])
        assert working == [2, 0, 2, 0 if indices is None else 2]
        loader.close()
        assert active_children() == []


@in_every_way
def test_two_iterators_at_once(arguments, budget, transform):
    """Each has its own place in the epoch; with persistent workers the first one ends, as DataLoader has but one."""
    expected = plain(transform)
    with closing(CachedDataset(Numbers(LENGTH), budget, transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, **arguments)
        if loader.persistent_workers:
            first = iter(loader)
            assert same(next(first), expected[0])
            second = iter(loader)
            assert same([copied(batch) for batch in second], expected)
            assert next(first, None) is None
        else:
            pairs = [(copied(one), copied(other)) for one, other in zip(loader, loader, strict=True)]
            assert same(pairs, [(batch, batch) for batch in expected])
            assert same([copied(batch) for batch in loader], expected)
        loader.close()


@in_every_way
def test_a_loader_may_be_deleted_while_its_iterator_goes_on(arguments, budget, transform):
    """The iterator has what it needs, and everything ends with it."""
    with closing(CachedDataset(Numbers(LENGTH), budget, transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, **arguments)
        iterator = iter(loader)
        got = [copied(next(iterator))]
        del loader
        gc.collect()
        got.extend(copied(batch) for batch in iterator)
        assert same(got, plain(transform))
        del iterator
        gc.collect()
        assert active_children() == []


@gathered_or_made
def test_a_loader_that_is_deleted_ends_its_persistent_workers(transform):
    """At once, and the memory that it kept goes with it: there is no cycle that waits for the garbage collector."""
    with closing(CachedDataset(Numbers(LENGTH), "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=2, persistent_workers=True)
        list(loader)
        assert len(active_children()) == 2
        kept = weakref.ref(loader.resources)
        del loader
        assert kept() is None
        assert active_children() == []


# ---- interruptions ----


class Gated(Numbers):
    """A source that waits at one sample until a file is there (a lock would be lost with a worker that is killed)."""

    def __init__(self, gate: Path) -> None:
        super().__init__(LENGTH)
        self.gate = gate

    def __getitem__(self, index: int) -> Any:
        deadline = time.monotonic() + 120
        while index == 13 and not self.gate.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the gate stayed shut")
            time.sleep(0.01)
        return super().__getitem__(index)


@pytest.mark.epoch_one_reads_all
@gathered_or_made
def test_a_batch_that_came_too_late_is_the_next_one_again(transform, tmp_path):
    """A time-out is an error, after which the answer still comes: to its own batch."""
    gate = tmp_path / "gate"
    gate.touch()  # it is open while the cache is made
    with closing(CachedDataset(Gated(gate), "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=1, prefetch_factor=1, timeout=0.3)
        iterator, got = iter(loader), []
        gate.unlink()
        errors: list[str] = []
        while True:
            try:
                got.append(copied(next(iterator)))
            except StopIteration:
                break
            except RuntimeError as error:  # on a busy machine the first batches may come too late, too
                errors.append(str(error))
                if len(got) == 13 // 4:
                    gate.touch()
        assert set(errors) == {"DataLoader timed out after 0.3 seconds"}
        assert same(got, plain(transform))


SCRIPT = """
import logging

from lightning_stocache import CachedDataset, CachedLoader, SampleSpec
from tests.loading.twins import Numbers, to_float

logging.getLogger("lightning_stocache").addHandler(logging.NullHandler())  # else it says what is cached
live, source = [], Numbers(40)
for transform in (None, to_float):
    for arguments in ({}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}):
        dataset = CachedDataset(source, "75%", transform=transform, spec=SampleSpec.infer(source[0]))
        dataset.__getitems__(list(range(10)))
        loader = CachedLoader(dataset, 4, **arguments)
        iterator = iter(loader)
        live.append((loader, iterator, next(iterator), next(iterator)))
"""


def test_the_interpreter_ends_in_silence_with_iterators_alive():
    """All kinds of them, in the middle of an epoch: exit code 0, and not a word."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=job_environment(), timeout=280)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
