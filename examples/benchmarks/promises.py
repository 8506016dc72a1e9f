"""What the package promises, measured: loads, delay, set-up, epoch one, warm epochs, memory.

    python examples/benchmarks/promises.py                   # about 7 minutes on 2 cores
    python examples/benchmarks/promises.py --only delay loads

loads     The source counts its own loads over 3 epochs, with a budget for all N samples, on one process and on two
          gloo ranks. Set-up reads some samples twice, as the log announces, and stores them: N, plus half of the
          announced reads, plus a few second reads that look for random sources. The last column is negative then.
delay     From nothing to the first batch, with a budget of 8 GiB less the time that the source took at set-up,
          against budget=0. What is left is what opening a cache costs; memory is taken only as it is filled.
setup     Seconds until a DataModule of ours is set up and has made its training loader, with a budget for all samples
          less with budget=0, on the slowest of 1, 2 and 4 gloo ranks: the set-up reads are in it.
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
import time
from functools import partial
from typing import Any

import torch
from measure import Job, Peak, Report, Spread, cell, cpu_seconds, epoch_seconds, fresh, parser, rounds
from sources import Clocked, Counted, Pool, jpegs
from torch.utils.data import DataLoader, DistributedSampler

from lightning_stocache import CachedDataset, CachedLoader, StocacheDataModule

GIB = 2**30
LOADERS = {"CachedDataset": DataLoader, "CachedLoader": CachedLoader}
WORKERS = (0, 2)


def count_loads(loader: str, workers: int, samples: int, log: str) -> tuple[int, int, int]:
    """Loads over three epochs, loads before the first one, and those that the package announced. On every rank."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("lightning_stocache").addHandler(handler)
    logging.getLogger("lightning_stocache").setLevel(logging.INFO)
    source = Counted(Pool(samples, (3, 8, 8)), log)
    dataset = CachedDataset(source, defer=True)
    dataset.share()
    ranks = torch.distributed.is_initialized()
    if ranks:
        torch.distributed.barrier()
    before = source.loads.count
    sampler = DistributedSampler(dataset) if ranks else None
    batches = LOADERS[loader](dataset, batch_size=50, shuffle=not ranks, sampler=sampler, num_workers=workers)
    for epoch in range(3):
        if sampler is not None:
            sampler.set_epoch(epoch)
        if ranks:
            torch.distributed.barrier()  # as the gradients of a training keep ranks together
        epoch_seconds(batches)
    if ranks:
        torch.distributed.barrier()
    announced = sum(int(found[1]) for text in heard if (found := re.search(r"(\d+) samples? read at set-up", text)))
    return source.loads.count, before, announced


def measure_loads(report: Report) -> list[dict[str, Any]]:
    samples = 200 if report.quick else 4000
    found, rows = [], []
    for world in (1, 2):
        for loader in LOADERS:
            for workers in WORKERS:
                with tempfile.TemporaryDirectory() as folder:
                    job = Job(count_loads, loader, workers, samples, f"{folder}/loads", world=world if world > 1 else 0)
                    answers = job.results()
                loads, before = max(answer[0] for answer in answers), max(answer[1] for answer in answers)
                announced = sum(answer[2] for answer in answers)
                found.append(
                    {"ranks": world, "loader": loader, "workers": workers, "n": samples, "loads": loads}
                    | {"before_epoch_one": before, "announced": announced}
                )
                rows.append([f"{world} x {loader}", workers, samples, announced, loads, loads - samples - announced])
    columns = ("ranks x loader", "workers", "N", "announced reads", "loads in 3 epochs", "beyond N + announced")
    report.table("Loads counted by the source, budget for all samples", columns, rows)
    return found


def first_batch(budget: int, workers: int, samples: int) -> tuple[float, float, int]:
    """Seconds to the first batch without those that the source took at set-up; these; and the bytes granted."""
    source = Clocked(Pool(samples, (3, 224, 224)))
    start = time.perf_counter()
    dataset = CachedDataset(source, budget)
    at_setup = source.seconds
    iterator = iter(CachedLoader(dataset, batch_size=64, shuffle=True, num_workers=workers))
    next(iterator)
    return time.perf_counter() - start - at_setup, at_setup, dataset.budget_bytes


def measure_delay(report: Report) -> dict[str, Spread]:
    budget = 8 * GIB
    samples = budget // (3 * 224 * 224) + 1000  # more than the budget holds, so that all of it is asked for
    arms = {
        (workers, name): partial(fresh, first_batch, bytes_, workers, samples)
        for workers in WORKERS
        for name, bytes_ in (("8 GiB", budget), ("budget=0", 0))
    }
    found = rounds(arms, report.rounds)
    delays, rows = {}, []
    for workers in WORKERS:
        with_cache, without = found[workers, "8 GiB"], found[workers, "budget=0"]
        delay = Spread.of(1000 * (a[0] - b[0]) for a, b in zip(with_cache, without, strict=True))
        delays[f"{workers} workers"] = delay
        reads = Spread.of(1000 * one[1] for one in with_cache)
        rows.append([f"{workers} workers", f"{with_cache[0][2] / GIB:.1f} GiB", f"{reads:.1f}", f"{delay:.1f}"])
    columns = ("", "granted", "set-up reads, ms", "delay beyond them, ms")
    report.table("First batch: budget of 8 GiB less budget=0", columns, rows)
    return delays


def seconds_of_setup(budget: str | int, samples: int) -> float:
    """On every rank, which begin together."""
    datamodule = StocacheDataModule(train=Pool(samples, (3, 224, 224)), batch_size=64, num_workers=2, budget=budget)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    start = time.perf_counter()
    datamodule.setup("fit")
    datamodule.train_dataloader()
    took = time.perf_counter() - start
    datamodule.teardown("fit")
    return took


def measure_setup(report: Report) -> dict[str, Spread]:
    samples = 2000
    arms = {
        (world, budget): partial(slowest_setup, budget, samples, world) for world in (1, 2, 4) for budget in ("auto", 0)
    }
    found = rounds(arms, report.rounds)
    costs, rows = {}, []
    for world in (1, 2, 4):
        with_cache, without = found[world, "auto"], found[world, 0]
        name = f"{world} rank{'s' if world > 1 else ''}"
        costs[name] = Spread.of(1000 * (a - b) for a, b in zip(with_cache, without, strict=True))
        row = [f"{Spread.of(1000 * one for one in runs):.0f}" for runs in (without, with_cache)]
        rows.append([name, *row, f"{costs[name]:.0f}"])
    report.table("Set-up of a node, in ms", ("", "budget=0", "with a cache", "what the cache costs"), rows)
    return costs


def slowest_setup(budget: str | int, samples: int, world: int) -> float:
    return max(Job(seconds_of_setup, budget, samples, world=world if world > 1 else 0).results())


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


def measure_epochs(report: Report) -> dict[str, dict[str, Spread]]:
    samples = 128 if report.quick else 2000
    epoch_seconds(DataLoader(jpegs(samples), num_workers=2, batch_size=64))  # files in the page cache, for everybody
    arms = {
        (workers, loader): partial(fresh, run_epochs, loader, workers, samples)
        for workers in WORKERS
        for loader in ("DataLoader", *LOADERS)
    }
    found = rounds(arms, report.rounds)
    ratios: dict[str, dict[str, Spread]] = {"epoch one": {}, "CPU in epoch one": {}, "fully cached": {}}
    rows = []
    for (workers, loader), runs in found.items():
        plain = found[workers, "DataLoader"]
        name = f"{loader}, {workers} workers"
        cpu = Spread.of(run["cpu"] for run in runs)
        cells = [cell(runs, "one"), f"{1e6 * cpu.median / samples:.0f}"]
        if loader == "DataLoader":
            rows.append([name, *cells, "", "", ""])
            continue
        one = Spread.ratio((run["one"] for run in runs), (run["one"] for run in plain))
        cpu = Spread.ratio(cpu.values, (run["cpu"] for run in plain))
        gain = Spread.ratio((run["later"] for run in plain), (run["later"] for run in runs))
        ratios["epoch one"][name], ratios["CPU in epoch one"][name], ratios["fully cached"][name] = one, cpu, gain
        rows.append([name, *cells, f"{one:.2f}", f"{cpu:.2f}", f"{gain:.1f}"])
    ratio_columns = ("epoch one / uncached", "its CPU / uncached", "uncached / fully cached")
    columns = ("loader, workers", "epoch one, s", "CPU us/sample", *ratio_columns)
    report.table(f"{samples} JPEG files of 320x320, resized to 96x96", columns, rows)
    return ratios


def fill_and_read(loader: str, budget: int, samples: int) -> int:
    """Two epochs; what the cache itself says that it has in use."""
    dataset = CachedDataset(Pool(samples, (3, 224, 224)), budget, defer=True)
    dataset.share()
    ranks = torch.distributed.is_initialized()
    sampler = DistributedSampler(dataset) if ranks else None
    batches = LOADERS[loader](dataset, batch_size=64, shuffle=not ranks, sampler=sampler, num_workers=2)
    for _ in range(2):
        if ranks:
            torch.distributed.barrier()
        epoch_seconds(batches)
    return 0 if dataset.cache is None else dataset.cache.memory_bytes


def peak_of(loader: str, budget: int, samples: int, world: int) -> int:
    job = Job(fill_and_read, loader, budget, samples, world=world if world > 1 else 0, alone=True)
    with Peak(job.pids) as peak:
        job.results()
    return peak.bytes


def measure_memory(report: Report) -> dict[str, Spread]:
    samples = 400 if report.quick else 5000
    budget = samples * 3 * 224 * 224 * 9 // 10  # a little less than the dataset, so that the budget is what binds
    arms = {
        (world, loader, bytes_): partial(peak_of, loader, bytes_, samples, world)
        for world in (1, 2)
        for loader in LOADERS
        for bytes_ in (budget, 0)
    }
    found = rounds(arms, min(report.rounds, 3))
    ratios, rows = {}, []
    for world in (1, 2):
        for loader in LOADERS:
            with_cache, without = found[world, loader, budget], found[world, loader, 0]
            name = f"{loader}, {world} rank{'s' * (world > 1)}"
            ratios[name] = Spread.of((a - b) / budget for a, b in zip(with_cache, without, strict=True))
            peaks = [f"{Spread.of(one / 2**20 for one in runs):.0f}" for runs in (without, with_cache)]
            beyond = Spread.of((one - 1) * budget / 2**20 for one in ratios[name].values)
            rows.append([name, f"{budget / 2**20:.0f}", *peaks, f"{ratios[name]:.3f}", f"{beyond:.0f}"])
    columns = ("loader, ranks", "budget", "peak with budget=0", "peak", "difference / budget", "beyond the budget")
    report.table("Memory of the node in MiB, 2 workers per rank, batches of 64 of 3x224x224", columns, rows)
    return ratios


PARTS = {
    "loads": measure_loads,
    "delay": measure_delay,
    "setup": measure_setup,
    "epochs": measure_epochs,
    "memory": measure_memory,
}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, rounds=10)
    options.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="some of the parts")
    chosen = options.parse_args(arguments)
    report = Report("promises", chosen)
    found: dict[str, Any] = {part: PARTS[part](report) for part in chosen.only}
    report.save(**found)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
