"""What the package promises, measured: loads, epoch one, warm epochs, memory.

    python examples/benchmarks/promises.py                   # about 6 minutes on 2 cores
    python examples/benchmarks/promises.py --only epochs loads

loads     The source counts its own loads over 3 epochs, with a budget for all N samples, on one process and on two
          gloo ranks. Set-up reads some samples twice, as the log announces, and stores them: N, plus half of the
          announced reads, plus a few second reads that look for random sources. The last column is negative then.
epochs    On the example's JPEG files (320x320, decoded and resized to 96x96), in the loader alone: epoch one over the
          first epoch of a plain DataLoader (1.05: filling costs 5 %), CPU seconds per sample beside it; and the
          uncached epoch over a fully cached one (5: five times faster). "CachedDataset" is a plain DataLoader around
          it.
memory    The most that the node held (allocated blocks of files in memory and anonymous PSS of all processes of the
          run) above the most of the same run with budget=0, over the budget. 1.00 is the budget and nothing beside it.
          What is beyond it are batches under way: it does not grow with the budget.

Ratios are of two runs of one round; the first number is the median of all rounds, in brackets their lowest and highest.

There is no gain where the first epoch is the last, and none where the step and not the data is what takes the time:
this script has no step at all. Where the files are small, uncompressed and in the page cache already, warm epochs gain
what reading them through Python cost, and no more.
"""

import logging
import os
import re
import tempfile
from functools import partial
from itertools import product
from typing import Any

import torch
from measure import Job, Peak, Report, Spread, cell, cpu_seconds, epoch_seconds, fresh, listed, parser
from sources import Pool, jpegs
from torch.utils.data import DataLoader, DistributedSampler

from lightning_stocache import CachedDataset, CachedLoader

LOADERS = {"CachedDataset": DataLoader, "CachedLoader": CachedLoader}
WORKERS = (0, 2)


def shared_loader(loader: str, source: Any, budget: int | str, batch_size: int, workers: int) -> DataLoader[Any]:
    """A loader of this rank's part of a source; the ranks share the cache."""
    dataset = CachedDataset(source, budget, defer=True)
    dataset.share()
    sampler = DistributedSampler(dataset) if torch.distributed.is_initialized() else None
    return LOADERS[loader](dataset, batch_size, shuffle=sampler is None, sampler=sampler, num_workers=workers)


def wait_for_ranks() -> None:
    """As the gradients of a training keep ranks together."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def count_loads(loader: str, workers: int, samples: int, log: str) -> tuple[int, int, int]:
    """Loads over three epochs, loads before the first one, and those that the package announced. On every rank."""
    from training import Counted, Loads  # here: it imports Lightning, which would add to the memory of the other parts

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("lightning_stocache").addHandler(handler)
    logging.getLogger("lightning_stocache").setLevel(logging.INFO)
    source = Counted(Pool(samples, (3, 8, 8)), Loads(log))
    batches = shared_loader(loader, source, "auto", 50, workers)
    wait_for_ranks()
    before = source.loads.count
    for epoch in range(3):
        if isinstance(batches.sampler, DistributedSampler):
            batches.sampler.set_epoch(epoch)
        wait_for_ranks()
        epoch_seconds(batches)
    wait_for_ranks()
    announced = sum(int(found[1]) for text in heard if (found := re.search(r"(\d+) reads at set-up", text)))
    return source.loads.count, before, announced


def measure_loads(report: Report) -> list[dict[str, Any]]:
    samples = 200 if report.quick else 4000
    found, rows = [], []
    for ranks, loader, workers in product((1, 2), LOADERS, WORKERS):
        with tempfile.TemporaryDirectory() as folder:
            world = ranks if ranks > 1 else 0
            answers = Job(count_loads, loader, workers, samples, f"{folder}/loads", world=world).results()
        loads, before, announced = zip(*answers, strict=True)
        counts = {"loads": max(loads), "before_epoch_one": max(before), "announced": sum(announced)}
        found.append({"ranks": ranks, "loader": loader, "workers": workers, "n": samples} | counts)
        beyond = max(loads) - samples - sum(announced)
        rows.append([f"{ranks} x {loader}", workers, samples, sum(announced), max(loads), beyond])
    columns = ("ranks x loader", "workers", "N", "announced reads", "loads in 3 epochs", "beyond N + announced")
    report.table("Loads counted by the source, budget for all samples", columns, rows)
    return found


def run_epochs(loader: str, workers: int, samples: int) -> dict[str, float]:
    """Seconds and CPU seconds of epoch one, seconds of the median later epoch."""
    source = jpegs(samples)
    if loader == "DataLoader":
        batches = DataLoader(source, batch_size=64, shuffle=True, num_workers=workers)
    else:
        batches = LOADERS[loader](CachedDataset(source), batch_size=64, shuffle=True, num_workers=workers)
    cpu = cpu_seconds()
    one = epoch_seconds(batches)
    cpu = cpu_seconds() - cpu
    later = [epoch_seconds(batches) for _ in range(1 if loader == "DataLoader" else 5)]
    return {"one": one, "cpu": cpu, "later": Spread.of(later).median}


def measure_epochs(report: Report) -> list[dict[str, Any]]:
    samples = 128 if report.quick else 2000
    epoch_seconds(DataLoader(jpegs(samples), num_workers=2, batch_size=64))  # files in the page cache, for everybody
    arms = {
        (workers, loader): partial(fresh, run_epochs, loader, workers, samples)
        for workers in WORKERS
        for loader in ("DataLoader", *LOADERS)
    }
    found = report.measure(arms)
    rows = []
    for (workers, loader), runs in found.items():
        plain = found[workers, "DataLoader"]
        cells = [cell(runs, "one"), f"{1e6 * Spread.of(run['cpu'] for run in runs).median / samples:.0f}"]
        ratios = [Spread.ratio((run[key] for run in runs), (run[key] for run in plain)) for key in ("one", "cpu")]
        gain = Spread.ratio((run["later"] for run in plain), (run["later"] for run in runs))
        compared = ["", "", ""] if runs is plain else [*(f"{ratio:.2f}" for ratio in ratios), f"{gain:.1f}"]
        rows.append([f"{loader}, {workers} workers", *cells, *compared])
    compared = ["epoch one / uncached", "its CPU / uncached", "uncached / fully cached"]
    columns = ("loader, workers", "epoch one, s", "CPU us/sample", *compared)
    report.table(f"{samples} JPEG files of 320x320, resized to 96x96", columns, rows)
    return listed(found, "workers", "loader")


def fill_and_read(loader: str, budget: int, samples: int) -> None:
    """Two epochs."""
    batches = shared_loader(loader, Pool(samples, (3, 224, 224)), budget, 64, 2)
    for _ in range(2):
        wait_for_ranks()
        epoch_seconds(batches)


def peak_of(loader: str, budget: int, samples: int, ranks: int) -> int:
    job = Job(fill_and_read, loader, budget, samples, world=ranks if ranks > 1 else 0, alone=True)
    with Peak(job.pids) as peak:
        job.results()
    return peak.bytes


def measure_memory(report: Report) -> list[dict[str, Any]]:
    samples = 400 if report.quick else 5000
    budget = samples * 3 * 224 * 224 * 9 // 10  # a little less than the dataset, so that the budget is what binds
    arms = {
        (ranks, loader, granted): partial(peak_of, loader, granted, samples, ranks)
        for ranks, loader, granted in product((1, 2), LOADERS, (budget, 0))
    }
    found = report.measure(arms, at_most=3)
    rows = []
    for ranks, loader in product((1, 2), LOADERS):
        cached, without = found[ranks, loader, budget], found[ranks, loader, 0]
        ratio = Spread.of((a - b) / budget for a, b in zip(cached, without, strict=True))
        beyond = ((value - 1) * budget for value in ratio.values)
        sizes = [f"{Spread.of(value / 2**20 for value in values):.0f}" for values in (without, cached, beyond)]
        rows.append([f"{ranks} x {loader}", f"{budget / 2**20:.0f}", *sizes, f"{ratio:.3f}"])
    columns = ("ranks x loader", "budget", "peak with budget=0", "peak", "beyond the budget", "difference / budget")
    report.table("Memory of the node in MiB, 2 workers per rank, batches of 64 of 3x224x224", columns, rows)
    return listed(found, "ranks", "loader", "budget")


PARTS = {"loads": measure_loads, "epochs": measure_epochs, "memory": measure_memory}


def main() -> None:
    options = parser(__doc__, rounds=10)
    options.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="some of the parts")
    chosen = options.parse_args()
    report = Report("promises", chosen)
    report.save(**{part: PARTS[part](report) for part in chosen.only})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
