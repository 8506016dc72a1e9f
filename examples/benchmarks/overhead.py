"""What the callbacks cost, and whether their clock is right.

    python examples/benchmarks/overhead.py                         # about 4 minutes on 2 cores

Two epochs of a Trainer with CacheMonitor and FillProgress at default settings, a CSVLogger and the progress bar; a step
sleeps for 10 ms, which releases the GIL as a GPU's step does.

cost     CPU microseconds per step of the main thread, with both callbacks and without any, over the whole call: the
         difference is what they cost, epoch ends and the Trainer's own logging of their values included
wait     data_wait_seconds as CacheMonitor logs it, beside what Lightning's SimpleProfiler has for `next(loader)`, in
         epoch two of a loader that is warm, and of one whose source takes 20 ms per batch
compute  compute_seconds, beside the profiler's `run_training_batch`
hooks    what the profiler has for all hooks of both callbacks, over both epochs; what it costs to time them is in it
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import time
import warnings
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from measure import Report, Spread, fresh, parser, rounds
from torch.utils.data import Dataset

from lightning_stocache import CacheMonitor, FillProgress, StocacheDataModule

STEP_SECONDS = 0.010
SLOW_SECONDS = 0.020
BATCH_SIZE = 4
_OURS = ("[Callback]CacheMonitor.", "[Callback]FillProgress.")


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
    """A step of a known length."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(STEP_SECONDS)
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(steps: int, seconds_per_batch: float, callbacks: bool, profiler: SimpleProfiler | None) -> Trainer:
    """Train for two epochs, quietly."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    # A slow source is to be waited for in epoch two as well: no cache.
    source, budget = Images(steps * BATCH_SIZE, seconds_per_batch / BATCH_SIZE), 0 if seconds_per_batch else "auto"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            max_epochs=2,
            accelerator="cpu",
            callbacks=[CacheMonitor(), FillProgress()] if callbacks else None,
            logger=CSVLogger(folder),
            profiler=profiler,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(Sleeper(), StocacheDataModule(train=source, batch_size=BATCH_SIZE, budget=budget))
    return trainer


def cpu_per_step(steps: int, callbacks: bool) -> float:
    """CPU seconds of the main thread, over both epochs. What is done for the first time in a process is not counted."""
    train(5, 0.0, callbacks, None)
    start = time.thread_time()
    train(steps, 0.0, callbacks, None)
    return (time.thread_time() - start) / (2 * steps)


def clocks(steps: int, seconds_per_batch: float) -> dict[str, float]:
    """Seconds per step of epoch two, by our clock and by Lightning's."""
    profiler = SimpleProfiler()
    trainer = train(steps, seconds_per_batch, True, profiler)
    logged, spent = trainer.callback_metrics, profiler.recorded_durations
    hooks = [sum(times) for name, times in spent.items() if name.startswith(_OURS)]
    return {
        "hooks": sum(hooks) / (2 * steps),
        "wait": float(logged["stocache/data_wait_seconds"]) / steps,
        "profiled wait": sum(spent["[_TrainingEpochLoop].train_dataloader_next"][-steps:]) / steps,
        "compute": float(logged["stocache/compute_seconds"]) / steps,
        "profiled compute": sum(spent["run_training_batch"][-steps:]) / steps,
    }


def main(arguments: list[str] | None = None) -> None:
    chosen = parser(__doc__, rounds=5).parse_args(arguments)
    report = Report("overhead", chosen)
    steps = 20 if report.quick else 500
    costs = rounds({on: partial(fresh, cpu_per_step, steps, on) for on in (False, True)}, report.rounds)
    added = [after - before for before, after in zip(costs[False], costs[True], strict=True)]
    cells = [f"{Spread.of(1e6 * one for one in runs):.0f}" for runs in (costs[False], costs[True], added)]
    share = f"{Spread.of(100 * one / STEP_SECONDS for one in added):.2f}"
    columns = ("", "without callbacks, us", "with them, us", "what they cost, us", "% of a step")
    title = f"CPU per step of {1000 * STEP_SECONDS:.0f} ms, two epochs of {steps} steps"
    report.table(title, columns, [["main thread", *cells, share]])

    sources = {"warm": 0.0, "20 ms per batch": SLOW_SECONDS}
    steps = min(steps, 200)
    arms = {name: partial(fresh, clocks, steps, seconds) for name, seconds in sources.items()}
    found = rounds(arms, report.rounds)
    keys = ("wait", "profiled wait", "compute", "profiled compute", "hooks")
    rows = [
        [name, *(f"{Spread.of(1e6 * one[key] for one in runs):.0f}" for key in keys)] for name, runs in found.items()
    ]
    report.table("Clocks, us per step of epoch two", ("loader", *keys), rows)
    report.save(cost=costs, clocks=found)


if __name__ == "__main__":
    main()
