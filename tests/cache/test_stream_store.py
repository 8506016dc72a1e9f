"""The samples of a stream in memory: numbered, found by their marks, sorted by shard, seen from other processes."""

import pickle
import random
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import NO_PLACE
from lightning_stocache.cache.stream import Shard, StreamLedger, StreamStore
from lightning_stocache.node.segment import Segment
from tests.processes import call

SPEC = SampleSpec.infer(1)


def filled(store: StreamStore, shard: Shard, epoch: int, samples: list[Any]) -> None:
    """Store samples, marked by their position."""
    for mark, sample in enumerate(samples):
        assert store.append(shard, epoch, sample, mark) is not None


def test_samples_are_sorted_by_shard() -> None:
    """Whichever shard was faster, samples are in the order of shards and positions."""
    shards = [Shard(0, 0, 2, key=1), Shard(0, 1, 2, key=1)]
    with closing(StreamStore.empty(SPEC, 1 << 20)) as store:
        epochs = [store.ledger.begin(shard) for shard in shards]
        for number in (10, 11, 0, 12, 1, 2):
            store.append(shards[number // 10], epochs[0], number, number)
        indices, from_shards = store.in_order()
        assert from_shards.tolist() == [0, 0, 0, 1, 1, 1]
        assert list(store.read(store.lookup(indices))) == [0, 1, 2, 10, 11, 12]
        assert [list(store.marked(mark)) for mark in (11, 5)] == [[11], []]
        places = store.lookup(np.array([5, 6]), verify=True)
        assert (places != NO_PLACE).tolist() == [True, False]
        assert store.divide([6]) == ([6], [])


def test_an_epoch_that_is_over_stores_nothing() -> None:
    """A late process writes nothing into the memory of the next epoch."""
    late, next_one = Shard(key=1), Shard(key=2)
    with closing(StreamStore.empty(SPEC, 1 << 20)) as store:
        before = store.ledger.begin(late)
        epoch = store.ledger.begin(next_one)
        assert store.append(late, before, 5, 5) is None
        assert store.append(next_one, epoch, 6, 6) is not None
        assert store.filled == 1


def test_clear_gives_the_memory_back() -> None:
    """The next samples begin with number zero, in columns that were released, too."""
    shard = Shard()
    with closing(StreamStore.empty(SampleSpec.infer(torch.zeros(1000)), 8 << 20)) as store:
        epoch = store.ledger.begin(shard)
        filled(store, shard, epoch, [torch.zeros(1000)] * 500)
        assert store.memory_bytes > 1_900_000
        store.clear()
        assert store.memory_bytes == store.filled == 0
        filled(store, shard, epoch, [torch.ones(1000)])
        assert [sample.sum() for sample in store.marked(0)] == [1000]


def in_another_process(content: bytes) -> Any:
    store = pickle.loads(content)
    shard = Shard(0, 1, 2, key=9)
    store.append(shard, store.ledger.begin(shard), 7, 77)
    found = list(store.marked(5))
    store.close()
    return found


@pytest.mark.processes
def test_another_process_opens_the_same() -> None:
    """Each process finds the samples of the other."""
    shard = Shard(0, 0, 2, key=9)
    with closing(StreamStore.empty(SPEC, 1 << 20)) as store:
        epoch = store.ledger.begin(shard)
        store.append(shard, epoch, 4, 5)
        assert call(in_another_process, pickle.dumps(store)) == [4]
        assert list(store.marked(77)) == [7]
        assert store.ledger.begin(Shard(key=10)) == 2
        assert store.ledger.passed(1) is None  # none has ended


def test_a_ledger_counts_like_a_list() -> None:
    """Random epochs of random shards, announced or not, whole or broken off, are compared with plain numbers."""
    dice = random.Random(0)
    with closing(StreamLedger.create(ranks=2)) as ledger:
        expected: int | None = None
        for epoch in range(1, 60):
            workers, passed, whole = dice.randrange(1, 4), 0, True
            for rank in range(2):
                if dice.random() < 0.5:
                    assert ledger.announce(rank) == epoch
                assert ledger.begin(Shard(rank, 0, workers, key=epoch)) == epoch
            assert epoch == 1 or ledger.passed(epoch - 1) == expected
            ledger.clear(lambda: None)
            for shard in [Shard(rank, worker, workers, key=epoch) for rank in range(2) for worker in range(workers)]:
                assert shard.worker == 0 or ledger.begin(shard) == epoch
                for _ in range(dice.randrange(5)):
                    assert ledger.take_number(shard) == passed
                    passed += 1
                if dice.random() < 0.9:
                    ledger.end(shard, epoch)
                else:
                    whole = False
            expected = passed if whole else None
            assert ledger.passed(epoch, length=0) == passed


def test_a_decision_is_taken_once() -> None:
    """The second process receives the decision of the first, and a final decision stays."""
    with closing(StreamLedger.create(1)) as ledger:
        asked = list[int]()

        def decide(mode: Any) -> Any:
            asked.append(1)
            return mode

        epoch = ledger.begin(Shard(key=1))
        assert [ledger.decide(epoch, lambda late: decide("stream")) for _ in range(2)] == ["stream"] * 2
        epoch = ledger.begin(Shard(key=2))
        assert [ledger.decide(epoch, lambda late: decide("cache")) for _ in range(2)] == ["cache"] * 2
        epoch = ledger.begin(Shard(key=3))
        assert ledger.decide(epoch, lambda late: decide("stream")) == "cache"
        assert len(asked) == 2
        assert [ledger.pass_by(), ledger.pass_by()] == ["cache", "pass"]
        assert ledger.mode == "pass"


def test_a_stream_promises_what_it_was_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are as much longer than their memory, for other jobs to see; and few samples take little memory."""
    create, made = Segment.create, list[Segment]()
    monkeypatch.setattr(Segment, "create", lambda *given, **more: made.append(create(*given, **more)) or made[-1])
    shard, granted = Shard(), 64 << 20
    codec = RecordCodec.infer(["text " * 20])
    with closing(StreamStore.empty(codec, granted)) as store:
        missing = sum(segment.size - segment.allocated_bytes for segment in made)
        assert granted - 2**14 <= missing <= granted + 2**14
        epoch = store.ledger.begin(shard)
        filled(store, shard, epoch, ["text " * 20] * 2000)
        assert 2000 * 100 < store.memory_bytes < 2000 * 250
        assert store.filled == len(store.in_order()[0]) == 2000
