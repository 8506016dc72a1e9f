"""What the callbacks cost, and whether their clock is right: both beside Lightning's own profiler.

    python examples/benchmarks/overhead.py                         # about 1 minute on 2 cores

Two epochs of a Trainer with CacheMonitor and FillProgress at default settings, a CSVLogger and the progress bar; a step
sleeps for 10 ms, which releases the GIL as a GPU's step does. Two loaders: a warm one, for which training never waits,
and one whose source takes 20 ms per batch. Lightning's SimpleProfiler times every hook and every wait.

cost     microseconds per step of all hooks of our callbacks together, and their share of a step
wait     data_wait_seconds as CacheMonitor logs it, and the profiler's time in `next(loader)`
compute  compute_seconds, and the profiler's time in `run_training_batch`
"""

from __future__ import annotations

import tempfile
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from measure import Report, Spread, fresh, parser, rounds
from torch.utils.data import Dataset

from lightning_stocache import CacheMonitor, FillProgress, StocacheDataModule

STEP_SECONDS = 0.010
OURS = ("CacheMonitor", "FillProgress")


class Slow(Dataset[Any]):
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


def run(steps: int, seconds_per_batch: float) -> dict[str, float]:
    """Train for two epochs; everything in seconds per step, of epoch two."""
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    warnings.simplefilter("ignore")
    batch_size = 32
    source = Slow(steps * batch_size, seconds_per_batch / batch_size)
    # Without a cache where the source is to be waited for in epoch two as well.
    data = StocacheDataModule(train=source, batch_size=batch_size, budget=0 if seconds_per_batch else "auto")
    profiler, monitor, logged = SimpleProfiler(), CacheMonitor(), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=2,
            accelerator="cpu",
            callbacks=[monitor, FillProgress()],
            logger=CSVLogger(folder),
            profiler=profiler,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(Sleeper(), data)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    spent = profiler.recorded_durations
    ours = [sum(times) for name, times in spent.items() if any(f"[Callback]{one}." in name for one in OURS)]
    waits = spent["[_TrainingEpochLoop].train_dataloader_next"]
    return {
        "cost": sum(ours) / (2 * steps),
        "wait": logged["stocache/data_wait_seconds"] / steps,
        "profiled wait": sum(waits[-steps:]) / steps,
        "compute": logged["stocache/compute_seconds"] / steps,
        "profiled compute": sum(spent["run_training_batch"][-steps:]) / steps,
    }


def main(arguments: list[str] | None = None) -> None:
    chosen = parser(__doc__, rounds=5).parse_args(arguments)
    report = Report("overhead", chosen)
    steps = 20 if report.quick else 200
    arms = {"warm": 0.0, "20 ms per batch": 0.020}
    found = rounds({name: lambda per=per: fresh(run, steps, per) for name, per in arms.items()}, report.rounds)
    rows = []
    for name, runs in found.items():
        row = [name, f"{Spread.of(1e6 * one['cost'] for one in runs):.0f}"]
        row.append(f"{Spread.of(100 * one['cost'] / STEP_SECONDS for one in runs):.2f}")
        for what in ("wait", "compute"):
            row += [f"{Spread.of(1e6 * one[which] for one in runs):.0f}" for which in (what, f"profiled {what}")]
        rows.append(row)
    columns = ("loader", "callbacks, us per step", "% of a step", "wait, us", "profiled", "compute, us", "profiled")
    report.table(f"Per step of {1000 * STEP_SECONDS:.0f} ms, {steps} steps", columns, rows)
    report.save()


if __name__ == "__main__":
    main()
