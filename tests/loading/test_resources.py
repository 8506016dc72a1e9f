"""The life of loaders, iterators, workers, threads and memory: whatever is broken off, nothing outlives its loader."""

import gc
import subprocess
import sys
import weakref
from contextlib import closing
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.jobs import job_environment
from tests.loading.twins import (
    PERSISTENT,
    Numbers,
    copied,
    gathered_or_made,
    in_every_way,
    outcomes,
    plain_batches,
    prefetch_threads,
    same,
    totals,
)
from tests.processes import wait_until
from tests.sources import Made

LENGTH = 40

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.processes]


def worker_pids() -> set[int | None]:
    return {process.pid for process in active_children()}


@in_every_way
def test_nothing_outlives_its_loader(arguments, budget, transform):
    """Thread and workers end with a broken-off iterator, unless they are persistent, and then the same go on. They end
    with `close`, and with a loader that is deleted: there is no cycle that waits for the garbage collector. What has
    been handed out stays, an iterator goes on without its loader, and the next epoch is complete. Of two iterators at
    once each has its own place; with persistent workers the first one ends, as DataLoader has but one."""
    expected = plain_batches(Numbers(LENGTH), transform)
    with closing(CachedDataset(Numbers(LENGTH), budget, transform=transform)) as dataset:
        loader, pids = CachedLoader(dataset, 4, **arguments), set[int | None]()
        for stop in (0, 5):
            iterator = iter(loader)
            batches = [next(iterator) for _ in range(stop + 1)]
            pids |= worker_pids()
            del iterator
            assert prefetch_threads() == 0
            assert worker_pids() == (pids if loader.persistent_workers else set())
            assert same(batches, expected[: stop + 1])
        assert not loader.persistent_workers or len(pids) == 2
        assert same([copied(batch) for batch in loader], expected)
        if transform is not None:  # batches that nobody asked for any more gave theirs back
            del batches
            gc.collect()
            assert loader.resources.pool.shared_left == 7
        iterator = iter(loader)
        batch = next(iterator)
        loader.close()
        assert (worker_pids(), prefetch_threads()) == (set(), 0)
        assert next(iterator, None) is None
        assert same(batch, expected[0])
        iterator = iter(loader)
        got = [copied(next(iterator))]
        del loader
        got.extend(copied(batch) for batch in iterator)
        assert same(got, expected)
        del iterator
        gc.collect()
        assert worker_pids() == set()
        loader = CachedLoader(dataset, 4, **arguments)
        first = iter(loader)
        assert same(next(first), expected[0])
        got = [(copied(batch), copied(next(first, None))) for batch in loader]
        others = [None] * 10 if loader.persistent_workers else [*expected[1:], None]
        assert same(got, list(zip(expected, others, strict=True)))
        del first
        assert same([copied(batch) for batch in loader], expected)
        memory = weakref.ref(loader.resources)
        del loader
        assert memory() is None
        assert worker_pids() == set()


FOLD = list(range(1, LENGTH, 4))


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("indices", [FOLD, None], ids=["slots for a fold", "slots for all"])
def test_workers_end_when_all_that_is_drawn_is_cached(indices):
    """Of a fold, too; where another one is drawn then, there are workers again, and batches are DataLoader's."""
    drawn, working = list(FOLD), []
    with closing(CachedDataset(Numbers(LENGTH), indices=indices)) as dataset:
        loader = CachedLoader(dataset, 3, sampler=drawn, num_workers=2, persistent_workers=indices is None)
        for epoch in range(4):
            if epoch == 2:  # the user changes it in place
                drawn[:] = range(0, LENGTH, 4)
            served = [(copied(batch), len(active_children())) for batch in loader]
            assert same([batch for batch, _ in served], list(DataLoader(Numbers(LENGTH), 3, sampler=drawn)))
            working.append(served[0][1])
        assert working == [2, 0, 2, 0 if indices is None else 2]
        loader.close()
        assert active_children() == []


@pytest.mark.epoch_one_reads_all
@gathered_or_made
def test_a_batch_that_came_too_late_is_the_next_one_again(transform, tmp_path):
    """A time-out is an error, after which the answer still comes: to its own batch."""
    gate, numbers = tmp_path / "gate", Numbers(LENGTH)
    gate.touch()  # it is open while the cache is made

    def gated(index: int) -> Any:
        if index == 13:  # a lock would be lost with a worker that is killed
            wait_until(gate.exists, 120)
        return numbers[index]

    with closing(CachedDataset(Made(gated, LENGTH), "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=1, prefetch_factor=1, timeout=0.3)
        iterator, got, errors = iter(loader), list[Any](), set[str]()
        gate.unlink()
        while len(got) < LENGTH // 4:
            try:
                got.append(copied(next(iterator)))
            except RuntimeError as error:  # on a busy machine the first batches may come too late, too
                errors.add(str(error))
                if len(got) == 13 // 4:
                    gate.touch()
        assert errors == {"DataLoader timed out after 0.3 seconds"}
        assert next(iterator, None) is None
        assert same(got, plain_batches(Numbers(LENGTH), transform))


# ---- workers that wait load what nobody has asked for yet ----

IDLE = PERSISTENT | {"batch_size": 4}


def tensor_and_text(index: int) -> Any:
    return torch.full((3,), index), str(index)


def with_a_broken_one(index: int) -> Any:
    if index == 35:
        raise OSError(f"sample {index} is broken")
    return tensor_and_text(index)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_idle_workers_fill_what_nobody_asked_for(tmp_path: Path, method: str) -> None:
    """After one batch all of it is filled but a broken sample, whose error is for who asks for it; what was served is
    what was counted. A sample is loaded twice only where it is asked for while it is being loaded ahead. A cache of a
    part fills that part, and workers go on waiting for requests."""
    source = Made(with_a_broken_one, LENGTH, tmp_path / "loads")
    with closing(CachedDataset(source, prefill=True)) as dataset:
        Path(source.log_path).unlink()
        loader = CachedLoader(dataset, multiprocessing_context=method, **IDLE)
        batches = iter(loader)
        first = next(batches)
        wait_until(lambda: dataset.cache is not None and dataset.cache.filled == LENGTH - 1)
        came = [first, *outcomes(batches)]
        loader.close()
        assert "sample 35 is broken" in str(came.pop(35 // 4))
        whole = [index for index in range(LENGTH) if index // 4 != 35 // 4]
        assert [text for _, texts in came for text in texts] == list(map(str, whole))
        assert first[0].tolist() == [[index] * 3 for index in range(4)]
        assert set(source.loaded) == set(range(LENGTH))
        assert source.loads <= LENGTH + 6  # the broken one is loaded again by who asks for it
        counts = totals(dataset)
        assert (counts.served, counts.fills, counts.bypasses) == (len(whole), LENGTH - 1, 0)
    with closing(CachedDataset(Made(tensor_and_text, LENGTH), "50%", prefill=True)) as dataset:
        loader = CachedLoader(dataset, multiprocessing_context=method, **IDLE)
        for _ in range(2):
            assert sum(len(texts) for _, texts in loader) == LENGTH
        loader.close()
        assert totals(dataset).fills == LENGTH // 2


# ---- the end of the interpreter ----

SCRIPT = """
import logging

import torch

from lightning_stocache import CachedDataset, CachedLoader, SampleSpec

logging.getLogger("lightning_stocache").addHandler(logging.NullHandler())  # else it says what is cached
live, source = [], [torch.full((3,), number) for number in range(40)]
for transform in (None, torch.neg):
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
