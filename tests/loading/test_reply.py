"""Whole batches that workers make: what lies in their memory, what is sent, what travels as DataLoader sends it."""

import collections
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_stocache.loading.batch_pool import BatchPool, SharedBatch, fields_of
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


def collate_graphs(graphs: list[Graph], *, collate_fn_map: Any = None) -> Graph:
    return Graph(default_collate([graph.nodes for graph in graphs]))


def test_types_that_the_user_registered_are_collated_by_the_users_function(monkeypatch):
    """Registered after the import too; what it makes is not looked into."""
    monkeypatch.setitem(default_collate_fn_map, Graph, collate_graphs)
    for got in through([(Graph(torch.tensor([i])), i) for i in range(3)]):
        assert got[0].nodes.flatten().tolist() == [0, 1, 2]


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
    memory = fields_of(shared, codec.sizes(LENGTH))
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
