"""A budget of N % is N % of the samples, whatever they are and however they are stored."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from lightning_stocache.loading.dataset import CachedDataset
from tests.ranks import run_ranks
from tests.sources import Made

LENGTH = 400

pytestmark = pytest.mark.processes


def photo(index: int) -> Any:
    """An image of PIL of some size, which takes a quarter less where it is packed."""
    return Image.new("RGB", (40 + index % 7, 60 + index % 5), (index % 256, 0, 0)), index


def text(index: int) -> Any:
    """A record: they are of very different sizes."""
    return "x" * int(np.random.default_rng(index).lognormal(6, 1)), index


def row(index: int) -> Any:
    """A row: all are of one size."""
    return torch.full((30,), index), index


def filled(dataset: CachedDataset) -> float:
    """The share of the samples that lie in the cache when all were asked for."""
    for index in range(LENGTH):
        dataset[index]
    return dataset.cache.filled / LENGTH


@pytest.mark.parametrize(("make", "percent"), [(photo, 75), (text, 50), (row, 75)])
def test_so_many_of_the_samples_are_cached(make: Any, percent: int) -> None:
    """Within one in a hundred."""
    with closing(CachedDataset(Made(make, LENGTH), f"{percent}%")) as dataset:
        assert filled(dataset) == pytest.approx(percent / 100, abs=0.01)


def share_of_a_rank(rank: int) -> float:
    dataset = CachedDataset(Made(photo, LENGTH), "50%", defer=True)
    dataset.share()
    share = filled(dataset)
    dist.barrier()
    share = dataset.cache.filled / LENGTH
    dist.barrier()
    dataset.close()
    return share


def test_two_ranks_cache_as_much_as_one() -> None:
    """The budget is that of their node."""
    assert run_ranks(share_of_a_rank, 2) == pytest.approx([0.5, 0.5], abs=0.01)
