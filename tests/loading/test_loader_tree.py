"""The nesting of loaders: what is iterated over in it, and the cached datasets behind that."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from lightning_stocache import CachedDataset, CachedStream, SampleSpec
from lightning_stocache.loading.dataset import StandIn
from lightning_stocache.loading.loader_tree import (
    cached_in_leaves,
    leaves_in,
    loaders_in,
    wrapped_loader,
)

PLAIN = DataLoader(TensorDataset(torch.zeros(1)))


def test_leaves_come_in_order() -> None:
    """Through lists, tuples, dicts and what Lightning combines them in; of them the DataLoaders are known."""
    combined = SimpleNamespace(iterables={"a": PLAIN, "b": [range(3), {}]})
    assert list(leaves_in([7, (combined, {"text": "text"}), [], None])) == [7, PLAIN, range(3), "text", None]
    assert list(loaders_in([7, (combined, PLAIN)])) == [PLAIN, PLAIN]


def test_the_loader_that_timm_wraps_is_found() -> None:
    """Its own loader is no DataLoader, and reads one; of another class with that name nothing is known."""
    kind = type("PrefetchLoader", (), {"__module__": "timm.data.loader", "__init__": lambda self, loader: None})
    wrapper, empty, foreign = kind(None), kind(None), type("PrefetchLoader", (), {"loader": PLAIN})()
    wrapper.loader, empty.loader = PLAIN, range(3)
    assert wrapped_loader(wrapper) is PLAIN
    assert list(leaves_in([wrapper])) == [PLAIN]
    assert wrapped_loader(empty) is None
    assert list(leaves_in([empty, foreign])) == [empty, foreign]


@pytest.fixture
def dataset() -> Iterator[CachedDataset]:
    dataset = CachedDataset([0.0, 1.0, 2.0], spec=SampleSpec.infer(0.0))
    yield dataset
    dataset.close()


def test_a_cached_dataset_is_found_through_what_wraps_it_once(dataset: CachedDataset) -> None:
    """A Subset, a ConcatDataset, a StandIn and the dataset itself are all of one cache."""
    behind = [dataset, Subset(dataset, [1]), ConcatDataset([PLAIN.dataset, Subset(dataset, [0])]), StandIn(dataset)]
    loaders = {"each": [DataLoader(each) for each in behind], "plain": PLAIN}
    assert cached_in_leaves(loaders) == [dataset]


def test_datasets_of_two_caches_are_two(dataset: CachedDataset) -> None:
    """In the order in which they are read."""
    other = CachedDataset([3.0], spec=SampleSpec.infer(0.0))
    assert cached_in_leaves([DataLoader(ConcatDataset([other, dataset])), DataLoader(dataset)]) == [other, dataset]
    other.close()


def test_what_has_a_dataset_and_is_no_dataloader(dataset: CachedDataset) -> None:
    """It is asked for by its leaves."""
    stream = CachedStream([1.0], budget="1MiB")
    leaves = [SimpleNamespace(dataset=dataset), SimpleNamespace(dataset=stream), SimpleNamespace(dataset=stream), 7]
    assert cached_in_leaves(leaves) == [dataset, stream]
    stream.close()
