"""The parts of a Trainer's steps, by a clock that only the tests advance."""

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader

from lightning_stocache import StepTimer
from lightning_stocache.insight.steps import PARTS, StepClock
from tests.sources import CountedStream, Made
from tests.training.tiny import Data, Model, logged, make_trainer, said

WAIT, MOVE, MOVED, FORWARD, BACKWARD, STEP, CALLBACK = 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0
EACH = {"wait": WAIT, "transfer": MOVE, "forward": FORWARD, "backward": BACKWARD, "optimizer": STEP}
EACH |= {"rest": MOVED + CALLBACK}
BATCHES = 4


class ManualClock:
    """A host's clock that stands still until `spend`."""

    seconds = 0.0

    def spend(self, seconds: float) -> None:
        self.seconds += seconds

    def moment(self) -> float:
        return self.seconds


CLOCK = ManualClock()


def load(index: int) -> tuple[torch.Tensor, int]:
    """A sample that takes a while."""
    CLOCK.spend(WAIT)
    return torch.ones(3, 8, 8, dtype=torch.uint8), 1


SAMPLES = Made(load, BATCHES)


class Moving(Data):
    """A DataModule that moves its batches."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        CLOCK.spend(100)
        return batch


class Steps(Model):
    """A model with a known time for every part of a step."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        CLOCK.spend(MOVE)
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        CLOCK.spend(MOVED)
        return batch

    def loss(self, batch):
        CLOCK.spend(FORWARD)
        loss = super().loss(batch)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: CLOCK.spend(BACKWARD))
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: CLOCK.spend(STEP))
        return optimizer


class Gan(Steps):
    """Manual optimisation: two backwards and two steps inside of `training_step`."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return super().configure_optimizers(), super().configure_optimizers()


class Fetches(Steps):
    """Waits for its batches inside of `training_step`, where nothing is transferred."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


def fit(tmp_path, model: type[Model], data: type[Data] = Data, train: Any = SAMPLES, **options: Any) -> Any:
    """The timer of a fit, and its Trainer. Nothing is validated, unless the options say so."""
    timer, late = StepTimer(), LambdaCallback(on_train_batch_end=lambda *_: CLOCK.spend(CALLBACK))
    timer.clock = lambda device: StepClock(CLOCK.moment)
    trainer = make_trainer(tmp_path, [late, timer], **{"limit_val_batches": 0} | options)
    trainer.fit(model(), data(train, SAMPLES, batch_size=1))
    return timer, trainer


def seconds(timer: StepTimer) -> list[dict[str, float]]:
    """Seconds of each epoch's parts, of `BATCHES` steps."""
    return [{part: BATCHES * mean for part, mean in epoch.items()} for epoch in timer.epochs]


WHOLE = {part: BATCHES * seconds for part, seconds in EACH.items()}
TWICE = {part: 2 * WHOLE[part] for part in ("forward", "backward", "optimizer")}
VALIDATES = {"limit_val_batches": 1.0, "val_check_interval": 2}
STREAM = {"train": CountedStream(BATCHES, load)}
CASES: dict[str, tuple[type[Steps], dict[str, Any], list[dict[str, float]]]] = {
    "clipping and AMP": (Steps, {"gradient_clip_val": 0.5, "precision": "bf16-mixed"}, [WHOLE] * 2),
    "validation in the epoch": (Steps, VALIDATES, [WHOLE] * 2),
    # Lightning fetches the first batch of a stream before training starts.
    "stream": (Steps, VALIDATES | STREAM, [WHOLE | {"wait": WAIT * (BATCHES - 1)}, WHOLE]),
    # A step is one batch: of two, one has an optimiser.
    "accumulation": (Steps, {"accumulate_grad_batches": 2}, [WHOLE | {"optimizer": STEP * BATCHES / 2}]),
    "manual optimisation": (Gan, {}, [WHOLE | TWICE]),
    "a DataModule moves": (Steps, {"data": Moving}, [WHOLE | {"transfer": 100.0 * BATCHES}]),
    "dataloader_iter": (Fetches, {}, [WHOLE | {"transfer": 0.0, "rest": CALLBACK * BATCHES}]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_part_has_its_own_seconds(tmp_path, case):
    """The seconds of a part are counted there alone. Their means are logged once per epoch, and can be watched."""
    model, options, expected = CASES[case]
    timer, trainer = fit(tmp_path, model, epochs=len(expected), log_every_n_steps=2, **options)
    assert seconds(timer) == expected
    for part in PARTS:
        means = [epoch[part] / BATCHES for epoch in expected]
        assert logged(trainer, f"stocache/step/{part}_seconds") == pytest.approx(means)
        assert trainer.callback_metrics[f"stocache/step/{part}_seconds"] == pytest.approx(means[-1])


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_a_line_at_the_end(tmp_path, caplog, error):
    """One line has the shares of the last epoch, also after Ctrl-C, but not after an error."""

    class Breaks(Steps):
        def training_step(self, batch, batch_idx):
            if error is not None and batch_idx == 2:
                raise error
            return super().training_step(batch, batch_idx)

    ends = pytest.raises(SystemExit if error is KeyboardInterrupt else error) if error else contextlib.nullcontext()
    with ends:
        fit(tmp_path, Breaks, epochs=2)
    shares = "wait 1 %, transfer 2 %, forward 6 %, backward 13 %, optimizer 25 %, rest 54 %"
    line = f"stocache: a training step took 63500.00 ms in the last epoch: {shares}"
    printed = [" ".join(each.split()) for each in said(caplog, "a training step took")]
    assert printed == ([] if error is ValueError else [line])


class Device:
    """A device with events. After it has failed, each call raises an error, as CUDA's do after a failed assertion."""

    failed = False

    def event(self) -> "Event":
        self.check()
        return Event(self, time.perf_counter())

    def check(self) -> None:
        if self.failed:
            raise RuntimeError("CUDA error: device-side assert triggered")


@dataclass
class Event:
    """A moment that the device has passed."""

    device: Device
    seconds: float

    def query(self) -> bool:
        self.device.check()
        return True

    def synchronize(self) -> None:
        self.device.check()

    def elapsed_time(self, end: "Event") -> float:
        self.device.check()
        return 1000 * (end.seconds - self.seconds)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("method", ["training_step", "backward", "on_train_batch_end"])
def test_a_device_that_fails_hides_no_error(tmp_path, method, error):
    """The error of a step on a device that has failed comes out, later callbacks see it, and no method stays timed."""
    device, seen = Device(), list[BaseException]()

    class Fails(Model):
        def fail(self, *args, **kwargs):
            device.failed = True
            raise error

    setattr(Fails, method, Fails.fail)
    timer, model = StepTimer(), Fails()
    timer.clock = lambda _: StepClock(device.event)
    late = LambdaCallback(on_exception=lambda trainer, module, exception: seen.append(exception))
    trainer = make_trainer(tmp_path, [timer, late], limit_val_batches=0)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        trainer.fit(model, Data(SAMPLES, batch_size=1))
    assert [type(exception) for exception in seen] == [error]
    timed = {"training_step", "backward", "optimizer_step", "transfer_batch_to_device"}
    assert not timed & {*vars(model), *vars(trainer.strategy)}


@pytest.mark.gpu
def test_a_real_device(tmp_path):
    """On a GPU a large backward takes longer than moving a batch, and all parts fit into the fit's time."""

    class Large(Model):
        def __init__(self):
            super().__init__()
            self.large = torch.nn.Linear(4096, 4096)

        def loss(self, batch):
            return super().loss(batch) + torch.linalg.matrix_power(self.large.weight, 9).mean()

    timer = StepTimer()
    trainer = make_trainer(tmp_path, [timer], accelerator="gpu", epochs=2)
    begin = time.perf_counter()
    trainer.fit(Large(), DataLoader(SAMPLES, pin_memory=True))
    took = time.perf_counter() - begin
    parts = {part: sum(epoch[part] for epoch in seconds(timer)) for part in PARTS}
    assert len(timer.epochs) == 2
    assert parts["backward"] > parts["transfer"] > 0
    assert sum(parts.values()) <= took


@pytest.mark.processes
def test_epochs_come_back_from_a_process_of_the_strategy(tmp_path):
    """The means of each epoch of rank zero, as without such a process."""
    timer = StepTimer()
    trainer = make_trainer(tmp_path, [timer], strategy="ddp_fork", limit_val_batches=0)
    trainer.fit(Model(), Data(SAMPLES, SAMPLES, batch_size=1))
    assert [set(epoch) for epoch in timer.epochs] == [set(PARTS)] * trainer.max_epochs
