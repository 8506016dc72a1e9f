"""Whole batches that workers make: what lies in their memory, what is sent, what travels as DataLoader sends it."""

from __future__ import annotations

import collections
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_stocache.loading.batch_pool import BatchPool, SharedBatch
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.worker_pool import Reply, Request, Responder, unpacked
from tests.loading.twins import STRUCTURES, InBatches, Numbers, same
from tests.sources import CountedSource


def reply_to(responder: Responder, samples: Any, shared: SharedBatch | None) -> Reply:
    """What a worker replies that is asked for a batch of those samples."""
    responder.dataset = CachedDataset(samples, defer=True)
    return responder.__getitems__(Request(list(range(len(samples))), None, None if shared is None else shared.handle))


def sent(reply: Reply) -> Reply:
    """After the way that it takes through a pipe."""
    return pickle.loads(pickle.dumps(reply))


def received(reply: Reply, shared: SharedBatch | None, pool: BatchPool) -> Any:
    """The batch in the main process."""
    return unpacked(reply.batch, shared, pool) if reply.packed else reply.batch


def through(samples: list[Any]) -> tuple[Any, Any]:
    """The batch as it comes without memory of its own, and then in it."""
    pool, responder = BatchPool(shared=3), Responder(None)
    first = received(sent(reply_to(responder, samples, None)), None, pool)
    shared = pool.take_shared()
    second = received(sent(reply_to(responder, samples, shared)), shared, pool)
    pool.close()
    return first, second


SAMPLES: dict[str, Callable[[int], Any]] = STRUCTURES | {
    "a string": lambda i: f"file {i}",
    "strings": lambda i: (torch.tensor([i]), f"file {i}", b"bytes"),
    "not contiguous": lambda i: torch.arange(12).reshape(3, 4).t() + i,
    "conjugated": lambda i: torch.tensor([1 + 1j * i]).conj(),
    "defaultdict": lambda i: (collections.defaultdict(list, a=torch.tensor([i])), torch.ones(99)),
    "deque": lambda i: (collections.deque([torch.tensor([i])]), torch.ones(99)),
    "UserDict": lambda i: (collections.UserDict(a=torch.tensor([i])), torch.ones(99)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_batches_are_those_of_default_collate(name):
    """In shared memory or not, whatever the samples are."""
    samples = [SAMPLES[name](i) for i in range(3)]
    expected = default_collate(samples)
    for got in through(samples):
        assert same(got, expected)


class Graph:
    """A type of the user's."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes


class Point(tuple[Any, ...]):
    """A tuple of the user's."""


def collate_graphs(graphs: list[Graph], *, collate_fn_map: Any = None) -> Graph:
    return Graph(default_collate([graph.nodes for graph in graphs]))


def collate_points(points: list[Point], *, collate_fn_map: Any = None) -> str:
    return f"{len(points)} points"


def test_types_that_the_user_registered_are_collated_by_the_users_function(monkeypatch):
    """Registered after the import too; what it makes is not looked into."""
    monkeypatch.setitem(default_collate_fn_map, Graph, collate_graphs)
    monkeypatch.setitem(default_collate_fn_map, Point, collate_points)
    for got in through([(Graph(torch.tensor([i])), i) for i in range(3)]):
        assert got[0].nodes.flatten().tolist() == [0, 1, 2]
    for got in through([{"p": Point((torch.tensor(i),))} for i in range(3)]):
        assert got == {"p": "3 points"}


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(2), torch.zeros(3)],
        [(1, 2), (1,)],
        [{"a": 1}, {"b": 2}],
        [object(), object()],
        [torch.zeros(2), torch.zeros(2, dtype=torch.int64).view(torch.float64), None],
    ],
    ids=["shapes", "lengths", "keys", "objects", "types"],
)
def test_what_default_collate_refuses_is_its_error(samples):
    """With its words."""
    with pytest.raises(Exception) as expected:
        default_collate(samples)
    with pytest.raises(type(expected.value)) as got:
        reply_to(Responder(None), samples, None)
    assert str(got.value) == str(expected.value)


def made(pool: BatchPool, responder: Responder, samples: list[Any]) -> Any:
    """A batch, made in the memory that the pool has for it."""
    shared = pool.take_shared()
    return received(sent(reply_to(responder, samples, shared)), shared, pool)


def test_tensors_lie_in_shared_memory_and_labels_in_the_message():
    """The batch is that memory: nothing is copied but the labels."""
    pool, responder = BatchPool(shared=3), Responder(None)
    samples = [(torch.full((100,), float(i)), torch.full((7,), i), i) for i in range(4)]
    made(pool, responder, samples)
    shared = pool.take_shared()
    reply = reply_to(responder, samples, shared)
    assert len(pickle.dumps(reply)) < 1000
    images, others, _ = received(reply, shared, pool)
    start = shared.tensor(0, torch.uint8, (1,)).data_ptr()
    assert (images.data_ptr() - start, others.data_ptr() - start) == (0, 1600)
    shared.tensor(0, torch.float32, (1,))[0] = 9
    assert images[0, 0] == 9
    del images, others, shared
    pool.close()


def test_the_last_shared_memory_is_copied_out_of():
    """A trainer that keeps batches is lent all but one; the last one is used again and again."""
    pool, responder = BatchPool(shared=3), Responder(None)
    samples = [(torch.full((100,), float(i)), i) for i in range(4)]
    held = [made(pool, responder, samples) for _ in range(7)]
    assert pool.may_lend
    assert len({batch[0].data_ptr() for batch in held}) == 7
    assert all(same(batch, default_collate(samples)) for batch in held)
    held.clear()
    pool.close()


def test_what_does_not_fit_is_sent_and_the_next_memory_is_larger():
    """And the worker lets go of the one that it has replaced."""
    pool, responder = BatchPool(shared=1), Responder(None)
    small, large = [torch.ones(10)] * 2, [torch.full((1000,), 3.0)] * 2
    made(pool, responder, small)
    assert same(made(pool, responder, large), default_collate(large))
    shared = pool.take_shared()
    assert shared is not None
    reply = reply_to(responder, large, shared)
    assert len(pickle.dumps(reply)) < 500
    assert same(received(reply, shared, pool), default_collate(large))
    assert len(responder.attached) == 1
    del shared
    pool.close()


@pytest.mark.processes
def test_samples_are_put_away_as_they_come():
    """In shared memory no sample's tensor is kept until the batch is complete; the batch is the same."""
    pool, alive = BatchPool(shared=3), list[Any]()

    def image(number: int) -> tuple[torch.Tensor, int]:
        assert not [before for before in alive[:-1] if before() is not None]
        image = torch.full((100,), float(number))
        alive.append(weakref.ref(image))
        return image, number

    expected = default_collate([(torch.full((100,), float(number)), number) for number in range(6)])
    made(pool, Responder(None), [(torch.zeros(100), 0)] * 6)
    shared = pool.take_shared()
    with closing(CachedDataset(list(range(6)), transform=image)) as dataset:
        reply = Responder(dataset).__getitems__(Request(list(range(6)), None, shared.handle))
    assert len(alive) == 6
    batch = received(reply, shared, pool)
    assert same(batch, expected)
    del batch
    pool.close()


@pytest.mark.parametrize("other", [torch.zeros(3), torch.full((2,), 0.1, dtype=torch.float64)], ids=["shape", "dtype"])
def test_a_sample_that_differs_in_shared_memory_is_as_without(other):
    """What does not fit the rows of the first sample is left to default_collate, whatever it makes of it."""
    samples = [torch.ones(2), other, torch.ones(2)]
    pool, responder = BatchPool(shared=3), Responder(None)
    made(pool, responder, [torch.zeros(100)] * 3)
    shared = pool.take_shared()
    assert shared is not None

    def outcome(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except RuntimeError as refused:
            return str(refused)

    got = outcome(lambda: received(sent(reply_to(responder, samples, shared)), shared, pool))
    assert same(got, outcome(lambda: default_collate(samples)))
    pool.close()


# ---- the samples that a batch misses


LENGTH = 12


@pytest.fixture
def dataset() -> Iterator[CachedDataset]:
    """Half of it has slots, all of which are filled."""
    dataset = CachedDataset(Numbers(LENGTH), "50%")
    dataset.__getitems__(list(range(LENGTH)))
    yield dataset
    dataset.close()


def without_slot(dataset: CachedDataset) -> list[int]:
    return [index for index in range(LENGTH) if not dataset.cache.has_place(index)]


def asked(dataset: CachedDataset, missing: list[int], place: Any, of_batch: Iterable[int] = range(LENGTH)) -> Any:
    """The reply to a request for the samples at some positions of a batch, through a pipe."""
    return sent(Responder(dataset).__getitems__(Request(list(of_batch), missing, place)))


@pytest.mark.processes
def test_missing_samples_are_put_into_their_rows(dataset):
    """At their positions in the batch, with nothing in the message; the other rows are left alone."""
    codec, pool = dataset.cache.codec, BatchPool(shared=1)
    shared = pool.take_shared([10_000])
    memory = shared.fields(codec.sizes(LENGTH))
    for field in memory:
        field.fill(9)
    missing = without_slot(dataset)
    assert asked(dataset, missing, shared.handle) == Reply()
    samples = codec.split(memory, LENGTH)
    for position in range(LENGTH):
        image, label = samples[position]
        if position in missing:
            assert same((image, label), Numbers(LENGTH)[position])
        else:
            assert image.eq(9).all()
    del memory, shared, samples, image, field
    pool.close()


@pytest.mark.processes
def test_without_memory_the_whole_batch_is_sent(dataset):
    """As plain bytes, not as tensors in shared memory of torch's own."""
    answer = asked(dataset, without_slot(dataset), None)
    expected = default_collate([dataset.source[index] for index in range(LENGTH)])
    assert answer.packed
    assert all(isinstance(part.content, np.ndarray) for part in answer.batch)
    assert same(received(answer, None, BatchPool()), expected)


@pytest.mark.processes
def test_a_worker_whose_cache_is_closed_makes_the_whole_batch(dataset):
    """Then nothing is READY, whatever the main process thinks, and there is no codec to hold samples to."""
    dataset.close()
    answer = asked(dataset, [3, 4], None)
    assert same(received(answer, None, BatchPool()), default_collate([dataset.source[i] for i in range(LENGTH)]))


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_what_has_become_ready_meanwhile_is_not_loaded_again(tmp_path, batched, shared):
    """The rest is loaded, stored where it has a slot, and counted once."""
    source = CountedSource(LENGTH, log_path=tmp_path / "loads")
    with closing(CachedDataset(InBatches(source) if batched else source, "50%")) as dataset:
        pool = BatchPool(shared=1)
        memory = pool.take_shared([10_000]) if shared else None
        place = None if memory is None else memory.handle
        with_slot = [index for index in range(LENGTH) if index not in without_slot(dataset)]
        dataset.__getitems__(with_slot[:2])
        loads = source.loads
        asked(dataset, list(range(LENGTH)), place)
        assert source.loads - loads == LENGTH - 2
        assert dataset.cache.filled == len(with_slot)
        assert dataset.counters.totals().served == LENGTH + 2
        assert dataset.counters.totals().hits == 2
        twice = without_slot(dataset)[:1] * 2 + with_slot[:1]
        asked(dataset, [0, 1, 2], place, twice)
        assert dataset.counters.totals().served == LENGTH + 5
        del memory
        pool.close()


@pytest.mark.processes
def test_nothing_is_no_sample(dataset, monkeypatch):
    """Where the worker's cache is closed, what the source gives is collated, not taken for stored."""
    dataset.close()
    monkeypatch.setattr(Numbers, "__getitem__", lambda source, index: None)
    with pytest.raises(TypeError, match="found <class 'NoneType'>"):
        asked(dataset, list(range(LENGTH)), None)
