"""The inputs of a plan from a DataModule and a model: its loader, and the seconds of a real step."""

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_stocache import CachedDataset, CachedLoader, StocacheDataModule, cache_datamodule
from lightning_stocache.insight.measurement import PlanError
from lightning_stocache.training.plan_inputs import (
    ARGUMENTS,
    as_datamodule,
    measure_steps,
    take_source,
    take_training_data,
)
from tests.sources import Made
from tests.training.tiny import Data, Remembers

SAMPLES = [(torch.full((4,), float(index)), index % 2) for index in range(32)]


class Slow(Remembers):
    """A model whose step takes five milliseconds, on any batch."""

    def note(self, stage: str, batch: Any) -> torch.Tensor:
        time.sleep(0.005)
        return super().note(stage, batch)


def trainer(tmp_path, **options) -> Trainer:
    return Trainer(**ARGUMENTS, accelerator="cpu", default_root_dir=tmp_path, **options)


@pytest.mark.parametrize("door", ["ours", "cache_datamodule", "none", "loader", "CachedDataset", "CachedLoader"])
def test_source_and_settings_of_a_loader(door):
    """Source, transform and settings come from a DataModule's loader, cached or not, or from a loader alone."""
    loading: dict[str, Any] = {"batch_size": 5, "num_workers": 2, "prefetch_factor": 3, "collate_fn": list}
    dataset = CachedDataset(SAMPLES, "1MiB", transform=id) if door.startswith("Cached") else SAMPLES
    if door == "ours":
        ours = {name: loading.pop(name) for name in ("batch_size", "num_workers")}
        given = StocacheDataModule(SAMPLES, transform=id, freeze_random=True, loader=loading, **ours)
    elif door in ("none", "cache_datamodule"):
        given = Data(SAMPLES, **loading)
    else:
        given = (CachedLoader if door == "CachedLoader" else DataLoader)(dataset, shuffle=True, **loading)
    module = as_datamodule(cache_datamodule(given) if door == "cache_datamodule" else given)
    found = take_training_data(module)
    assert (found.source, found.transform) == (SAMPLES, id if door == "ours" or dataset is not SAMPLES else None)
    assert (found.batch_size, found.num_workers) == (5, 2)
    assert (found.settings["prefetch_factor"], found.settings["collate_fn"]) == (3, list)
    assert found.freeze_random == (door == "ours")
    assert SAMPLES not in getattr(module, "caches", [])
    assert getattr(dataset, "cache", None) is None
    assert as_datamodule(module) is module


@pytest.mark.parametrize("wrap", [cache_datamodule, lambda module: module])
def test_a_plan_for_a_fold(wrap):
    """A plan for one fold counts its eight samples; a pack contains the whole dataset."""
    fold = wrap(Data(SAMPLES, sampler=SubsetRandomSampler(range(0, 32, 4))))
    assert [sample[0][0] for sample in take_training_data(fold).source] == [*range(0, 32, 4)]
    assert take_source(fold) is SAMPLES


def test_what_cannot_be_planned_is_said(tmp_path):
    """Several training loaders, no DataModule, and a model that stops after its first batch are refused."""

    class Several(Data):
        def train_dataloader(self):
            return [super().train_dataloader()] * 2

    for module, words in ((Several(SAMPLES), "got 2 of them"), (object(), "got object")):
        with pytest.raises(PlanError, match=words):
            take_training_data(module)
    with pytest.raises(PlanError, match="ended training after 1 batches"):
        measure_steps(trainer(tmp_path, max_steps=1), Slow(), Data(SAMPLES), take_training_data(Data(SAMPLES)))


def test_the_step_is_that_of_a_real_trainer(tmp_path):
    """A step has the seconds of the model and the batch transform; with a plain loader those of loading, too."""
    shifted = {"batch_transform": lambda batch: [image + 100 for image, _ in batch]}
    source = Made(lambda index: time.sleep(0.005) or SAMPLES[index], 32)
    module, model = StocacheDataModule(source, batch_size=4, loader={"collate_fn": list}, **shifted), Slow()
    taken = measure_steps(trainer(tmp_path), model, module, take_training_data(module))
    [images] = model.epochs
    assert 0.005 <= taken.alone.low < taken.alone.high
    assert 0.025 <= taken.uncached.low < taken.uncached.high
    assert taken.start >= 0
    assert len(images) == 2 * 96 * 4
    assert all(float(image.min()) >= 100 for image in images)
