"""Training with a cache is training without one, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from torch.utils.data import random_split

from lightning_stocache.training.callbacks import FillProgress, StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule, cache_datamodule
from lightning_stocache.training.monitor import CacheMonitor
from tests.training.tiny import Data, Model, make_trainer, plain_loader, source

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.processes]


class Dropping(Model):
    """A model that draws random numbers itself."""

    def loss(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        images = torch.nn.functional.dropout(images.flatten(1).float() / 255, training=self.training)
        return torch.nn.functional.cross_entropy(self.layer(images), labels)


class Splitting(Data):
    """Draws its splits inside of the loader hooks, from the global generator, and remembers them."""

    def draw(self, stage: str, dataset: Any) -> Any:
        part = random_split(dataset, [0.75, 0.25])[0]
        self.options[stage] = part.indices
        return part

    def train_dataloader(self) -> Any:
        return plain_loader(self.draw("train", self.train), shuffle=True)

    def val_dataloader(self) -> Any:
        return plain_loader(self.draw("val", self.val))


def train(tmp_path: Path, dm: LightningDataModule, callbacks: list[Any], **options: Any) -> torch.Tensor:
    seed_everything(3)
    model = Dropping()
    make_trainer(tmp_path, callbacks, epochs=3, **options).fit(model, dm)
    return model.weights


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_are_the_same_with_and_without_a_cache(tmp_path, workers):
    """The same seed gives the same weights through every door, cached in full, in half, or not at all.

    StocacheDataModule deals its samples by a sampler of its own, so there it is `budget=0` that is compared with.
    """
    sets = source(tmp_path), source(tmp_path, "val", 8)
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    plain = train(tmp_path, Data(*sets, **options), [])
    watching = [CacheMonitor(), FillProgress()]
    assert torch.equal(train(tmp_path, Data(*sets, **options), [StochasticCache()]), plain)
    assert torch.equal(train(tmp_path, cache_datamodule(Data(*sets, **options), "50%"), watching), plain)
    full, half, off = (
        train(tmp_path, StocacheDataModule(*sets, batch_size=4, num_workers=workers, budget=budget), watching)
        for budget in ("auto", "50%", 0)
    )
    assert torch.equal(full, off)
    assert torch.equal(half, off)


def test_hooks_that_draw_numbers_draw_the_same_ones(tmp_path):
    """Splits drawn in loader hooks are the same with a cache, although the training loader is asked for early."""
    plain, tapped, cached = (Splitting(source(tmp_path), source(tmp_path, "val", 8)) for _ in range(3))
    weights = train(tmp_path, plain, [])
    assert torch.equal(train(tmp_path, tapped, [StochasticCache()]), weights)
    assert torch.equal(train(tmp_path, cache_datamodule(cached), []), weights)
    assert plain.options == tapped.options == cached.options
