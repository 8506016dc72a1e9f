"""The inputs of a plan from a DataModule and a model: its loader, and the seconds of a real step."""

import time

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_stocache import CachedDataset, CachedLoader, StocacheDataModule, cache_datamodule
from lightning_stocache.insight.measurement import PlanError
from lightning_stocache.training.plan_inputs import (
    ARGUMENTS,
    datamodule_of,
    measure_step,
    source_in,
    training_data,
    world,
)
from tests.training.tiny import Data

SAMPLES = [(torch.full((4,), float(index)), index % 2) for index in range(32)]


def own() -> Data:
    """A DataModule of the user's."""
    return Data(SAMPLES, batch_size=5, num_workers=2, prefetch_factor=3)


class Slow(pl.LightningModule):
    """A model whose step takes five milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(4, 1), []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0])
        time.sleep(0.005)
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Listed(Slow):
    """A model whose batches are lists of samples."""

    def training_step(self, batch, batch_idx):
        return super().training_step([torch.stack([image for image, _ in batch])], batch_idx)


def trainer(tmp_path) -> pl.Trainer:
    return pl.Trainer(**ARGUMENTS, accelerator="cpu", default_root_dir=tmp_path)


def test_the_datamodule_of_the_first_door():
    """Source, transform and loader come from the DataModule; no cache is open."""
    module = StocacheDataModule(
        train=SAMPLES, batch_size=4, num_workers=2, transform=id, sampling="sticky", allow_random=True
    )
    found = training_data(module)
    assert found.source is SAMPLES
    assert found.transform is id
    assert (found.batch_size, found.num_workers) == (4, 2)
    assert (found.mode, found.allow_random) == ("sticky", True)
    assert SAMPLES not in module.caches


@pytest.mark.parametrize("wrap", [cache_datamodule, lambda module: module])
def test_a_datamodule_of_the_users(wrap):
    """Its loader is read, cached or not: batch size, workers, further arguments. A plan for one fold counts its eight
    samples; a pack contains the whole dataset."""
    found = training_data(wrap(own()))
    assert found.source is SAMPLES
    assert (found.batch_size, found.num_workers) == (5, 2)
    assert found.settings["prefetch_factor"] == 3
    fold = wrap(Data(SAMPLES, sampler=SubsetRandomSampler(range(0, 32, 4))))
    assert [sample[0][0] for sample in training_data(fold).source] == [*range(0, 32, 4)]
    assert source_in(fold) is SAMPLES


@pytest.mark.processes
@pytest.mark.parametrize("door", ["source", "CachedDataset", "CachedLoader"])
def test_a_loader_alone(tmp_path, door):
    """A loader alone gives its settings and its source; its cache is closed."""
    source = SAMPLES if door == "source" else CachedDataset(SAMPLES, "1MiB", transform=id)
    make = CachedLoader if door == "CachedLoader" else DataLoader
    module = datamodule_of(make(source, batch_size=5, shuffle=True, collate_fn=list))
    found = training_data(module)
    assert found.source is SAMPLES
    assert found.transform is (None if door == "source" else id)
    assert (found.batch_size, found.settings["collate_fn"]) == (5, list)
    assert door == "source" or source.cache is None
    assert datamodule_of(module) is module
    if door == "source":
        model = Listed()
        assert measure_step(trainer(tmp_path), model, module, found).low > 0
        assert len(model.seen) >= 6


def test_what_cannot_be_planned_is_said(tmp_path):
    """Several training loaders, an object that is no DataModule, and a model that stops after its first batch are
    refused."""

    class Several(Data):
        def train_dataloader(self):
            return [super().train_dataloader()] * 2

    for module, words in ((Several(SAMPLES), "got 2 of them"), (object(), "got object")):
        with pytest.raises(PlanError, match=words):
            training_data(module)
    short = pl.Trainer(**ARGUMENTS, accelerator="cpu", max_steps=1, default_root_dir=tmp_path)
    with pytest.raises(PlanError, match="ended training after 1 batches"):
        measure_step(short, Slow(), own(), training_data(own()))


def test_the_step_is_that_of_a_real_trainer(tmp_path):
    """A step has the seconds of the model, with the batch transform of the DataModule, and without waiting for data."""
    module = StocacheDataModule(train=SAMPLES, batch_size=4, batch_transform=lambda batch: (batch[0] + 100, batch[1]))
    found, model = training_data(module), Slow()
    taken = measure_step(trainer(tmp_path), model, module, found)
    assert 0.005 <= taken.low < taken.high
    assert 6 <= len(model.seen) <= 48
    assert model.seen[0].shape == (4, 4)
    assert all(float(images.min()) >= 100 for images in model.seen)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (1, 1)),
        ({"num_nodes": 3, "devices": 2}, (3, 2)),
        ({"devices": "2"}, (1, 2)),
        ({"devices": "0,1,"}, (1, 2)),
        ({"devices": [0, 3]}, (1, 2)),
        ({"devices": "auto", "accelerator": "cpu"}, (1, 1)),
    ],
)
def test_world(arguments, expected, monkeypatch):
    """Nodes and ranks are read from whatever a Trainer accepts."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert world(arguments) == expected
