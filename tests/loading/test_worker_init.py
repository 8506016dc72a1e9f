"""A user's worker_init_fn finds the user's dataset, whatever the Trainer's doors put in front of it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_stocache.loading.dataset import CachedDataset, StandIn
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.worker_pool import InitOnSource


class Seeded(Dataset[Any]):
    """Adds noise from a generator that each worker seeds."""

    def __init__(self) -> None:
        self.noise = np.random.default_rng(0)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self.noise.random()])


def seed(worker: int) -> None:
    """Walks through all that it finds, as MONAI's does, and counts on from object to object."""
    info = get_worker_info()
    for number, value in enumerate(_generators(info.dataset)):
        value.bit_generator.state = np.random.default_rng(info.seed + number).bit_generator.state


def _generators(node: Any) -> list[np.random.Generator]:
    if isinstance(node, np.random.Generator):
        return [node]
    return [found for value in getattr(node, "__dict__", {}).values() for found in _generators(value)]


@pytest.mark.processes
@pytest.mark.parametrize("kind", [DataLoader, CachedLoader])
def test_seeds_are_those_without_a_cache(kind: type[DataLoader[Any]]) -> None:
    """The draws of a random source, which passes through, are those of a plain loader."""
    torch.manual_seed(1)
    plain = list(DataLoader(Seeded(), 4, num_workers=2, worker_init_fn=seed))
    torch.manual_seed(1)
    dataset = CachedDataset(Seeded())
    init = seed if kind is CachedLoader else InitOnSource(seed)
    cached = list(kind(StandIn(dataset), 4, num_workers=2, worker_init_fn=init))
    assert dataset.cache is None
    assert torch.equal(torch.cat(cached), torch.cat(plain))


def test_it_is_wrapped_once() -> None:
    """None stays None, and what is wrapped already stays as it is."""
    assert InitOnSource.of(None) is None
    wrapped = InitOnSource.of(seed)
    assert InitOnSource.of(wrapped) is wrapped
