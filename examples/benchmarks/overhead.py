"""What the callbacks cost, and whether their clock is right.

    python examples/benchmarks/overhead.py                         # 2 minutes on 2 cores, 4 on busy ones

A Trainer with one of the callbacks at default settings, a CSVLogger and the progress bar, in epoch one, which they have
most to do in. Its steps do nothing but write over 4 MB, so that the processor's caches are as after a step of a model.

cost     what a callback adds to the main thread's CPU time per step, without the step's own work. Steps come in pairs,
         one with the callback and one without (what StepTimer times is timed in both), in random order; pairs in
         which something was logged are taken apart, because they are few and dear. Shown are medians of the
         differences, in brackets their 95 % intervals. Other work on the machine makes both steps slower and the
         intervals wider. "Empty" is a callback that does nothing: what Lightning takes to call it.
calls    functions called for it per step, Python's and C's, over 100 steps without the progress bar: however busy the
         machine is, it is the same
end      CPU time at the end of an epoch: epochs of a few steps end with the callbacks and without them in turn
wait     data_wait_seconds as CacheMonitor logs it, beside what Lightning's SimpleProfiler has for `next(loader)`, in
         epoch two of a loader that is warm, and of one whose source takes 20 ms per batch; a step sleeps for 10 ms
compute  compute_seconds, beside the profiler's `run_training_batch`, which is within it
hooks    what the profiler has for all hooks of both callbacks, over both epochs; what it costs to time them is in it
"""

import contextlib
import io
import logging
import math
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from measure import Report, cell, fresh, parser, rounds
from sources import Late, Pool
from torch.utils.data import DataLoader

from lightning_stocache import CacheMonitor, FillProgress, StepTimer, StocacheDataModule, StochasticCache

STEP_SECONDS = 0.010
SLOW_SECONDS = 0.020
BATCH_SIZE = 4
SHORT = 4  # steps of an epoch where its end is measured
LONG = 500  # and where the end is to be a share of it
COLD_BYTES = 4 << 20  # what a step writes over: more than a core has to itself
FIRST = 20  # steps that are not counted: much is done for the first time in them
_OURS = ("[Callback]CacheMonitor.", "[Callback]FillProgress.")
BOTH = (CacheMonitor, FillProgress)


class Empty(Callback):
    """Does nothing."""


COSTS: dict[str, tuple[type[Callback], ...]] = {
    "Empty": (Empty,),
    "StepTimer": (StepTimer,),
    "CacheMonitor": (CacheMonitor,),
    "FillProgress": (FillProgress,),
    "StochasticCache": (StochasticCache,),
    "CacheMonitor, FillProgress": BOTH,
}


class Steps(LightningModule):
    """Training steps of one weight."""

    def __init__(self, ours: Sequence[type[Callback]] = BOTH) -> None:
        super().__init__()
        self.ours = tuple(ours)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.work()
        return self.weight.sum()

    def work(self) -> None:
        time.sleep(STEP_SECONDS)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Alternating(Steps):
    """Has the callbacks take part in some steps and not in others, and notes what each step took.

    Args:
        ours: the classes of the callbacks.
        block: steps that run with them, or without them, before as many do otherwise; which come first is drawn.
    """

    def __init__(self, ours: Sequence[type[Callback]], block: int) -> None:
        super().__init__(ours)
        self.block, self.random = block, random.Random(0)
        self.cold = np.zeros(COLD_BYTES, dtype=np.uint8)
        self.taken: list[tuple[float, bool, bool]] = []  # CPU seconds; with callbacks; something was logged
        self.logged = False
        self._begun, self._steps, self._with = 0.0, 0, False

    def work(self) -> None:
        now = time.thread_time()
        if self._steps:
            self.taken.append((now - self._begun, self._with, self.logged))
        if self._steps % self.block == 0:
            first = self._steps // self.block % 2 == 0
            self._change(self.random.random() < 0.5 if first else not self._with)
        self._steps, self.logged = self._steps + 1, False
        self.cold += 1
        self._begun = time.thread_time()

    def log(self, *arguments: Any, **options: Any) -> None:
        self.logged = True
        super().log(*arguments, **options)

    def _change(self, with_ours: bool) -> None:
        trainer: Any = self.trainer
        if not self._steps:
            self._all = trainer.callbacks
            self._others = [other for other in self._all if not isinstance(other, self.ours)]
        trainer.callbacks = self._all if with_ours else self._others
        self._with = with_ours


class Counting(Steps):
    """Counts the calls of functions in its first steps."""

    def __init__(self, ours: Sequence[type[Callback]], steps: int) -> None:
        super().__init__(ours)
        self.calls: list[int] = []
        self.steps, self._count = steps, 0

    def work(self) -> None:
        sys.setprofile(None)
        self.calls.append(self._count)
        self._count = 0
        if len(self.calls) <= self.steps:
            sys.setprofile(self._note)
        else:
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        self._count += event in ("call", "c_call")


class Noted(CSVLogger):
    """Tells a model when something is logged."""

    def __init__(self, folder: str, model: Any) -> None:
        super().__init__(folder)
        self.model = model

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.model.logged = True
        super().log_metrics(metrics, step)


def train(model: Steps, steps: int, epochs: int, source_seconds: float, profiler: SimpleProfiler | None) -> Trainer:
    """Train quietly; a source that takes so many seconds per batch is to be waited for in every epoch: no cache."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    source: Any = Pool(steps * BATCH_SIZE, (3, 32, 32))
    if source_seconds:
        source = Late(source, 1000 * source_seconds / BATCH_SIZE)
    data: Any = StocacheDataModule(train=source, batch_size=BATCH_SIZE, budget=0 if source_seconds else "auto")
    if StochasticCache in model.ours:
        data = DataLoader(source, BATCH_SIZE)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            callbacks=[made() for made in model.ours],
            logger=Noted(folder, model),
            profiler=profiler,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=not isinstance(model, Counting),  # it calls functions when it is time to
        )
        trainer.fit(model, data)
    return trainer


def added(steps: int, ours: Sequence[type[Callback]]) -> dict[str, Any]:
    """CPU seconds of the main thread: of a step without the callbacks, and what they add to it, pair by pair."""
    model = Alternating(ours, 1)
    train(model, steps, 1, 0.0, None)
    pairs = list(in_pairs(model.taken[FIRST:]))
    return {
        "without": [without[0] for without, _ in pairs],
        "plain": [more[0] - without[0] for without, more in pairs if not more[2]],
        "logging": [more[0] - without[0] for without, more in pairs if more[2]],
    }


def ends(epochs: int) -> list[float]:
    """CPU seconds of the main thread that both callbacks add to an epoch of SHORT steps, pair by pair."""
    model = Alternating(BOTH, SHORT)
    train(model, SHORT, epochs, 0.0, None)
    each = [model.taken[first : first + SHORT] for first in range(0, len(model.taken), SHORT)]
    whole = [(sum(step[0] for step in steps), steps[0][1], False) for steps in each[4:]]
    return [more[0] - without[0] for without, more in in_pairs(whole)]


def in_pairs(taken: Sequence[tuple[float, bool, bool]]) -> Iterable[Any]:
    """Each two that follow each other: the one without callbacks, and the one with them."""
    return (sorted(pair, key=lambda each: each[1]) for pair in zip(taken[::2], taken[1::2], strict=False))


def calls(steps: int, ours: Sequence[type[Callback]]) -> float:
    """Functions called per step, in an epoch of LONG ones."""
    model = Counting(ours, steps)
    train(model, LONG, 1, 0.0, None)
    return statistics.fmean(model.calls[FIRST:])


def clocks(steps: int, seconds_per_batch: float) -> dict[str, float]:
    """Seconds per step of epoch two, by our clock and by Lightning's."""
    profiler = SimpleProfiler()
    trainer = train(Steps(), steps, 2, seconds_per_batch, profiler)
    logged, spent = trainer.callback_metrics, profiler.recorded_durations
    hooks = [sum(times) for name, times in spent.items() if name.startswith(_OURS)]
    return {
        "hooks": sum(hooks) / (2 * steps),
        "wait": float(logged["stocache/data_wait_seconds"]) / steps,
        "profiled wait": sum(spent["[_TrainingEpochLoop].train_dataloader_next"][-steps:]) / steps,
        "compute": float(logged["stocache/compute_seconds"]) / steps,
        "profiled compute": sum(spent["run_training_batch"][-steps:]) / steps,
    }


class Median(NamedTuple):
    """A median and its 95 % interval, which is of order statistics: it asks nothing of how values are spread."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        several = sorted(values)
        off = 0.98 * math.sqrt(len(several))
        first, last = math.floor(len(several) / 2 - off), math.ceil(len(several) / 2 + off)
        return cls(several[max(first, 0)], statistics.median(several), several[min(last, len(several) - 1)])

    def __add__(self, other: Self) -> Self:
        return type(self)(*(mine + its for mine, its in zip(self, other, strict=True)))

    def __mul__(self, factor: float) -> Self:
        return type(self)(*sorted(factor * each for each in self))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} [{self.low:{spec}}..{self.high:{spec}}]"


def costs(steps: int, epochs: int) -> dict[str, Any]:
    """What all callbacks cost, in one process: each is compared with nothing but its own run."""
    arms = {name: partial(added, steps, ours) for name, ours in COSTS.items()} | {"end": partial(ends, epochs)}
    return {name: arms[name]() for name in random.sample(list(arms), len(arms))}


def counts(steps: int) -> dict[str, float]:
    """Functions called per step, without callbacks and with them."""
    return {name: calls(steps, ours) for name, ours in {"none": (), **COSTS}.items()}


def main(arguments: list[str] | None = None) -> None:
    chosen = parser(__doc__, rounds=2).parse_args(arguments)
    report = Report("overhead", chosen)
    steps, epochs, counted, timed = (60, 20, 50, 20) if report.quick else (800, 80, 100, 100)
    sources = {"warm": 0.0, "20 ms per batch": SLOW_SECONDS}
    arms: dict[Any, Any] = {name: partial(fresh, clocks, timed, seconds) for name, seconds in sources.items()}
    found = rounds(arms | {"costs": partial(fresh, costs, steps, epochs)}, report.rounds)
    called, runs = fresh(counts, counted + FIRST), found.pop("costs")

    rows, totals = [], {}
    for name in COSTS:
        plain, logs = ([each for run in runs for each in run[name][kind]] for kind in ("plain", "logging"))
        share = len(logs) / (len(plain) + len(logs))
        step, log = Median.of(plain), Median.of(logs or [0.0])
        totals[name] = step * (1 - share) + log * share
        cells = [f"{step * 1e6:.0f}", f"{log * 1e6:.0f}" if logs else "", f"{totals[name] * 1e6:.0f}"]
        more = f"{called[name] - called['none']:+.0f}"
        rows.append([name, *cells, f"{totals[name] * (1 / STEP_SECONDS):.2%}", more])
    titles = ("a step with", "adds, us", "where it logs, us", "in all, us", f"of {1000 * STEP_SECONDS:.0f} ms", "calls")
    report.table("CPU of the main thread", titles, rows)
    without = Median.of(each for run in runs for name in COSTS for each in run[name]["without"])
    report.say(f"Without callbacks Lightning takes {without * 1e6:.0f} us a step, in {called['none']:.0f} calls.")
    end = Median.of(each for run in runs for each in run["end"]) + totals["CacheMonitor, FillProgress"] * -SHORT
    share = f"{end * (1 / LONG / STEP_SECONDS):.2%} of {LONG} steps of {1000 * STEP_SECONDS:.0f} ms"
    report.say(f"The end of an epoch costs {end * 1e6:.0f} us more with CacheMonitor and FillProgress, {share}.")

    keys = ("wait", "profiled wait", "compute", "profiled compute", "hooks")
    rows = [[name, *(cell(runs, key, ".0f", 1e6) for key in keys)] for name, runs in found.items()]
    report.table("Clocks, us per step of epoch two", ("loader", *keys), rows)
    report.save(cost=runs, calls=called, clocks=found)


if __name__ == "__main__":
    main()
