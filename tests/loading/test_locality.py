"""The sampler of a loader: LocalitySampler, dealt as the ring of its cached dataset says."""

from collections.abc import Iterator

import pytest

from lightning_stocache import CachedDataset, SampleSpec
from lightning_stocache.loading.loader_sampler import global_seed, locality_sampler


@pytest.fixture
def dataset() -> Iterator[CachedDataset]:
    dataset = CachedDataset([float(index) for index in range(6)], spec=SampleSpec.infer(0.0))
    yield dataset
    dataset.close()


def test_the_ring_is_that_of_the_cache(dataset: CachedDataset) -> None:
    """And the nodes are those of its group, as long as every rank has a share of its own."""
    sampler = locality_sampler(dataset, 2, True)
    assert (sampler.ring, sampler.nodes) == (dataset.ring, dataset.group.nodes)
    assert (sampler.num_replicas, sampler.rank, sampler.mode) == (1, 0, "locality")


def test_a_source_that_has_grown_has_no_ring() -> None:
    """The new samples would lie on no arc."""
    source = [0.0, 1.0]
    dataset = CachedDataset(source, spec=SampleSpec.infer(0.0))
    source.append(2.0)
    sampler = locality_sampler(dataset, 2, False)
    assert sampler.ring is None
    assert list(sampler) == [0, 1, 2]
    dataset.close()


def test_the_seed_is_that_of_seed_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero without it."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert (global_seed(), locality_sampler(range(4), 2, True).seed) == (0, 0)
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert (global_seed(), locality_sampler(range(4), 2, True).seed) == (17, 17)
