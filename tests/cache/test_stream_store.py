"""The samples of a stream in memory: numbered, found by their marks, sorted by shard, seen from other processes."""

import pickle
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import NO_SLOT
from lightning_stocache.cache.stream import Shard, StreamLedger, StreamStore
from lightning_stocache.node.segment import Segment
from tests.processes import call


def in_another_process(content: bytes) -> Any:
    store = pickle.loads(content)
    shard = Shard(0, 1, 2, key=1)
    epoch = store.ledger.begin(shard)
    for number in (10, 11):
        store.append(shard, epoch, number, number)
    found = list(store.marked(1))
    store.close()
    return found


@pytest.mark.processes
def test_samples_of_all_processes_are_sorted_by_shard() -> None:
    """They are in the order of shards and positions, and a late process writes nothing into the next epoch."""
    shard = Shard(0, 0, 2, key=1)
    with closing(StreamStore.empty(SampleSpec.infer(1), 1 << 20)) as store:
        epoch = store.ledger.begin(shard)
        store.append(shard, epoch, 0, 0), store.append(shard, epoch, 1, 1)
        assert call(in_another_process, pickle.dumps(store)) == [1]
        store.append(shard, epoch, 2, 2)
        indices, from_shards = store.in_order()
        assert from_shards.tolist() == [0, 0, 0, 1, 1]
        assert list(store.read(store.lookup(indices))) == [0, 1, 2, 10, 11]
        assert [list(store.marked(mark)) for mark in (11, 5)] == [[11], []]
        assert (store.lookup(np.array([4, 5]), verify=True) != NO_SLOT).tolist() == [True, False]
        assert store.divide([5]) == ([5], [])
        assert store.ledger.begin(Shard(key=2)) == epoch + 1
        assert store.append(shard, epoch, 5, 5) is None
        assert store.ledger.passed(epoch) is None  # none has ended


def test_a_ledger_counts_what_all_shards_have_passed() -> None:
    """Shards join an epoch or begin it, and the number of its samples is known when each of them has ended."""
    with closing(StreamLedger.create(ranks=2)) as ledger:
        for epoch, ended, passed in ((1, 4, None), (2, 3, 5), (3, 4, None), (4, 4, 5)):
            shards = [Shard(rank, worker, 2, key=epoch) for rank in range(2) for worker in range(2)]
            assert epoch % 2 or ledger.announce(1) == epoch
            assert [ledger.begin(shards[0]), ledger.begin(shards[2])] == [epoch] * 2
            assert epoch == 1 or ledger.passed(epoch - 1) == passed
            ledger.clear(lambda: None)
            assert [ledger.begin(shards[1]), ledger.begin(shards[3])] == [epoch] * 2
            assert [ledger.take_number(shard) for shard in (*shards, shards[0])] == [0, 1, 2, 3, 4]
            for shard in shards[:ended]:
                ledger.end(shard, epoch)
            assert ledger.passed(epoch, length=0) == 5


def test_a_decision_is_taken_once() -> None:
    """The second process receives the decision of the first, and a final decision stays."""
    asked = list[str]()
    with closing(StreamLedger.create(1)) as ledger:
        for key, mode, decision in ((1, "stream", "stream"), (2, "cache", "cache"), (3, "stream", "cache")):
            epoch = ledger.begin(Shard(key=key))
            choose: Any = lambda late, mode=mode: asked.append(mode) or late or mode  # noqa: E731
            assert [ledger.decide(epoch, choose) for _ in range(2)] == [decision] * 2
        assert asked == ["stream", "cache"]
        assert [ledger.pass_by(), ledger.pass_by(), ledger.mode] == ["cache", "pass", "pass"]


def test_a_stream_promises_what_it_was_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are as long as its grant, its memory is what samples take, and `clear` gives that back."""
    create, made = Segment.create, list[Segment]()
    monkeypatch.setattr(Segment, "create", lambda *given, **more: made.append(create(*given, **more)) or made[-1])
    shard, granted = Shard(), 64 << 20
    with closing(StreamStore.empty(RecordCodec.infer(["text " * 20]), granted)) as store:
        missing = sum(segment.size - segment.allocated_bytes for segment in made)
        assert granted - 2**14 <= missing <= granted + 2**14
        epoch = store.ledger.begin(shard)
        assert None not in [store.append(shard, epoch, "text " * 20, mark) for mark in range(2000)]
        assert 2000 * 100 < store.memory_bytes < 2000 * 250
        assert store.filled == len(store.in_order()[0]) == 2000
        store.clear()
        assert store.memory_bytes == store.filled == 0
        store.append(shard, epoch, "other", 0)
        assert list(store.marked(0)) == ["other"]
