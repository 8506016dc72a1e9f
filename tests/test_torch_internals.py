"""What is private of torch's may go away: a loader is then DataLoader's, with one warning, and nothing breaks."""

from contextlib import closing

import pytest
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data import dataloader as dataloaders

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.torch_internals import draws_all_once, knows_workers
from tests.loading.twins import Numbers, copied, same


@pytest.mark.processes
def test_without_the_names_a_loader_with_workers_is_a_plain_one(request, monkeypatch, caplog):
    """This torch has them. Without, batches are the same, samples are cached all the same, and it is said once."""
    assert knows_workers()
    knows_workers.cache_clear()
    request.addfinalizer(knows_workers.cache_clear)
    expected = [copied(batch) for batch in DataLoader(Numbers(20), 4)]
    with monkeypatch.context() as patch:
        patch.setattr(dataloaders, "_MultiProcessingDataLoaderIter", type("Iter", (), {}))
        assert not knows_workers()
    with closing(CachedDataset(Numbers(20))) as dataset:
        for workers in (2, 2, 0):
            with closing(CachedLoader(dataset, 4, num_workers=workers)) as loader:
                assert same([copied(batch) for batch in loader], expected)
                assert (loader.resources is None) == (workers > 0)
        assert dataset.cache is not None
        assert dataset.cache.full
    assert caplog.text.count("is a plain DataLoader") == 1


def test_a_sampler_that_draws_once_is_known():
    """Others are the user's."""
    assert draws_all_once(RandomSampler(range(3)))
    assert not draws_all_once(RandomSampler(range(3), replacement=True))
    assert not draws_all_once(RandomSampler(range(3), num_samples=2))
