"""CachedLoader in the hands of Lightning: made anew with its attributes, and shut down."""

from collections.abc import Iterator
from contextlib import closing
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.sources import CountedSource
from tests.training.tiny import Model, make_trainer

pytestmark = pytest.mark.processes

LENGTH = 24


class Many(Model):
    """Takes labels of more classes than it has, for they tell the samples apart."""

    def loss(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        return super().loss((images, labels % 10))


class Seeing(Many):
    """Notes the labels of all batches, and the loader of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[int] = []
        self.loader: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.loader = self.trainer.train_dataloader
        self.labels += batch[1].tolist()
        return super().training_step(batch, batch_idx)


@pytest.fixture
def dataset() -> Iterator[CachedDataset]:
    with closing(CachedDataset(CountedSource(LENGTH, classes=LENGTH), "50%")) as dataset:
        yield dataset


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_trainer_iterates_over_the_loader_itself(tmp_path: Path, dataset, num_workers):
    """On one device nothing is made anew, and when the fit is over its persistent workers have ended."""
    loader = CachedLoader(dataset, 4, shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0)
    model = Seeing()
    make_trainer(tmp_path, epochs=2).fit(model, loader)
    assert model.loader is loader
    assert sorted(model.labels) == sorted([*range(LENGTH)] * 2)
    assert active_children() == []
    assert sum(len(labels) for _, labels in loader) == LENGTH
    loader.close()


def test_a_trainer_that_overfits_makes_it_anew(tmp_path: Path, dataset):
    """Without shuffling, and with all that was said of it."""
    loader = CachedLoader(dataset, 4, shuffle=True, num_workers=1, prefetch_factor=3, gather="worker")
    model = Seeing()
    make_trainer(tmp_path, epochs=2, overfit_batches=2).fit(model, loader)
    assert model.loader is not loader
    assert type(model.loader) is CachedLoader
    assert type(model.loader.sampler) is SequentialSampler
    assert (model.loader.gather, model.loader.prefetch_factor, model.loader.dataset) == ("worker", 3, dataset)
    assert model.labels == [*range(8)] * 2
