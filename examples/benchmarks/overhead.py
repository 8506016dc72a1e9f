"""What the callbacks cost, and whether their clock is right.

    python examples/benchmarks/overhead.py                         # about 7 minutes on 2 cores

A Trainer with CacheMonitor and FillProgress at default settings, a CSVLogger and the progress bar; a step sleeps for
10 ms, which releases the GIL as a GPU's step does, and leaves the processor colder than one.

step     CPU microseconds of the main thread per step, without both callbacks and what they add. Blocks of 50 steps run
         with them and without them in turn, within epoch one, which they have most to do in; each block with them is
         compared with its two neighbours
end      the same for the end of an epoch: epochs of a few steps end with them and without them in turn
cost     both together, in epochs of 500 steps, as a share of the step
timer    the same for a step with StepTimer; and what its calls take by themselves, ten thousand steps in a row, on the
         host's clock and with events that cost nothing (a real event takes a CUDA call more, some ten times a step)
wait     data_wait_seconds as CacheMonitor logs it, beside what Lightning's SimpleProfiler has for `next(loader)`, in
         epoch two of a loader that is warm, and of one whose source takes 20 ms per batch
compute  compute_seconds, beside the profiler's `run_training_batch`
hooks    what the profiler has for all hooks of both callbacks, over both epochs; what it costs to time them is in it
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from measure import Report, Spread, fresh, parser, rounds
from torch.utils.data import Dataset

from lightning_stocache import CacheMonitor, FillProgress, StepClock, StepTimer, StocacheDataModule
from lightning_stocache.insight.timeline import DeviceTimeline, HostTimeline

STEP_SECONDS = 0.010
SLOW_SECONDS = 0.020
BATCH_SIZE = 4
SHORT, LONG = 4, 500  # steps of an epoch: where its end is measured, and where it is to be a share of
_OURS = ("[Callback]CacheMonitor.", "[Callback]FillProgress.")
HOW = ("host", "events")  # where StepTimer reads moments
BOTH = (CacheMonitor, FillProgress)


class Images(Dataset[Any]):
    """Images that take a while each."""

    def __init__(self, samples: int, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.full((3, 32, 32), index % 256, dtype=torch.uint8), index % 10


class Sleeper(LightningModule):
    """A step of a known length.

    Args:
        block: steps that run with our callbacks before as many run without them; 0 for all with them.
        ours: their classes.
    """

    def __init__(self, block: int = 0, ours: tuple[type[Callback], ...] = BOTH) -> None:
        super().__init__()
        self.ours = ours
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.block = block
        self.spent: list[float] = []  # CPU seconds of this thread, at the beginning of each step

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.block and len(self.spent) % self.block == 0:
            self._change(with_ours=len(self.spent) // self.block % 2 == 1)
        self.spent.append(time.thread_time())
        time.sleep(STEP_SECONDS)
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def _change(self, with_ours: bool) -> None:
        trainer: Any = self.trainer
        if not self.spent:
            self._all, self._profiler = trainer.callbacks, trainer.profiler
        others = [one for one in self._all if not isinstance(one, self.ours)]
        trainer.callbacks = self._all if with_ours else others
        trainer.profiler = self._profiler if with_ours else self._profiler.users  # as CacheMonitor leaves it


def train(model: Sleeper, steps: int, epochs: int, source_seconds: float, profiler: SimpleProfiler | None) -> Trainer:
    """Train quietly; a source that takes so many seconds per batch is to be waited for in every epoch: no cache."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    source, budget = Images(steps * BATCH_SIZE, source_seconds / BATCH_SIZE), 0 if source_seconds else "auto"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            callbacks=[made() for made in model.ours],
            logger=CSVLogger(folder),
            profiler=profiler,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(model, StocacheDataModule(train=source, batch_size=BATCH_SIZE, budget=budget))
    return trainer


def added(block: int, blocks: int, epochs: int, ours: tuple[type[Callback], ...] = BOTH) -> tuple[float, float]:
    """CPU seconds of the main thread for a block of steps: without our callbacks, and what these add.

    Args:
        block: steps that run with them, or without them, in turn.
        blocks: that run in all; an even number of epochs, or all in one.
        epochs: that they make up.
        ours: the callbacks.
    """
    model = Sleeper(block, ours)
    train(model, block * blocks // epochs, epochs, 0.0, None)
    spent = [model.spent[first] for first in range(0, len(model.spent), block)]
    # What is done for the first time in a process is not counted.
    costs = [after - before for before, after in itertools.pairwise(spent)][2:]
    more = [costs[at] - (costs[at - 1] + costs[at + 1]) / 2 for at in range(1, len(costs) - 1, 2)]
    return statistics.median(costs[::2]), statistics.median(more)


def clocks(steps: int, seconds_per_batch: float) -> dict[str, float]:
    """Seconds per step of epoch two, by our clock and by Lightning's."""
    profiler = SimpleProfiler()
    trainer = train(Sleeper(), steps, 2, seconds_per_batch, profiler)
    logged, spent = trainer.callback_metrics, profiler.recorded_durations
    hooks = [sum(times) for name, times in spent.items() if name.startswith(_OURS)]
    return {
        "hooks": sum(hooks) / (2 * steps),
        "wait": float(logged["stocache/data_wait_seconds"]) / steps,
        "profiled wait": sum(spent["[_TrainingEpochLoop].train_dataloader_next"][-steps:]) / steps,
        "compute": float(logged["stocache/compute_seconds"]) / steps,
        "profiled compute": sum(spent["run_training_batch"][-steps:]) / steps,
    }


class Free:
    """An event that costs nothing."""

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 1.0


def calls(steps: int) -> dict[str, float]:
    """CPU seconds per step of what StepTimer tells its clock."""
    found = {}
    for name, timeline in {"host": HostTimeline(), "events": DeviceTimeline(event=Free)}.items():
        clock, spent = StepClock(timeline=timeline), []
        clock.begin_epoch()
        begin = time.thread_time()
        for step in range(steps):
            if step and step % 320 == 0:  # they are read 32 at a time
                spent.append((time.thread_time() - begin) / 320)
                begin = time.thread_time()
            for part in ("wait", "transfer"):
                clock.start(part)
                clock.stop(part)
            clock.start("optimizer")
            for part in ("forward", "optimizer", "backward"):
                clock.start(part)
                clock.stop(part)
            clock.stop("optimizer")
            clock.end_step(BATCH_SIZE)
        found[name] = statistics.median(spent)
    return found


def main(arguments: list[str] | None = None) -> None:
    chosen = parser(__doc__, rounds=5).parse_args(arguments)
    report = Report("overhead", chosen)
    block, blocks, epochs = (5, 12, 12) if report.quick else (50, 80, 40)
    arms = {
        "step": partial(fresh, added, block, blocks, 1),
        "end": partial(fresh, added, SHORT, epochs, epochs),
        "timer": partial(fresh, added, block, blocks, 1, (StepTimer,)),
        "calls": partial(fresh, calls, 10 * block * blocks),
    }
    runs = rounds(arms, report.rounds)
    steps = [more / block for _, more in runs["step"]]
    ends = [more - SHORT * step for (_, more), step in zip(runs["end"], steps, strict=True)]
    timer = [more / block for _, more in runs["timer"]]
    rows = [
        ["a step", _microseconds(without / block for without, _ in runs["step"]), _microseconds(steps)],
        ["the end of an epoch", "", _microseconds(ends)],
        ["a step with StepTimer", _microseconds(without / block for without, _ in runs["timer"]), _microseconds(timer)],
        *([f"  its clock alone, {name}", "", _microseconds(one[name] for one in runs["calls"])] for name in HOW),
    ]
    report.table("CPU of the main thread", ("", "without callbacks, us", "what they add, us"), rows)
    shares = Spread.of((step + end / LONG) / STEP_SECONDS for step, end in zip(steps, ends, strict=True))
    timed = Spread.of(more / STEP_SECONDS for more in timer)
    report.say(f"Cost of StepTimer: {timed:.2%} of a step of {1000 * STEP_SECONDS:.0f} ms")
    report.say(f"Cost in epochs of {LONG} steps of {1000 * STEP_SECONDS:.0f} ms: {shares:.2%} of the step")

    sources = {"warm": 0.0, "20 ms per batch": SLOW_SECONDS}
    count = 20 if report.quick else 200
    found = rounds({name: partial(fresh, clocks, count, seconds) for name, seconds in sources.items()}, report.rounds)
    keys = ("wait", "profiled wait", "compute", "profiled compute", "hooks")
    rows = [[name, *(_microseconds(one[key] for one in runs) for key in keys)] for name, runs in found.items()]
    report.table("Clocks, us per step of epoch two", ("loader", *keys), rows)
    report.save(cost=runs, share=shares, timer=timed, clocks=found)


def _microseconds(seconds: Iterable[float]) -> str:
    return f"{Spread.of(1e6 * one for one in seconds):.0f}"


if __name__ == "__main__":
    main()
