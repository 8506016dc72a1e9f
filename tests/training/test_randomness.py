"""Training with a cache is training without one, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import random_split

from lightning_stocache.training.callbacks import FillProgress
from tests.training.tiny import Data, Model, behind, make_trainer, plain_loader, source

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


def train(tmp_path: Path, door: str, dm: Data, **options: Any) -> torch.Tensor:
    callbacks, cached = behind(door, dm, **options)
    seed_everything(3)
    model = Dropping()
    make_trainer(tmp_path, [*callbacks, FillProgress()], epochs=3).fit(model, cached)
    return model.weights


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_are_the_same_with_and_without_a_cache(tmp_path, workers):
    """The same seed gives the same weights through every door, cached in full, in half, or not at all.

    StocacheDataModule deals its samples by a sampler of its own, so it is compared with `budget=0`.
    """

    def data() -> Data:
        sets = source(tmp_path), source(tmp_path, "val", 8)
        return Data(*sets, num_workers=workers, persistent_workers=workers > 0)

    plain = train(tmp_path, "none", data())
    assert torch.equal(train(tmp_path, "callback", data()), plain)
    assert torch.equal(train(tmp_path, "cache_datamodule", data(), budget="50%"), plain)
    full, half, off = (train(tmp_path, "ours", data(), budget=budget) for budget in ("auto", "50%", 0))
    assert torch.equal(full, off)
    assert torch.equal(half, off)


def test_hooks_that_draw_numbers_draw_the_same_ones(tmp_path):
    """Splits that loader hooks draw are the same with a cache."""
    plain, tapped, cached = (Splitting(source(tmp_path), source(tmp_path, "val", 8)) for _ in range(3))
    weights = train(tmp_path, "none", plain)
    assert torch.equal(train(tmp_path, "callback", tapped), weights)
    assert torch.equal(train(tmp_path, "cache_datamodule", cached), weights)
    assert plain.options == tapped.options == cached.options
