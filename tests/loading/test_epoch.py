"""Batches of a CachedLoader, gathered here or made by workers: who is woken, what is reused, and what goes wrong."""

import gc
import inspect
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from lightning_stocache.loading import arena, plans
from lightning_stocache.loading.arena import Arena
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.maker import Maker
from lightning_stocache.loading.message import Request
from lightning_stocache.loading.workers import Requests
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from tests.loading.twins import (
    PERSISTENT,
    WAYS,
    Numbers,
    comparable,
    copied,
    in_every_way,
    outcomes,
    pairwise,
    plain_batches,
    prefetch_threads,
    same,
    seed_all,
    to_float,
    totals,
    uncached,
)

LENGTH, MANY = 40, 140
SAMPLE_BYTES = 3 * 5 * 7 + 8
BLOCK = (3, 300, 300)  # over 1 MiB in a batch of 4: gathered alone
BIG = (3, 64, 64)  # 48 KiB in a batch of 4: recycled, not too small

pytestmark = pytest.mark.usefixtures("seeded")


def arenas() -> list[Arena]:
    """The memory of batches that workers make, of all loaders of this process."""
    return [each for each in gc.get_objects() if type(each) is Arena]


def fill(dataset: CachedDataset, indices: Any) -> None:
    dataset.__getitems__(list(indices))


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
def test_a_batch_without_a_miss_wakes_no_worker(monkeypatch):
    """Only a batch of which something is not READY is asked for, and then all of it."""
    requests: list[list[int]] = []
    request = Requests.request

    def noting(self: Requests, number: int, keys: Any) -> Request:
        requests.append(keys.tolist())
        return request(self, number, keys)

    monkeypatch.setattr(Requests, "request", noting)
    with closing(CachedDataset(Numbers(LENGTH))) as dataset:
        fill(dataset, [*range(20), 33])
        batches = list(CachedLoader(dataset, 5, num_workers=1))
        assert same(batches, list(DataLoader(Numbers(LENGTH), 5)))
        assert requests == [list(range(first, first + 5)) for first in range(20, LENGTH, 5)]


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("missed", [range(2, 125, 4), (3, 40, 90, 124)], ids=["97 %", "99.6 %"])
def test_of_a_cache_that_is_nearly_full_workers_make_few_batches(monkeypatch, missed, prefill):
    """Of 1,000 shuffled samples in batches of 8, only the batches with a sample that is not READY."""
    requests: list[list[int]] = []
    request = Requests.request

    def noting(self: Requests, number: int, keys: Any) -> Request:
        requests.append(keys.tolist())
        return request(self, number, keys)

    numbers = Numbers(1000, (3, 32, 32))
    seed_all()
    expected = list(DataLoader(numbers, 8, shuffle=True))
    with closing(CachedDataset(numbers, prefill=prefill)) as dataset:
        missing = [int(expected[batch][1][batch % 8]) for batch in missed]
        fill(dataset, set(range(1000)).difference(missing))
        monkeypatch.setattr(Requests, "request", noting)
        seed_all()
        assert same(list(CachedLoader(dataset, 8, shuffle=True, num_workers=2)), expected)
        counts = totals(dataset)
        assert counts.fills == dataset.cache.filled == 1000
    with_a_miss = [expected[batch][1].tolist() for batch in missed]
    if prefill:  # an idle worker may load a sample before its batch is drawn
        assert [keys for keys in with_a_miss if keys in requests] == requests
    else:
        assert requests == with_a_miss


@in_every_way
def test_batches_belong_to_who_gets_them(arguments, budget, transform):
    """Neither the cache nor a later batch changes with them, and who keeps them, or views, sees them unchanged."""
    expected = plain_batches(Numbers(LENGTH, BIG), transform)
    with closing(CachedDataset(Numbers(LENGTH, BIG), budget, transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, **arguments)
        for image, label in loader:
            image.zero_(), label.zero_()
        whole = list(loader)
        rows = [image[1] for image, _ in loader]
        arrays = [image.numpy()[2] for image, _ in loader]
        for batch, wanted in zip(loader, expected, strict=True):
            assert same(batch, wanted)
            batch[0].zero_()
        loader.close()
        assert same(whole, expected)  # the memory goes with the last who holds it
        for row, array, (image, _) in zip(rows, arrays, expected, strict=True):
            assert torch.equal(row, image[1])
            assert np.array_equal(array, image[2].numpy())


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("num_workers", [0, 1])
def test_later_epochs_take_no_new_memory(num_workers):
    """All lie in a few buffers. A batch of over 1 MiB has one to itself; small ones share blocks of at most 2 MiB."""
    with closing(CachedDataset(Numbers(LENGTH, BLOCK))) as dataset:
        loader = CachedLoader(dataset, 4, shuffle=True, num_workers=num_workers)
        first, *others = [{image.untyped_storage().data_ptr() for image, _ in loader} for _ in range(5)]
        assert len(first) <= (5 if num_workers else 3)
        assert len(set.union(*others)) <= 3
        for size, blocks in ((4, 10), (1, 6)):
            kept = [image.untyped_storage() for image, _ in CachedLoader(dataset, size)]
            assert {storage.nbytes() for storage in kept} == {size * 270_000}
            addresses = {storage.data_ptr() for storage in kept}
            assert sum(address - size * 270_000 not in addresses for address in addresses) == blocks


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_workers_write_later_epochs_to_the_same_memory(persistent):
    """What an outlier has taken is given back. Workers that end, or that `close` ends, leave no memory."""
    batches: Any = [[number] for number in range(12)] + [list(range(LENGTH))]
    with closing(CachedDataset(Numbers(LENGTH, BIG), transform=to_float)) as dataset:
        loader = CachedLoader(dataset, batch_sampler=batches, num_workers=1, persistent_workers=persistent)
        taken = []
        for _ in range(3):
            for batch in loader:
                del batch
            taken.append(sum(memory.allocated_bytes for memory in arenas()))
        loader.close()
        gc.collect()
        sample_bytes = 4 * 3 * 64 * 64
        if persistent:
            assert sample_bytes < taken[0] < 5 * 3 * sample_bytes  # of five slots, with a little more than two samples
            assert max(taken) <= taken[0] + 4 * 4096
        else:
            assert max(taken) <= 4096
        assert all(memory.allocated_bytes <= 4096 for memory in arenas())


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(
    ("kind", "arguments", "budget", "transform"),
    [*((CachedLoader, *way) for way in WAYS.values()), (DataLoader, {}, "auto", None)],
)
def test_an_error_of_the_source_takes_the_place_of_its_batch(kind, arguments, budget, transform):
    """With its type, text and traceback; no memory is lost, and what was loaded before the error is stored."""
    source = Numbers(LENGTH, bad={9: LookupError("sample 9 is broken"), 22: LookupError("sample 22 is broken")})
    without = DataLoader(uncached(source, transform), 4, **arguments)
    expected = list(map(comparable, outcomes(without)))
    assert expected[9 // 4] == (LookupError, "sample 9 is broken", True)
    with closing(CachedDataset(source, budget, transform=transform)) as dataset:
        loader = kind(dataset, 4, **arguments)
        for _ in range(2):
            assert same(list(map(comparable, outcomes(loader))), expected)
        if budget == "auto":
            assert dataset.cache.filled == LENGTH - len({9, 10, 11, 22, 23})
        assert totals(dataset).fills == (0 if dataset.cache is None else dataset.cache.filled)
        if kind is CachedLoader:
            gc.collect()
            assert all(memory.free_slots == memory.slots for memory in arenas())
            loader.close()
    del without


@pytest.mark.processes
@pytest.mark.parametrize("transform", [None, to_float])
def test_iterators_of_persistent_workers_are_one(transform):
    """A batch that is taken in the middle of an epoch, by an iterator of its own, begins the epoch anew for both."""

    def peeked(loader: Any) -> list[Any]:
        """The batches of three epochs, of which the first two are looked into, the second one at each batch."""
        epoch = iter(loader)
        batches = [*(next(epoch) for _ in range(3)), next(iter(loader)), *epoch]
        for _ in range(4):
            batches += [next(epoch := iter(loader)), next(iter(loader)), next(epoch), next(epoch)]
        return [*batches, *loader]

    expected = peeked(DataLoader(uncached(Numbers(LENGTH), transform), 5, **PERSISTENT))
    seed_all()
    with closing(CachedDataset(Numbers(LENGTH), transform=transform)) as dataset:
        loader = CachedLoader(dataset, 5, **PERSISTENT)
        assert same(peeked(loader), expected)
        loader.close()


# ---- a cache that changes ----


@pytest.mark.parametrize("event", ["close", "share"])
@pytest.mark.parametrize(
    ("arguments", "budget", "transform"),
    [WAYS["alone"], WAYS["workers"], WAYS["workers, made"], WAYS["persistent, made"], ({}, "auto", None)],
)
def test_a_cache_may_end_in_the_middle_of_an_epoch(monkeypatch, arguments, budget, transform, event):
    """Closed or shared anew, warm or while it fills, the right batches come, and a new cache is filled."""
    monkeypatch.setattr(plans, "BLOCK_BYTES", 2 * 4 * SAMPLE_BYTES)
    monkeypatch.setattr(plans, "DRAWN", 24)

    def epochs(kind: Any, data: Any, happens: Any) -> tuple[Any, list[Any]]:
        seed_all()
        loader, got = kind(data, 4, shuffle=event == "close", **arguments), list[Any]()
        for number in range(3):
            for at, batch in enumerate(loader):
                got.append(copied(batch))
                if (number, at) == (0, 3):
                    happens()
        return loader, [*got, torch.rand(1) if event == "close" else None]  # new workers may need a seed

    _, expected = epochs(DataLoader, uncached(Numbers(LENGTH), transform), lambda: None)
    with closing(CachedDataset(Numbers(LENGTH), budget, transform=transform)) as dataset:
        if budget == "auto":
            fill(dataset, range(LENGTH))
        loader, got = epochs(CachedLoader, dataset, getattr(dataset, event))
        assert same(got, expected)
        if event == "share":
            assert dataset.cache.filled == len(dataset.cache)
        loader.close()


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
@pytest.mark.parametrize(("transform", "has_files"), [(None, True), (to_float, True), (None, False)])
def test_without_memory_that_workers_can_write_to_batches_are_sent(monkeypatch, caplog, transform, has_files):
    """What is free is promised to the cache, which has not filled it yet, or the system has no such files."""
    batches: Any = [list(range(30)), [30], list(range(31, 40))]
    expected = list(DataLoader(uncached(Numbers(LENGTH), transform), batch_sampler=batches))
    with closing(CachedDataset(Numbers(LENGTH), transform=transform)) as dataset:
        fill(dataset, range(0, LENGTH, 3))
        cache = dataset.cache

        def left(*_: Any) -> FreeMemory:
            return FreeMemory(None, 2**40, cache.segment.size + 1000 - cache.memory_bytes)

        if has_files:
            monkeypatch.setattr(arena, "FreeMemory", SimpleNamespace(now=left))
        else:
            monkeypatch.delattr(arena.os, "memfd_create")
        loader = CachedLoader(dataset, batch_sampler=batches, multiprocessing_context="fork", **PERSISTENT)
        for _ in range(3):
            assert same([copied(batch) for batch in loader], expected)
            assert [memory.allocated_bytes for memory in arenas()] == ([4096] if has_files else [])  # of its table
        assert cache.filled == LENGTH
        assert caplog.text.count("workers send batches in messages") == has_files
        loader.close()


@pytest.mark.processes
@pytest.mark.parametrize("transform", [None, to_float])
def test_persistent_workers_keep_the_memory_of_batches_while_they_make_some(transform):
    """To take the pages anew in each epoch made short epochs twice as long. A full cache needs no worker's memory."""
    with closing(CachedDataset(Numbers(LENGTH), transform=transform)) as dataset:
        loader = CachedLoader(dataset, batch_size=4, multiprocessing_context="fork", **PERSISTENT)
        allocated = []
        for _ in range(4):
            deque(loader, maxlen=0)  # no batch is held
            [memory] = arenas()
            assert memory.allocated_bytes <= memory.slots * max(memory.most_bytes, 4096) + 4096  # of the table
            allocated.append(memory.allocated_bytes)
        makes_batches = transform is not None
        assert (allocated[-1] > 4096) == makes_batches
        if makes_batches:
            assert allocated[-1] >= allocated[1]
        loader.close()


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(("indices", "warm"), [(None, True), (None, False), (range(10), True)])
def test_a_source_that_has_grown_is_loaded_beyond_its_cache(indices: Any, warm: bool) -> None:
    """Samples that the cache does not know come from the source, and take nobody's slot, also in the first epoch."""
    source = Numbers(10)
    with closing(CachedDataset(source, indices=indices)) as dataset:
        loader = CachedLoader(dataset, 4)
        if warm:
            list(loader)
        source.length = 13
        last: Any = [12, 11, 10]
        assert same(list(CachedLoader(dataset, 3, sampler=last)), list(DataLoader(Numbers(13), 3, sampler=last)))
        dataset.__getitems__([10, 11, -1])
        assert same(list(loader), list(DataLoader(Numbers(13), 4)))
        assert same([dataset[index] for index in range(13)], [source[index] for index in range(13)])
        assert dataset.cache.filled == 10


def test_the_thread_runs_only_while_an_epoch_does(monkeypatch: pytest.MonkeyPatch):
    """It starts with the first batch that can be gathered ahead of a slow consumer, and ends with epoch or iterator."""
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])  # a busy machine makes every consumer slow
    with closing(CachedDataset(Numbers(LENGTH, BLOCK))) as dataset:
        fill(dataset, range(LENGTH))
        loader = CachedLoader(dataset, 4)
        for _ in loader:
            assert prefetch_threads() == 0
        iterator, last = iter(loader), len(loader) - 1
        for number, _ in enumerate(iterator):
            assert prefetch_threads() == (0 < number < last) or number == last
            now[0] += 1_000_000
        assert prefetch_threads() == 0
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
            now[0] += 1_000_000
        assert prefetch_threads() == 1
        del iterator
        assert prefetch_threads() == 0


# ---- workers ----


def killed_unheard(victim: BaseProcess) -> None:
    """It is dead, and torch's handler of SIGCHLD has not run: the consumer is in another thread, or looks first."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        victim.kill()
        victim.join(120)
    finally:
        signal.signal(signal.SIGCHLD, handler)


def killed_in_vain(victim: BaseProcess) -> None:
    """Torch's handler raises in code that swallows the error, as Lightning's broadcast of SIGTERM does."""
    with suppress(RuntimeError):
        victim.kill()
        time.sleep(120)
        pytest.fail("torch has said nothing")


def killed_while_idle(victim: BaseProcess) -> None:
    """Nobody finds it dead before it is asked: it ends as the next epoch begins."""
    os.kill(cast(int, victim.pid), signal.SIGSTOP)
    threading.Timer(0.5, victim.kill).start()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kill", "transform", "within", "budget"),
    [
        (killed_unheard, None, False, "50%"),
        (killed_in_vain, to_float, False, "50%"),
        (killed_unheard, to_float, True, "50%"),
        (killed_while_idle, None, False, "auto"),
    ],
)
def test_a_worker_that_is_killed_between_epochs_is_an_error_once(kill, transform, within, budget):
    """Or within an epoch. This or the next epoch raises it; the one after has new workers, and is whole. Also if it was
    to read stored samples again."""
    with closing(CachedDataset(Numbers(LENGTH), budget, transform=transform)) as dataset:
        loader = CachedLoader(dataset, 1, **PERSISTENT)
        batches = iter(loader)
        next(batches)
        if not within:
            assert len(list(batches)) == LENGTH - 1
        victim = active_children()[0]
        kill(victim)
        with pytest.raises(RuntimeError, match=rf"DataLoader worker .*{victim.pid}.* exited unexpectedly"):
            list(batches if within else loader)
        assert [label for _, batch in loader for label in batch.tolist()] == list(range(LENGTH))
        assert len(active_children()) == 2
        loader.close()


class OwnBatch:
    """A user's batch, which pins itself."""

    def __init__(self, samples: list[Any]) -> None:
        self.images, self.labels = torch.stack([image for image, _ in samples]), [label for _, label in samples]

    def pin_memory(self) -> "OwnBatch":
        self.images = self.images.pin_memory()
        return self


def emulate_device(monkeypatch: pytest.MonkeyPatch, pinned: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """DataLoader finds a device, and pins a tensor by a function."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: pinned(tensor))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    if hasattr(torch, "accelerator"):  # since torch 2.6
        answers: dict[str, Any] = {
            "is_available": True,
            "current_accelerator": torch.device("cuda"),
            "current_device_index": 0,
            "set_device_index": None,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.accelerator, name, lambda *_, answer=answer, **__: answer, raising=False)


@pytest.mark.processes
@pytest.mark.parametrize("collate_fn", [None, OwnBatch])
@pytest.mark.parametrize(("arguments", "budget", "transform"), [WAYS["workers"], WAYS["persistent, made"]])
def test_batches_of_workers_are_pinned_by_dataloaders_thread(monkeypatch, arguments, budget, transform, collate_fn):
    """None is copied on the trainer's thread, also of the user's own class; and all memory comes back."""
    on_main_thread = list[bool]()

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        on_main_thread.append(threading.current_thread() is threading.main_thread())
        return tensor.clone()

    def contents(batch: Any) -> Any:
        return copied([batch.images, batch.labels] if isinstance(batch, OwnBatch) else batch)

    source = Numbers(LENGTH, BIG)
    expected = list(map(contents, DataLoader(uncached(source, transform), 4, collate_fn=collate_fn)))
    with closing(CachedDataset(source, budget, transform=transform)) as dataset:
        emulate_device(monkeypatch, pinned)
        loader = CachedLoader(dataset, 4, pin_memory=True, collate_fn=collate_fn, **arguments)
        for _ in range(2):
            assert same(list(map(contents, loader)), expected)
        assert on_main_thread
        assert not any(on_main_thread)
        gc.collect()
        assert all(memory.free_slots == memory.slots for memory in arenas())
        loader.close()


@pytest.mark.processes
@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("persistent", [False, True])
def test_once_all_is_cached_workers_are_asked_no_more(monkeypatch, persistent):
    """In the middle of an epoch, which may never end; draws stay at DataLoader's moments."""
    numbers: list[int] = []
    request = Requests.request
    monkeypatch.setattr(Requests, "request", lambda self, *asked: numbers.append(asked[0]) or request(self, *asked))

    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield from torch.randperm(LENGTH).tolist()

    def drawn(kind: Any, data: Any) -> tuple[list[Any], Any]:
        seed_all()
        batches = iter(kind(data, 4, sampler=Endless(), num_workers=2, persistent_workers=persistent))
        got = [(copied(next(batches)), torch.rand(1)) for _ in range(10 * LENGTH // 4)]
        return got, torch.rand(1)

    expected = drawn(DataLoader, Numbers(LENGTH))
    with closing(CachedDataset(Numbers(LENGTH))) as dataset:
        assert same(drawn(CachedLoader, dataset), expected)
        assert dataset.cache.full
        assert len(numbers) < 3 * LENGTH // 4  # the first pass, and what was under way


@pytest.mark.processes
@pytest.mark.skipif("in_order" not in inspect.signature(DataLoader.__init__).parameters, reason="needs torch 2.6")
@in_every_way
def test_batches_may_come_in_any_order(arguments, budget, transform):
    """With `in_order=False` each batch comes once, from the cache, too; its position has no meaning within an epoch."""
    if "num_workers" not in arguments:
        arguments = {"num_workers": 1}
    expected = plain_batches(Numbers(LENGTH), transform)
    with closing(CachedDataset(Numbers(LENGTH), budget, transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, in_order=False, **arguments)
        for _ in range(3):
            batches = sorted((copied(batch) for batch in loader), key=lambda batch: int(batch[1][0]))
            assert same(batches, expected)
        assert loader.state_dict()["batches"] == 0
        batches = iter(loader)
        next(batches)
        with pytest.raises(RuntimeError, match="in_order=False"):
            loader.state_dict()
        loader.close()
        assert totals(dataset).hits


@pytest.mark.processes
@pytest.mark.epoch_one_reads_all
def test_batches_that_are_ready_by_their_turn_are_not_asked_for(monkeypatch):
    """Of a sampler whose draws nobody can notice, which repeats indices: it is drawn from far ahead."""
    requests: list[int] = []
    request = Requests.request
    monkeypatch.setattr(Requests, "request", lambda self, *asked: requests.append(asked[0]) or request(self, *asked))

    def arguments() -> dict[str, Any]:
        seed_all()
        return {"sampler": RandomSampler(range(LENGTH), replacement=True, num_samples=2000), "num_workers": 2}

    expected = list(DataLoader(Numbers(LENGTH), 4, **arguments()))
    with closing(CachedDataset(Numbers(LENGTH))) as dataset:
        assert same([copied(batch) for batch in CachedLoader(dataset, 4, **arguments())], expected)
        assert dataset.cache.full
        assert len(requests) < len(expected) // 2


class Failing(Sampler[int]):
    """A sampler that fails in the middle of its second epoch, or yields no batch there."""

    def __init__(self, value: Any) -> None:
        self.value, self.epoch = value, 0

    def __len__(self) -> int:
        return LENGTH // 4

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for number, batch in enumerate(torch.randperm(LENGTH).view(-1, 4).tolist()):
            if self.epoch > 1 and number == 5:
                if self.value is LookupError:
                    raise LookupError("no more")
                yield self.value
            yield batch


@pytest.mark.processes
@pytest.mark.parametrize("value", [LookupError, None], ids=["error", "None"])
@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2}, PERSISTENT], ids=["alone", "workers", "persistent"])
def test_a_sampler_that_fails_costs_the_batches_that_it_costs_without_a_cache(arguments, value):
    """Where it fills, and where all is cached and no worker runs: an error of a draw takes the place of a batch."""

    def epochs(kind: Any, data: Any) -> list[Any]:
        seed_all()
        loader = kind(data, batch_sampler=Failing(value), **arguments)
        got = [[type(each) if isinstance(each, Exception) else each for each in outcomes(loader)] for _ in range(3)]
        return [*got, torch.rand(1)]

    expected = epochs(DataLoader, Numbers(LENGTH))
    with closing(CachedDataset(Numbers(LENGTH))) as dataset:
        assert same(epochs(CachedLoader, dataset), expected)


# ---- a dataset that is cached whole: small batches are gathered together, and nobody can tell ----


@pytest.fixture(scope="module")
def dataset() -> Iterator[CachedDataset]:
    with closing(CachedDataset(Numbers(MANY))) as dataset:
        fill(dataset, range(MANY))
        yield dataset


CASES = pairwise(
    size=(1, 7, 100, 139, 140, 200),
    order=("sequential", "shuffled", "locality"),
    block=(1, 5, 100),
    drop_last=(False, True),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_batches_are_those_of_a_dataloader(dataset: CachedDataset, monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    """Bit for bit, wherever blocks and drawn stretches end; hits count when a batch is handed out."""
    order, block, size, drop_last = (case[name] for name in ("order", "block", "size", "drop_last"))
    monkeypatch.setattr(plans, "BLOCK_BYTES", block * SAMPLE_BYTES)
    monkeypatch.setattr(plans, "DRAWN", 60)
    blocks: list[int] = []
    make_block = Maker.block

    def noting(self: Maker, cache: Any, places: Any, *arguments: Any) -> Any:
        blocks.append(len(places))
        return make_block(self, cache, places, *arguments)

    monkeypatch.setattr(Maker, "block", noting)
    made: list[list[Any]] = []
    for kind, source in ((DataLoader, dataset.source), (CachedLoader, dataset)):
        torch.manual_seed(1)
        dealt = LocalitySampler(dataset, 1, 0, batch_size=size, ring=dataset.ring, nodes=((0,),))
        sampler = dealt if order == "locality" else None
        loader = kind(source, size, order == "shuffled", sampler, drop_last=drop_last)
        before, served = totals(dataset), 0
        made.append([])
        for batch in (batch for _ in range(2) for batch in loader):
            made[-1].append(copied(batch))
            served += len(batch[1]) * (kind is CachedLoader)
            moved = totals(dataset) - before
            assert (moved.hits, moved.bytes_from_cache, moved.served) == (served, served * SAMPLE_BYTES, served)
        made[-1].append(torch.rand(1))
    most = max(block // size, 1) * size
    drawn = max(60 // size, 1) * size
    length = MANY // size * size if drop_last else MANY
    stretches = [min(drawn, length - first) for first in range(0, length, drawn)]
    assert blocks == 2 * [min(most, left - first) for left in stretches for first in range(0, left, most)]
    assert len(made[0]) > 1 or drop_last
    assert same(*made)


@pytest.mark.processes
@pytest.mark.usefixtures("seeded")
def test_loaders_of_full_caches_that_begin_together_draw_in_turn() -> None:
    """Persistent workers start all the same, and the seed of each order is drawn as its epoch begins."""
    source = Numbers(LENGTH)
    arguments: dict[str, Any] = PERSISTENT | {"batch_size": 7, "shuffle": True}
    seed_all()
    expected = [
        [batch[1].tolist() for batch in both] for both in zip(*pair(DataLoader, source, arguments), strict=True)
    ]
    with closing(CachedDataset(source)) as dataset:
        for index in range(LENGTH):
            dataset[index]
        seed_all()
        loaders = pair(CachedLoader, dataset, arguments)
        assert [[batch[1].tolist() for batch in both] for both in zip(*loaders, strict=True)] == expected
        for loader in loaders:
            loader.close()


def pair(kind: Any, dataset: Any, arguments: dict[str, Any]) -> list[Any]:
    """Two loaders of a kind."""
    return [kind(dataset, **arguments), kind(dataset, **arguments)]
