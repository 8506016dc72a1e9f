"""The parts of a Trainer's steps, by a clock that only the tests advance."""

import contextlib
import time
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


def samples(clock: Any) -> Made:
    """Batches of one sample, each of which takes a while."""

    def load(index: int) -> tuple[torch.Tensor, int]:
        clock.spend(WAIT)
        return torch.ones(3, 8, 8, dtype=torch.uint8), 1

    return Made(load, BATCHES)


def stream(clock: Any) -> CountedStream:
    """The same samples as a stream."""
    return CountedStream(BATCHES, samples(clock).make)


def moving(clock: Any) -> Data:
    """A DataModule that moves its batches."""

    class Moving(Data):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            clock.spend(100)
            return batch

    return Moving(samples(clock), batch_size=1)


class Steps(Model):
    """A model with a known time for every part of a step."""

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
        loss = super().loss(batch)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self.clock.spend(BACKWARD))
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.clock.spend(STEP))
        return optimizer


def fit(tmp_path, model: type[Steps] = Steps, data: Any = samples, *, validate: bool = False, **options: Any) -> Any:
    """The timer of a fit, and its Trainer."""
    clock = ManualClock()
    timer, late = StepTimer(), LambdaCallback(on_train_batch_end=lambda *_: clock.spend(CALLBACK))
    timer.clock = lambda device: StepClock(clock.moment)
    train = data(clock)
    loaders = [train if isinstance(train, Data) else DataLoader(train)] + [DataLoader(samples(clock))] * validate
    trainer = make_trainer(tmp_path, [late, timer], **options)
    trainer.fit(model(clock), *loaders)
    return timer, trainer


def seconds(timer: StepTimer) -> list[dict[str, float]]:
    """Seconds of each epoch's parts, of `BATCHES` steps."""
    return [{part: BATCHES * mean for part, mean in epoch.items()} for epoch in timer.epochs]


def times(count: float, **other: float) -> dict[str, float]:
    return {part: count * seconds for part, seconds in EACH.items()} | other


class Gan(Steps):
    """Manual optimisation: two backwards and two steps inside of `training_step`."""

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


class Fetches(Steps):
    """Waits for its batches inside of `training_step`, where nothing is transferred."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


WHOLE, VALIDATES = times(BATCHES), {"validate": True, "val_check_interval": 2}
TWICE = {part: 2 * BATCHES * EACH[part] for part in ("forward", "backward", "optimizer")}
CASES: dict[str, tuple[type[Steps], Any, dict[str, Any], list[dict[str, float]]]] = {
    "clipping and AMP": (Steps, samples, {"gradient_clip_val": 0.5, "precision": "bf16-mixed"}, [WHOLE] * 2),
    "validation in the epoch": (Steps, samples, VALIDATES, [WHOLE] * 2),
    # Lightning fetches the first batch of a stream before training starts.
    "stream": (Steps, stream, VALIDATES, [times(BATCHES, wait=WAIT * (BATCHES - 1)), WHOLE]),
    # A step is one batch: of two, one has an optimiser.
    "accumulation": (Steps, samples, {"accumulate_grad_batches": 2}, [times(BATCHES, optimizer=STEP * BATCHES / 2)]),
    "manual optimisation": (Gan, samples, {}, [times(BATCHES, **TWICE)]),
    "a DataModule moves": (Steps, moving, {}, [times(BATCHES, transfer=100 * BATCHES)]),
    "dataloader_iter": (Fetches, samples, {}, [times(BATCHES, transfer=0.0, rest=CALLBACK * BATCHES)]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_part_has_its_own_seconds(tmp_path, case):
    """The seconds of a part are counted there alone. Their means are logged once per epoch, and can be watched."""
    model, data, options, expected = CASES[case]
    timer, trainer = fit(tmp_path, model, data, epochs=len(expected), log_every_n_steps=2, **options)
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
    line = (
        "stocache: a training step took 63500.00 ms in the last epoch: wait 1 %, transfer 2 %, forward 6 %, "
        "backward 13 %, optimizer 25 %, rest 54 %"
    )
    assert said(caplog, "a training step took") == ([] if error is ValueError else [line])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device(tmp_path):
    """On a GPU a large backward takes longer than moving a batch, and all parts fit into the fit's time."""

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
    trainer = make_trainer(tmp_path, [timer], accelerator="gpu", epochs=2)
    begin = time.perf_counter()
    trainer.fit(Large(), DataLoader(samples(ManualClock()), pin_memory=True))
    took = time.perf_counter() - begin
    parts = {part: sum(epoch[part] for epoch in seconds(timer)) for part in PARTS}
    assert len(timer.epochs) == 2
    assert parts["backward"] > parts["transfer"] > 0
    assert sum(parts.values()) <= took
