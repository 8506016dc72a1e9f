"""What a sampler can draw is what it does draw, and nothing is drawn to know it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stocache.cache.placement import Ring
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.sampling.sampler_domain import draws_once, sampler_domain

LENGTH = 30
DATA: Any = range(LENGTH)
FEW: Any = range(7)


def dealt(draws: Any) -> LocalitySampler:
    return LocalitySampler(DATA, 1, 0, batch_size=3, ring=Ring.cut(30, (1,), (9,)), nodes=((0,),), draws=draws)


class Other(Sampler[int]):
    """A user's own, with a name that means something else."""

    indices = (1, 2)

    def __iter__(self) -> Any:
        return iter(range(LENGTH))


class Mine(SubsetRandomSampler):
    """In another order, but from the same indices."""

    def __iter__(self) -> Any:
        return iter(reversed(list(self.indices)))


@pytest.mark.parametrize(
    ("sampler", "once"),
    [
        (SubsetRandomSampler([3, 9, 4]), True),
        (SubsetRandomSampler(torch.tensor([3, 9, 4, 4])), True),  # type: ignore[arg-type]
        (Mine([5, 6]), False),
        (WeightedRandomSampler([0.0, 1.0, 2.0, *[0.0] * 27], 200), False),
        (RandomSampler(FEW), True),
        (SequentialSampler(FEW), True),
        (DistributedSampler(FEW, 1, 0), True),
        (dealt(SubsetRandomSampler([3, 9])), True),
        (dealt(WeightedRandomSampler([0.0, 1.0, 1.0], 50)), False),
        (BatchSampler(SubsetRandomSampler([3, 9, 4]), 2, False), False),
        ([4, 4, 2], False),
        ([[1, 2], [2, 3, 4]], False),
        (np.array([6, 7]), False),
    ],
)
def test_it_is_what_is_drawn(sampler: Any, once: bool) -> None:
    """Of torch's samplers and of lists, in batches or not: the indices that an epoch gives, and no others. Torch's own
    without replacement, and LocalitySampler with one of these, draw each once; never a class of the user's."""
    before = torch.get_rng_state()
    domain = sampler_domain(sampler, LENGTH)
    assert torch.equal(torch.get_rng_state(), before)
    assert domain is not None
    drawn = [int(i) for item in sampler for i in (item if isinstance(item, list) else [item])]
    assert set(drawn) == set(domain.indices.tolist())
    assert domain.length == LENGTH
    assert draws_once(sampler) == once


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(DATA),
        RandomSampler(DATA, num_samples=5),  # others each time
        SequentialSampler(DATA),
        DistributedSampler(DATA, 2, 0),
        SubsetRandomSampler(range(LENGTH)),
        SubsetRandomSampler([]),
        SubsetRandomSampler([LENGTH]),  # the error is the source's
        Other(),
        None,
        ["a", "b"],
    ],
)
def test_else_all_may_be_drawn(sampler: Any) -> None:
    """All of the dataset, nothing of it, or nobody knows: then the cache is of the whole."""
    assert sampler_domain(sampler, LENGTH) is None
