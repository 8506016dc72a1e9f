"""What workers hand over that has no ready slot: by the area, by message, never at the wrong place."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.loading import staging as staging_module
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.errand import Errand
from lightning_stocache.loading.staging import Staging, Stretch
from tests.loading.twins import Numbers, same
from tests.sources import CountedSource

LENGTH = 12


class BatchedSource(CountedSource):
    """One that loads whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.fixture
def dataset() -> Iterator[CachedDataset]:
    """Half of it has slots, all of which are filled."""
    dataset = CachedDataset(Numbers(LENGTH), "50%")
    dataset.__getitems__(list(range(LENGTH)))
    yield dataset
    dataset.close()


def errand(indices: Iterable[int], stretch: Stretch) -> Errand:
    return Errand(list(indices), stretch, of_batch=list(indices))


def without_slot(dataset: CachedDataset) -> list[int]:
    assert dataset.cache is not None
    return [index for index in range(LENGTH) if not dataset.cache.has_place(index)]


def test_samples_without_a_slot_lie_in_the_stretch_of_their_errand(dataset):
    """At the place that they have in it; those that are READY are left to the cache."""
    staging = Staging(dataset.cache.spec, LENGTH, batches=3)
    stretch = staging.take(LENGTH)
    other = staging.take(LENGTH)
    answer = staging(dataset.__getitems__(errand(range(LENGTH), stretch)))
    staging(dataset.__getitems__(errand(reversed(range(LENGTH)), other)))
    assert answer.sent == {}
    assert answer.places == without_slot(dataset)
    codec = dataset.cache.codec
    memory = [torch.zeros(size, dtype=torch.uint8) for size in codec.sizes(LENGTH)]
    batch = codec.rows(lambda: memory, LENGTH)
    for place in answer.places:
        staging.copy_to(batch, place, stretch.first + place)
    samples = codec.split(memory, LENGTH)
    assert all(same(samples[place], Numbers(LENGTH)[place]) for place in answer.places)
    staging.close()


@given(st.integers(1, 7), st.integers(2, 5), st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_no_two_errands_under_way_have_a_row_in_common(batch_size, batches, sizes):
    """Who takes more than there is gets none; the earliest errand ends first."""
    staging = Staging(SampleSpec.infer(Numbers(3)[0]), batch_size, batches)
    under_way: list[Stretch] = []
    for number, size in enumerate(sizes):
        if number % 3 == 2 and under_way:
            staging.give_back(under_way.pop(0))
        stretch = staging.take(size)
        rows = range(stretch.first, stretch.first + stretch.rows)
        taken = {row for other in under_way for row in range(other.first, other.first + other.rows)}
        assert not taken & set(rows)
        assert rows.stop <= batch_size * batches
        wanted = min(size, batch_size)
        assert len(rows) == (wanted if len(taken) + wanted <= batch_size * (batches - 1) else 0)
        under_way.append(stretch)
    staging.close()


def test_what_is_longer_than_a_batch_is_sent_by_message(dataset):
    """As plain bytes, not as a tensor in shared memory of torch's own."""
    staging = Staging(dataset.cache.spec, 4, batches=2)
    answer = pickle.loads(pickle.dumps(staging(dataset.__getitems__(errand(range(LENGTH), staging.take(LENGTH))))))
    assert sorted([*answer.places, *answer.sent]) == without_slot(dataset)
    assert max(answer.places, default=0) < 4 <= min(answer.sent)
    for place, (image, _) in answer.sent.items():
        assert torch.equal(torch.from_numpy(image), Numbers(LENGTH)[place][0].flatten())
    staging.close()


def test_without_memory_all_of_it_is_sent(dataset, monkeypatch):
    """A staging area that cannot be had is no error."""

    def refuse(size: int, promised: int) -> Any:
        raise OSError("no memory")

    monkeypatch.setattr(staging_module, "transit_memory", refuse)
    staging = Staging(dataset.cache.spec, LENGTH, batches=2)
    assert staging.take(LENGTH).rows == 0
    answer = staging(dataset.__getitems__(errand(range(LENGTH), staging.take(LENGTH))))
    assert (answer.places, sorted(answer.sent)) == ([], without_slot(dataset))
    staging.close()


def test_a_worker_whose_cache_is_closed_makes_the_whole_batch(dataset):
    """Then nothing is READY, whatever the main process thinks, and there is no spec to hold samples to."""
    staging = Staging(dataset.cache.spec, LENGTH, batches=2)
    dataset.close()
    answer = staging(dataset.__getitems__(errand(range(LENGTH), staging.take(LENGTH))))
    assert same(answer.batch, default_collate([dataset.source[index] for index in range(LENGTH)]))
    staging.close()


@pytest.mark.parametrize("batched", [False, True])
def test_only_what_does_not_become_ready_is_handed_over(tmp_path, batched):
    """The rest is stored; what has become READY meanwhile is not loaded again."""
    kind = BatchedSource if batched else CountedSource
    source = kind(LENGTH, log_path=tmp_path / "loads")
    with closing(CachedDataset(source, "50%")) as dataset:
        with_slot = [index for index in range(LENGTH) if index not in without_slot(dataset)]
        dataset.__getitems__(with_slot[:2])
        loads = source.loads
        staging = Staging(dataset.cache.spec, LENGTH, batches=2)
        stretch = staging.take(LENGTH)
        answer = staging(dataset.__getitems__(errand(range(LENGTH), stretch)))
        staging.give_back(stretch)
        assert answer.places == without_slot(dataset)
        assert source.loads - loads == LENGTH - 2
        assert dataset.cache.filled == len(with_slot)
        assert dataset.counters.totals().served == LENGTH + 2
        assert dataset.counters.totals().hits == 2
        twice = without_slot(dataset)[:1] * 2 + with_slot[:1]
        assert staging(dataset.__getitems__(errand(twice, staging.take(3)))).places == [0, 1]
        staging.close()


class Nothing(Numbers):
    """A source that has no sample any more."""

    def __getitem__(self, index: int) -> Any:
        return None


def test_nothing_is_no_sample(dataset):
    """Where the worker's cache is closed, what the source gives is collated, not taken for stored."""
    dataset.close()
    dataset.opened.source = Nothing(LENGTH)
    staging = Staging(SampleSpec.infer(Numbers(3)[0]), LENGTH, batches=2)
    with pytest.raises(TypeError, match="found <class 'NoneType'>"):
        staging(dataset.__getitems__(errand(range(LENGTH), staging.take(LENGTH))))
    staging.close()
