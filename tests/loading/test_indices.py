"""A CachedDataset of which only some indices are drawn: slots for these, and all others as the source has them."""

import random
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import SubsetRandomSampler

from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.loading.twins import same, totals

LENGTH = 50
FOLD = list(range(3, LENGTH, 5))
ROWS = SampleSpec.infer((torch.zeros(3), 1))
TEXTS = RecordCodec.infer([{"text": "sample 12"}])


def rows() -> list[Any]:
    return [(torch.full((3,), float(index)), index) for index in range(LENGTH)]


def texts() -> list[Any]:
    return [{"text": f"sample {index}"} for index in range(LENGTH)]


@pytest.mark.parametrize(("make", "spec"), [(rows, ROWS), (texts, TEXTS)])
@pytest.mark.parametrize("budget", ["100%", "50%"])
def test_any_index_gives_the_sources_sample(make: Any, spec: Any, budget: str) -> None:
    """One by one and in batches, from the front and from the end, drawn or not: what a list has; counts add up."""
    source, chance = make(), random.Random(0)
    with closing(CachedDataset(source, budget, spec=spec, indices=FOLD)) as dataset:
        assert dataset.cache is not None
        served = 0
        for _ in range(200):
            wanted = [chance.randrange(-LENGTH, LENGTH) for _ in range(chance.randrange(1, 6))]
            got = [dataset[wanted[0]]] if len(wanted) == 1 else dataset.__getitems__(wanted)
            assert all(same(sample, source[index]) for sample, index in zip(got, wanted, strict=True))
            served += len(wanted)
        counts = totals(dataset)
        assert counts.hits + counts.misses + counts.bypasses == served
        assert len(dataset.cache) <= len(FOLD)
        assert counts.fills == dataset.cache.filled
        assert budget == "50%" or dataset.cache.filled == len(FOLD)
        with pytest.raises(IndexError):
            dataset[LENGTH]


def test_budgets_and_coverage_are_of_what_is_drawn() -> None:
    """60 % is of the ten that are drawn; who reads the description sees that."""
    with closing(CachedDataset(rows(), "60%", spec=ROWS, indices=FOLD)) as dataset:
        assert len(dataset.cache) == 6
        assert dataset.ring.coverage == 0.6
        assert len(dataset) == LENGTH
        assert "6 of the 10 that are drawn of 50 samples have a slot" in dataset.describe()


def test_a_loader_that_draws_others_too_gets_them() -> None:
    """Though all that was to be drawn is cached, a shuffled loader's other samples come from the source."""
    with closing(CachedDataset(rows(), spec=ROWS, indices=FOLD)) as dataset:
        for sampler in (SubsetRandomSampler(FOLD), None, SubsetRandomSampler([1, 2, 3])):
            loader = CachedLoader(dataset, 4, sampler=sampler, shuffle=None if sampler else True)
            for _ in range(2):
                drawn = [(images[:, 0].tolist(), labels.tolist()) for images, labels in loader]
                assert all(images == labels for images, labels in drawn)
                expected = FOLD if sampler is not None and len(sampler) == 10 else [1, 2, 3] if sampler else range(50)
                assert sorted(label for _, labels in drawn for label in labels) == list(expected)


def test_a_source_that_has_grown_keeps_its_slots() -> None:
    """Samples that have come since have none, and are served."""
    source = rows()
    with closing(CachedDataset(source, spec=ROWS, indices=FOLD)) as dataset:
        source.append((torch.zeros(3), 99))
        assert dataset[LENGTH][1] == 99
        assert [dataset[index][1] for index in FOLD * 2] == FOLD * 2


@pytest.mark.parametrize(
    ("indices", "words"), [([], "must name at least one sample"), ([50], "got 50"), ([1.5], "must be whole numbers")]
)
def test_indices_of_no_sample_are_refused(indices: Any, words: str) -> None:
    """None at all, or what the source does not have."""
    with pytest.raises(ValueError, match=words):
        CachedDataset(rows(), spec=ROWS, indices=indices)


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
def test_only_what_is_drawn_is_read_at_set_up() -> None:
    """A fold without the broken files is cached, whatever the others are like."""

    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index not in FOLD:
                raise OSError(f"sample {index} is broken")
            return super().__getitem__(index)

    with closing(CachedDataset(Broken(rows()), indices=FOLD, strict=True)) as dataset:
        assert [dataset[index][1] for index in FOLD * 2] == FOLD * 2
        assert totals(dataset).hits == len(FOLD)
