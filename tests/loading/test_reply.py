"""Whole batches that workers make: what lies in their memory, what is sent, what travels as DataLoader sends it."""

import collections
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_stocache.loading.batch_pool import BatchPool, SharedBatch, fields_of
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.worker_pool import Reply, Request, Responder, unpacked
from tests.loading.twins import STRUCTURES, InBatches, Numbers, same, totals
from tests.sources import CountedSource


def replied(responder: Responder, samples: Any, shared: SharedBatch | None, pool: BatchPool) -> Any:
    """The batch of a worker that is asked for those samples, in the main process, after its way through a pipe."""
    responder.dataset = CachedDataset(samples, defer=True)
    request = Request(list(range(len(samples))), None, None if shared is None else shared.handle)
    reply: Reply = pickle.loads(pickle.dumps(responder.__getitems__(request)))
    return unpacked(reply.batch, shared, pool) if reply.packed else reply.batch


def through(samples: list[Any]) -> tuple[Any, Any]:
    """The batch as it comes without memory of its own, and then in it."""
    pool, responder = BatchPool(shared=3), Responder(None)
    first = replied(responder, samples, None, pool)
    second = replied(responder, samples, pool.take_shared(), pool)
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


ODD: dict[str, list[Any]] = {
    "shape": [torch.ones(2), torch.zeros(3), torch.ones(2)],
    "dtype": [torch.ones(2), torch.full((2,), 0.1, dtype=torch.float64), torch.ones(2)],
    "lengths": [(1, 2), (1,)],
    "keys": [{"a": 1}, {"b": 2}],
    "objects": [object(), object()],
    "types": [torch.zeros(2), None],
}


@pytest.mark.parametrize("samples", ODD.values(), ids=ODD)
def test_samples_that_differ_are_left_to_default_collate(samples):
    """In shared memory too, whose rows they do not fit: whatever it makes of them, or its error, in its words."""

    def outcome(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as refused:
            return type(refused), str(refused)

    pool, responder = BatchPool(shared=3), Responder(None)
    replied(responder, [torch.zeros(100)] * 3, pool.take_shared(), pool)
    shared = pool.take_shared()
    assert shared is not None
    for place in (None, shared):
        got = outcome(lambda place=place: replied(responder, samples, place, pool))
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


def asked(dataset: CachedDataset, indices: list[int], missing: list[int], place: Any) -> Any:
    """The reply to a request for the samples at some positions of a batch, through a pipe."""
    return pickle.loads(pickle.dumps(Responder(dataset).__getitems__(Request(indices, missing, place))))


@pytest.mark.processes
def test_missing_samples_are_put_into_their_rows(dataset):
    """At their positions in the batch, with nothing in the message; the other rows are left alone."""
    codec, pool = dataset.cache.codec, BatchPool(shared=1)
    shared = pool.take_shared([10_000])
    memory = fields_of(shared, codec.sizes(LENGTH))
    for field in memory:
        field.fill(9)
    missing = without_slot(dataset)
    assert asked(dataset, list(range(LENGTH)), missing, shared.handle) == Reply()
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
@pytest.mark.parametrize(("wrap", "shared"), [(InBatches, True), (lambda source: source, True), (InBatches, False)])
def test_what_has_become_ready_meanwhile_is_not_loaded_again(tmp_path, wrap, shared):
    """The rest is loaded, stored where it has a slot, and counted once."""
    source = CountedSource(LENGTH, log_path=tmp_path / "loads")
    with closing(CachedDataset(wrap(source), "50%")) as dataset:
        pool = BatchPool(shared=1)
        memory = pool.take_shared([10_000]) if shared else None
        place = None if memory is None else memory.handle
        without = without_slot(dataset)
        with_slot = [index for index in range(LENGTH) if index not in without]
        dataset.__getitems__(with_slot[:2])
        loads = source.loads
        asked(dataset, list(range(LENGTH)), list(range(LENGTH)), place)
        assert source.loads - loads == LENGTH - 2
        assert dataset.cache.filled == len(with_slot)
        assert (totals(dataset).served, totals(dataset).hits) == (LENGTH + 2, 2)
        asked(dataset, [*without[:1] * 2, with_slot[0]], [0, 1, 2], place)
        assert totals(dataset).served == LENGTH + 5
        del memory
        pool.close()
