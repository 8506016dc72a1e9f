"""Trainings under the odds: through every door they see the batches that they see without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_stocache import StepTimer
from lightning_stocache.insight.steps import StepClock
from tests.odds import Disk, LateDevice, LateEvent
from tests.training.tiny import SAMPLES, Data, Model, Watcher, behind, make_trainer, source

pytestmark = pytest.mark.processes


def batches(door: str, folder: Path, model: Watcher | None = None, **options: Any) -> list[tuple[str, bytes]]:
    """What a model sees in two epochs of training and validation."""
    seed_everything(0, verbose=False)
    model = model or Watcher()
    callbacks, data = behind(door, Data(source(folder), source(folder, "val", 8), num_workers=2), **options)
    make_trainer(folder, callbacks, epochs=2, logger=False).fit(model, data)
    return model.batches


class Late(Watcher):
    """A model on a device that is behind: it looks at a batch later."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.late = device

    def note(self, stage: str, batch: Any) -> torch.Tensor:
        self.late.order(lambda: Watcher.note(self, stage, batch))
        return self.weight.sum()


def test_a_device_that_is_behind_sees_the_same_batches(tmp_path, door, late_device):
    """It may look at all batches of a fit at its end only."""
    seen = batches(door, tmp_path, Late(late_device))
    late_device.synchronize()
    assert seen == batches(door, tmp_path, budget=0)


def test_a_second_thread_changes_no_batch(tmp_path, door, second_thread):
    """A thread may draw, log and read beside a fit."""
    images = source(tmp_path)
    second_thread(lambda: images[3])
    assert batches(door, tmp_path) == batches(door, tmp_path, budget=0)


def train_on_full_disk(disk: Disk, door: str, folder: Path) -> list[tuple[str, bytes]]:
    disk.take_all()
    return batches(door, folder, dir=str(disk.directory / "caches"))


def test_a_full_disk_changes_no_batch(tmp_path, door, full_disk):
    """Where a cache on a disk has no room at all, samples are loaded."""
    assert full_disk(train_on_full_disk, door, tmp_path) == batches(door, tmp_path, budget=0)


def test_parts_of_a_step_are_the_devices_also_where_it_is_behind(tmp_path, late_device):
    """Seconds of forward and backward are those that the device spends later. It is waited for at an epoch's end."""

    class Busy(Model):
        def loss(self, batch):
            late_device.spend(2.0)
            loss = super().loss(batch)
            if loss.requires_grad:
                loss.register_hook(lambda gradient: late_device.spend(3.0))
            seconds_at_launch.append(late_device.seconds)
            return loss

    seconds_at_launch = list[float]()
    timer = StepTimer()
    timer.clock = lambda device: StepClock(lambda: LateEvent(late_device))
    trainer = make_trainer(tmp_path, [timer], epochs=2, limit_val_batches=0, logger=False)
    trainer.fit(Busy(), Data(source(tmp_path)))
    steps = SAMPLES // 4
    assert seconds_at_launch == [0.0] * steps + [5.0 * steps] * steps
    assert [(epoch["forward"], epoch["backward"]) for epoch in timer.epochs] == [(2.0, 3.0)] * 2
    assert [epoch["wait"] for epoch in timer.epochs] == [0.0, 0.0]
