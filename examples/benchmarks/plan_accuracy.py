"""What `plan` predicts for the loader alone, beside what is measured.

    python examples/benchmarks/plan_accuracy.py                    # about 3 minutes on 2 cores
    python examples/benchmarks/plan_accuracy.py --workers 2 --latency 4

The example's JPEG files through the training loader of a StocacheDataModule, with 0, 25, 50, 75 and 100 % of them in
memory. In each round a fresh process plans, and fresh processes train on nothing: epochs one to three are timed, and
the later one is the faster of epochs two and three. Files are read once beforehand, so all reads come from the page
cache. The table gives predicted over measured, the median of all rounds with the lowest and the highest; within 0.85 to
1.15 is what is promised on a machine that does nothing else.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from measure import Report, Spread, epoch_seconds, fresh, parser, rounds
from sources import Late, jpegs
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import StocacheDataModule
from lightning_stocache.insight.measurement import measure
from lightning_stocache.insight.plan import Job, plan
from lightning_stocache.training.plan_inputs import training_data

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def module(samples: int, latency: float, workers: int, budget: str) -> StocacheDataModule:
    torch.set_num_threads(1)  # as examples/train.py does
    source: Dataset[Any] = Late(jpegs(samples), latency) if latency else jpegs(samples)
    return StocacheDataModule(train=source, batch_size=64, num_workers=workers, budget=budget)


def predicted(samples: int, latency: float, workers: int) -> dict[float, tuple[float, float]]:
    """Seconds of epoch one and of a later epoch for each share."""
    data = training_data(module(samples, latency, workers, "auto"))
    job = Job(samples, data.batch_size, workers, safe_bytes=2**62)
    rows = {row.budget: (row.first_epoch.median, row.later_epoch.median) for row in plan(job, measure(data)).rows}
    return {share: rows[f"{100 * share:.0f}%"] for share in SHARES}


def measured(samples: int, latency: float, workers: int, share: float) -> tuple[float, float]:
    """Seconds of epoch one and of a later epoch, from running them."""
    datamodule = module(samples, latency, workers, f"{100 * share:g}%")
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    first, *later = (epoch_seconds(loader) for _ in range(3))
    datamodule.teardown("fit")
    return first, min(later)


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="num_workers (0 2)")
    options.add_argument("--latency", type=float, default=0.0, help="ms added to each read (0)")
    options.add_argument("--samples", type=int, help="JPEG files (4000; quick: 256)")
    chosen = options.parse_args(arguments)
    report = Report("plan_accuracy", chosen)
    samples = chosen.samples or (256 if report.quick else 4000)
    epoch_seconds(DataLoader(jpegs(samples), batch_size=64))  # into the page cache, for all runs alike
    arms: dict[Any, Any] = {}
    for workers in chosen.workers:
        arms[workers, None] = partial(fresh, predicted, samples, chosen.latency, workers)
        for share in SHARES:
            arms[workers, share] = partial(fresh, measured, samples, chosen.latency, workers, share)
    found = rounds(arms, report.rounds)
    rows = []
    for workers in chosen.workers:
        for share in SHARES:
            plans, runs = [plan[share] for plan in found[workers, None]], found[workers, share]
            row = [f"{workers} workers, {100 * share:g} %"]
            for epoch in range(2):
                said, was = ([pair[epoch] for pair in pairs] for pairs in (plans, runs))
                row += [f"{Spread.of(said).median:.3f}", f"{Spread.of(was):.3f}", f"{Spread.ratio(said, was):.2f}"]
            rows.append(row)
    names = ("epoch one: plan, s", "measured, s", "ratio", "later: plan, s", "measured, s", "ratio")
    report.table(f"{samples} JPEG files, batches of 64", ("workers, share in memory", *names), rows)
    report.save(runs=[{"workers": key[0], "share": key[1], "rounds": runs} for key, runs in found.items()])


if __name__ == "__main__":
    main()
