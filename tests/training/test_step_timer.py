"""The parts of a Trainer's steps, on a clock that goes on only where a test says so."""

import logging
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_stocache import StepTimer
from lightning_stocache.insight.steps import PARTS, StepClock
from lightning_stocache.training.lightning_internals import step_calls
from tests.insight.devices import Device, ManualClock
from tests.training.tiny import Model, logged, make_trainer

WAIT, MOVE, MOVED, FORWARD, BACKWARD, STEP, CALLBACK = 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0
EACH = {"wait": WAIT, "transfer": MOVE, "forward": FORWARD, "backward": BACKWARD, "optimizer": STEP}
EACH |= {"rest": MOVED + CALLBACK}
BATCHES = 4


class Timed(StepTimer):
    """Reads the test's clock."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.moment = clock.moment

    def clock(self, device: torch.device) -> StepClock:
        return StepClock(self.moment)


class Samples(Dataset[Any]):
    """Batches of one sample, each of which takes a while."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.clock.spend(WAIT)
        return torch.ones(3, 8, 8, dtype=torch.uint8), 1


class Stream(IterableDataset[Any]):
    """The same as a stream."""

    def __init__(self, clock: Any) -> None:
        self.samples = Samples(clock)

    def __iter__(self):
        return (self.samples[index] for index in range(BATCHES))


class Spent(torch.autograd.Function):
    """Its backward takes a while."""

    @staticmethod
    def forward(context: Any, loss: torch.Tensor, clock: Any) -> torch.Tensor:
        context.clock = clock
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.clock.spend(BACKWARD)
        return gradient, None


class Optimizer(torch.optim.SGD):
    """Its step takes a while, without what the closure takes."""

    def __init__(self, parameters: Any, clock: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.clock = clock

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.clock.spend(STEP)
        return result


class Steps(Model):
    """A model of which every part takes a known time."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.clock = clock

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.clock.spend(MOVE)
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.clock.spend(MOVED)
        return batch

    def loss(self, batch):
        self.clock.spend(FORWARD)
        return Spent.apply(super().loss(batch), self.clock)

    def configure_optimizers(self):
        return Optimizer(self.parameters(), self.clock)


class Late(Callback):
    """A callback that takes a while after each batch."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.spend(CALLBACK)


def fit(tmp_path, model: type[Steps] = Steps, data: Any = Samples, *, validate: bool = False, **options: Any) -> Any:
    """The timer of a fit, and its Trainer."""
    clock = options.pop("clock", None) or ManualClock()
    timer = options.pop("timer", None) or Timed(clock)
    loaders = [DataLoader(data(clock))] + [DataLoader(Samples(clock))] * validate
    trainer = make_trainer(tmp_path, [Late(clock), timer], **options)
    trainer.fit(model(clock), *loaders)
    return timer, trainer


def told(timer: StepTimer) -> list[dict[str, float]]:
    """Seconds of each epoch's parts, of `BATCHES` steps."""
    return [{part: BATCHES * seconds for part, seconds in epoch.items()} for epoch in timer.epochs]


def times(count: float, **other: float) -> dict[str, float]:
    return {part: count * seconds for part, seconds in EACH.items()} | other


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (Samples, {"gradient_clip_val": 0.5, "precision": "bf16-mixed"}),
        (Samples, {"profiler": "simple", "logger": False}),
        (Samples, {"validate": True, "val_check_interval": 2}),
        (Stream, {"validate": True, "val_check_interval": 2}),
    ],
)
def test_every_part_has_its_own_seconds(tmp_path, data, options):
    """What a part takes is there and nowhere else, with clipping, AMP, validation inside the epoch, a profiler."""
    timer, trainer = fit(tmp_path, data=data, epochs=2, **options)
    before = data is Stream  # of a stream Lightning fetches the first batch before training starts
    assert told(timer) == [times(BATCHES, wait=WAIT * (BATCHES - before)), times(BATCHES)]
    assert type(trainer.profiler) is SimpleProfiler if "profiler" in options else PassThroughProfiler


def test_gradients_are_accumulated(tmp_path):
    """A step is one batch: of two, one has an optimiser."""
    timer, _ = fit(tmp_path, accumulate_grad_batches=2)
    assert told(timer) == [times(BATCHES, optimizer=STEP * BATCHES / 2)]


def test_several_optimizers_by_hand(tmp_path):
    """Manual optimisation, as of a GAN: two backwards and two steps inside of `training_step`."""

    class Gan(Steps):
        def __init__(self, clock):
            super().__init__(clock)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self):
            return super().configure_optimizers(), super().configure_optimizers()

    timer, _ = fit(tmp_path, Gan)
    twice = {part: 2 * BATCHES * EACH[part] for part in ("forward", "backward", "optimizer")}
    assert told(timer) == [times(BATCHES, **twice)]


def test_a_step_that_fetches_its_batches(tmp_path):
    """With `dataloader_iter` waiting lies inside of `training_step`, and there is no transfer."""

    class Fetches(Steps):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    timer, _ = fit(tmp_path, Fetches)
    [seconds] = told(timer)
    assert seconds == times(BATCHES, transfer=0.0, rest=CALLBACK * BATCHES)


def test_batches_without_a_loss_and_epochs_that_end_early(tmp_path):
    """A step that returns None has no backward; one that a hook skips is none."""

    class Skips(Steps):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 0 else loss

        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    clock = ManualClock()
    timer = Timed(clock)
    make_trainer(tmp_path, [timer], logger=False).fit(Skips(clock), DataLoader(Samples(clock)))
    [means] = timer.epochs
    assert (means["backward"], means["forward"]) == (BACKWARD / 2, FORWARD)  # of two steps


def test_hooks_of_a_datamodule(tmp_path):
    """Where the DataModule moves the batch, its hook is the transfer."""
    clock = ManualClock()

    class Data(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Samples(clock))

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            clock.spend(100)
            return batch

    timer = Timed(clock)
    make_trainer(tmp_path, [timer]).fit(Model(), Data())
    assert told(timer) == [dict.fromkeys(PARTS, 0.0) | {"wait": WAIT * BATCHES, "transfer": 100 * BATCHES}]


def test_means_are_logged_per_epoch(tmp_path):
    """One value of each part for an epoch, beside those of Lightning, so that callbacks can watch them."""
    timer, trainer = fit(tmp_path, epochs=2, log_every_n_steps=2)
    for part, seconds in EACH.items():
        assert logged(trainer, f"stocache/step/{part}_seconds") == pytest.approx([seconds] * 2)
        assert trainer.callback_metrics[f"stocache/step/{part}_seconds"] == pytest.approx(seconds)
        assert timer.epochs[-1][part] == pytest.approx(seconds)


def calls_per_step(tmp_path, *callbacks: Callback) -> float:
    """Functions called in a training step, Python's and C's."""
    counts: list[int] = []

    class Counted(Model):
        def training_step(self, batch, batch_idx):
            sys.setprofile(None)
            counts.append(0)
            sys.setprofile(note)
            return super().training_step(batch, batch_idx)

        def on_train_end(self):
            sys.setprofile(None)

    def note(frame: Any, event: str, argument: Any) -> None:
        counts[-1] += event in ("call", "c_call")

    batches = DataLoader([(torch.ones(3, 8, 8, dtype=torch.uint8), 1)] * 70)
    make_trainer(tmp_path, callbacks, log_every_n_steps=50).fit(Counted(), batches)
    return sum(counts[5:65]) / 60


def test_what_it_costs_is_a_few_calls(tmp_path):
    """More than a callback that does nothing takes: of some two thousand a step. Time depends on load."""
    assert calls_per_step(tmp_path, StepTimer()) < calls_per_step(tmp_path, Callback()) + 60


def test_a_device_is_waited_for_at_the_end_of_an_epoch_alone(tmp_path):
    """The parts of a GPU's steps are those of the device, which the host waits for once an epoch."""
    device = Device()

    class Launches(Steps):
        def loss(self, batch):
            device.launch(7)
            return Model.loss(self, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    timer, _ = fit(tmp_path, Launches, clock=device, epochs=2, log_every_n_steps=1)
    whole = 2 * BATCHES * (WAIT + MOVE + MOVED + CALLBACK)
    assert device.waits <= 2
    seconds = [sum(epoch[part] for epoch in told(timer)) for part in PARTS]
    assert seconds[PARTS.index("forward")] == 2 * BATCHES * 7
    assert sum(seconds) < 2 * BATCHES * 7 + whole  # some of what the host did was hidden


def test_a_line_at_the_end(tmp_path, caplog):
    """The shares of the last epoch are said once."""
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        fit(tmp_path, epochs=2)
    [said] = [record.getMessage() for record in caplog.records if "a training step took" in record.getMessage()]
    assert said == (
        "stocache: a training step took 63500.00 ms in the last epoch: wait 1 %, transfer 2 %, forward 6 %, "
        "backward 13 %, optimizer 25 %, rest 54 %"
    )


@pytest.mark.parametrize(("error", "says"), [(KeyboardInterrupt, True), (ValueError, False)])
def test_an_end_by_an_exception(tmp_path, caplog, error, says):
    """Ctrl-C is a way to stop, after which the line comes; an error is not buried below one."""

    class Breaks(Steps):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise error
            return super().training_step(batch, batch_idx)

    clock = ManualClock()
    trainer = make_trainer(tmp_path, [Timed(clock)])
    ends = pytest.raises(SystemExit if error is KeyboardInterrupt else error)
    with caplog.at_level(logging.INFO, "lightning.pytorch"), ends:
        trainer.fit(Breaks(clock), DataLoader(Samples(clock)))
    assert any("a training step took" in record.getMessage() for record in caplog.records) == says
    assert type(trainer.profiler) is PassThroughProfiler


def test_a_loop_that_does_not_say_when_it_waits_is_not_timed(caplog):
    """Nothing is logged, with one warning, and training goes on."""
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=None), strategy=None)
    assert step_calls(trainer) == []
    assert "StepTimer times nothing" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device(tmp_path):
    """On a GPU the backward of a large layer is longer than moving its batch, and all is within the time of the fit."""

    class Large(Model):
        def __init__(self):
            super().__init__()
            self.large = torch.nn.Linear(4096, 4096)

        def loss(self, batch):
            many = self.large.weight
            for _ in range(8):
                many = many @ self.large.weight
            return super().loss(batch) + many.mean()

    timer = StepTimer()
    trainer: Trainer = make_trainer(tmp_path, [timer], accelerator="gpu", epochs=2)
    begin = time.perf_counter()
    trainer.fit(Large(), DataLoader(Samples(ManualClock()), pin_memory=True))
    seconds = {part: sum(epoch[part] for epoch in told(timer)) for part in PARTS}
    assert len(timer.epochs) == 2
    assert seconds["backward"] > seconds["transfer"] > 0
    assert sum(seconds.values()) <= time.perf_counter() - begin
