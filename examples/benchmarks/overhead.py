"""What the callbacks cost, and whether their clock is right.

    python examples/benchmarks/overhead.py                         # 2 minutes on 2 cores, 4 on busy ones

A Trainer with one of the callbacks at default settings (StochasticCache with the CacheMonitor that logs for it), a
CSVLogger and the progress bar, in epoch one, which they have most to do in. Its steps do nothing but write over 4 MB,
so that the processor's caches are as after a step of a model.

cost     what a callback adds to the main thread's CPU time per step, without the step's own work. Steps come in pairs,
         one with the callback and one without (what StepTimer times is timed in both), in random order; pairs in
         which something was logged are taken apart, because they are few and dear. Shown are medians of the
         differences. "Empty" is a callback that does nothing: what Lightning takes to call it.
wait     data_wait_seconds, beside what Lightning's SimpleProfiler has for `next(loader)`, in epoch two of a loader that
         is warm, and of one whose source takes 20 ms per batch; a step sleeps for 10 ms. `iter(loader)` is in it, too
compute  compute_seconds, the rest of the epoch, beside the profiler's `run_training_batch`, which is within it
hooks    what the profiler has for all hooks of StochasticCache and CacheMonitor, over both epochs, with the cost of
         timing them

There is no gain to be seen here: it is what seeing one costs.
"""

import contextlib
import io
import logging
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from measure import Report, cell, fresh, parser
from sources import Late, Pool
from torch.utils.data import DataLoader

from lightning_stocache import CacheMonitor, StepTimer, StochasticCache

STEP_SECONDS = 0.010
SOURCES = {"warm": 0.0, "20 ms per batch": 0.020}
BATCH_SIZE = 4
COLD_BYTES = 4 << 20  # what a step writes over: more than a core has to itself
FIRST = 20  # steps that are not counted: much is done for the first time in them


class Empty(Callback):
    """Does nothing."""


CACHE = (StochasticCache, CacheMonitor)
COSTS: dict[str, tuple[type[Callback], ...]] = {
    "Empty": (Empty,),
    "StepTimer": (StepTimer,),
    "StochasticCache": CACHE,
}


class Steps(LightningModule):
    """Training steps of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.work()
        return self.weight.sum()

    def work(self) -> None:
        time.sleep(STEP_SECONDS)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Alternating(Steps):
    """Has the callbacks take part in one step of each pair, and notes what each step took.

    Args:
        ours: the classes of the callbacks.
    """

    def __init__(self, ours: Sequence[type[Callback]]) -> None:
        super().__init__()
        self.ours, self.random = tuple(ours), random.Random(0)
        self.cold = np.zeros(COLD_BYTES, dtype=np.uint8)
        self.taken: list[tuple[float, bool, bool]] = []  # CPU seconds; with callbacks; something was logged
        self.logged = False
        self._begun, self._steps, self._with = 0.0, 0, False

    def work(self) -> None:
        now, trainer = time.thread_time(), self.trainer
        if self._steps:
            self.taken.append((now - self._begun, self._with, self.logged))
        else:
            self._all: Any = trainer.callbacks
            self._others = [other for other in self._all if not isinstance(other, self.ours)]
        self._with = not self._with if self._steps % 2 else self.random.random() < 0.5
        trainer.callbacks = self._all if self._with else self._others
        self._steps, self.logged = self._steps + 1, False
        self.cold += 1
        self._begun = time.thread_time()

    def log(self, *arguments: Any, **options: Any) -> None:
        self.logged = True
        super().log(*arguments, **options)


class Noted(CSVLogger):
    """Tells a model when something is logged."""

    def __init__(self, folder: str, model: Any) -> None:
        super().__init__(folder)
        self.model = model

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.model.logged = True
        super().log_metrics(metrics, step)


def train(
    model: Steps,
    ours: Sequence[type[Callback]],
    steps: int,
    epochs: int = 1,
    source_seconds: float = 0.0,
    profiler: SimpleProfiler | None = None,
) -> Trainer:
    """Train quietly; a source that takes so many seconds per batch is to be waited for in every epoch: no cache."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    source: Any = Pool(steps * BATCH_SIZE, (3, 32, 32))
    if source_seconds:
        source = Late(source, 1000 * source_seconds / BATCH_SIZE)
    budget: Any = 0 if source_seconds else "auto"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            callbacks=[made(budget) if issubclass(made, StochasticCache) else made() for made in ours],
            logger=Noted(folder, model),
            profiler=profiler,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(source, BATCH_SIZE))
    return trainer


def added(steps: int, ours: Sequence[type[Callback]]) -> dict[str, float]:
    """CPU seconds of the main thread: of a step without the callbacks, and what they add to it."""
    model = Alternating(ours)
    train(model, ours, steps)
    taken = model.taken[FIRST:]
    pairs = [sorted(pair, key=lambda each: each[1]) for pair in zip(taken[::2], taken[1::2], strict=False)]
    plain, logs = ([more[0] - less[0] for less, more in pairs if more[2] is logged] for logged in (False, True))
    adds, logging_adds = statistics.median(plain), statistics.median(logs) if logs else 0.0
    total = (len(plain) * adds + len(logs) * logging_adds) / len(pairs)
    without = statistics.median(less[0] for less, _ in pairs)
    return {"without": without, "adds": adds, "logs": logging_adds, "all": total}


def clocks(steps: int, seconds_per_batch: float) -> dict[str, float]:
    """Seconds per step of epoch two, by our clock and by Lightning's."""
    profiler = SimpleProfiler()
    trainer = train(Steps(), CACHE, steps, 2, seconds_per_batch, profiler)
    logged, spent = trainer.callback_metrics, profiler.recorded_durations
    ours = tuple(f"[Callback]{made.__name__}." for made in CACHE)
    hooks = [sum(times) for name, times in spent.items() if name.startswith(ours)]
    return {
        "wait": float(logged["stocache/data_wait_seconds"]) / steps,
        "profiled wait": sum(spent["[_TrainingEpochLoop].train_dataloader_next"][-steps:]) / steps,
        "compute": float(logged["stocache/compute_seconds"]) / steps,
        "profiled compute": sum(spent["run_training_batch"][-steps:]) / steps,
        "hooks": sum(hooks) / (2 * steps),
    }


def main() -> None:
    report = Report("overhead", parser(__doc__, rounds=3).parse_args())
    steps, timed = (160, 20) if report.quick else (600, 100)
    arms: dict[str, Any] = {name: partial(fresh, clocks, timed, seconds) for name, seconds in SOURCES.items()}
    found = report.measure({name: partial(fresh, added, steps, ours) for name, ours in COSTS.items()} | arms)
    keys = {"without": "without, us", "adds": "adds, us", "logs": "where it logs, us", "all": "in all, us"}
    rows = [[name, *(cell(found[name], key, ".0f", 1e6) for key in keys)] for name in COSTS]
    report.table("CPU of the main thread per step", ("a step with", *keys.values()), rows)
    clocked = list(found["warm"][0])
    rows = [[name, *(cell(found[name], key, ".0f", 1e6) for key in clocked)] for name in SOURCES]
    report.table("Clocks, us per step of epoch two", ("loader", *clocked), rows)
    report.save(runs=found)


if __name__ == "__main__":
    main()
