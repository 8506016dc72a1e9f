"""Warm and cold speed beside other caches, and beside the limit: what one thread needs to copy the samples.

    python examples/benchmarks/peers.py                        # about 30 minutes on 2 cores
    python examples/benchmarks/peers.py --only transforms

Ways to the same batches (uint8 images and int labels, shuffled), all fully cached but the last:

CachedLoader    ours: hits are gathered in the main process
CachedDataset   ours behind a plain DataLoader, as a user has it who changes the dataset only
stocaching      the library that this idea comes from (`pip install --no-deps stocaching`), as its README shows it
shared tensor   the same idea in the fewest lines: a tensor in shared memory, filled as it is read
MONAI           `monai.data.CacheDataset` (`pip install --no-deps monai`), which fills before epoch one
MONAI runtime   the same with `runtime_cache`, which fills during epoch one
memmap          a file of all samples, written beforehand and mapped
list            a Python list of all samples
DataLoader      no cache; the source copies its samples out of a small pool, so there is next to nothing to save

Workers persist. Each is measured with 0, 1, 2 and more workers, where there are cores for them: what a cache gains from
them differs, and many are fastest with none. The tables:

best        for the README: each with the number of workers at which it is fastest; samples/s of fully cached epochs,
            seconds of preparation (what is loaded or written before there can be a batch: of this source, which costs
            nothing; add the time to load yours once, in one process), from there to the first batch and to the end of
            epoch one, and memory: anonymous PSS of all processes and the allocated blocks of files in memory (or shared
            PSS, if that is more) in the middle of a warm epoch, above the process before, over the samples' own bytes
            (1.0: one copy of the dataset, nothing else; the pages of a memmap's file are the page cache's, and not
            counted)
warm        samples/s of fully cached epochs, against the limit (one thread that copies rows by NumPy's `take` out of
            shared memory into three buffers in rotation, indices drawn beforehand, first epochs left out, median of 5)
            and as a multiple of the best of the others with its best number of workers
cold        preparation, first batch, epoch one and memory for each number of workers
wait        microseconds that a step of 2 ms waits for its batch; it sleeps, which releases the GIL as a GPU's step does
python      microseconds per warm batch of 256 tiny samples beyond the gather of them: what planning and Python cost
transforms  with a transform per sample on the CPU, after the cache, in 2 workers: samples/s for uint8 to normalised
            float32 of 3x224x224 (last row: the same arithmetic on whole batches, as `batch_transform` does it, here on
            the CPU too), and CPU seconds per sample for RandomResizedCrop and flip over those of the transform alone

There is no gain where the step is slower than the slowest row here: a model that takes 10 ms for a batch does not
become faster when the batch comes in 0.5 ms instead of 5. And none in epoch one.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import figure
import torch
from footprint import Footprint
from gather import gather_seconds
from measure import Report, Spread, epoch_seconds, fresh, parser, rounds, thousands
from rivals import OTHERS, OURS, import_peer, make_dataset, make_loader
from sources import Pool
from torch.utils.data import DataLoader
from transforms import measure_transforms

from lightning_stocache import CachedDataset

# Samples of each shape, several times as large as an L3 cache, and the larger of two batch sizes.
SHAPES = {(3, 32, 32): (25600, 256), (3, 64, 64): (8192, 256), (3, 224, 224): (1024, 64)}
SMALL_BATCH = 8
STEP_SECONDS = 0.002
ONCE = ("preparation, s", "first batch, s", "epoch one, s", "memory / samples")


def run(peer: str, shape: tuple[int, ...], workers: int, samples: int, batch_size: int) -> dict[str, Any]:
    """Preparation, first batch, epoch one, warm epochs at two batch sizes, memory, wait."""
    import_peer(peer)
    source = Pool(samples, shape)
    before = Footprint.of([os.getpid()]).held
    start = time.perf_counter()
    dataset = make_dataset(peer, source, workers)
    prepared = time.perf_counter()
    loader = make_loader(peer, dataset, batch_size, workers)
    batches = iter(loader)
    next(batches)
    found: dict[str, Any] = {"prepare": prepared - start, "first": time.perf_counter() - prepared}
    for _ in batches:
        pass
    found["one"] = time.perf_counter() - prepared
    found["held"] = middle_of_epoch(loader).held - before  # epoch two, which touches cold pages: not timed
    found["warm"] = {batch_size: samples / warm_seconds(loader)}
    found["wait"] = wait_seconds(loader)
    del loader, batches
    found["warm"][SMALL_BATCH] = samples / warm_seconds(make_loader(peer, dataset, SMALL_BATCH, workers), 1)
    return found


def warm_seconds(loader: Iterable[Any], first: int = 0) -> float:
    """The median epoch of as many as fit into 0.4 s, one at least, nine at most; without the first ones."""
    for _ in range(first):
        epoch_seconds(loader)
    found: list[float] = []
    while not found or (sum(found) < 0.4 and len(found) < 9):
        found.append(epoch_seconds(loader))
    return Spread.of(found).median


def middle_of_epoch(loader: DataLoader[Any]) -> Footprint:
    seen = Footprint()
    for number, _ in enumerate(loader):
        if number == len(loader) // 2:
            seen = Footprint.of([os.getpid()])
    return seen


def wait_seconds(loader: DataLoader[Any], steps: int = 80) -> float:
    """The median wait for a batch behind a step. Not of an epoch's first batches: nothing could be made ready there."""
    waits: list[float] = []
    first = min(5, len(loader) - 1)
    while len(waits) < steps:
        batches = iter(loader)
        for number in range(steps):
            start = time.perf_counter()
            if next(batches, None) is None:
                break
            if number >= first:
                waits.append(time.perf_counter() - start)
            time.sleep(STEP_SECONDS)
    return Spread.of(waits).median


def limit(shape: tuple[int, ...], samples: int, batch_size: int) -> float:
    """Samples/s that one thread gathers."""
    return samples / Spread.of(gather_seconds(samples, shape, batch_size)).median


def numbers_of_workers(quick: bool) -> tuple[int, ...]:
    cores = len(os.sched_getaffinity(0))
    return (0, 2) if quick else tuple(sorted({0, 1, 2, *(number for number in (4, 8, cores) if number <= cores)}))


def measure_speed(report: Report, peers: list[str], quick: bool) -> dict[str, Any]:
    shapes = {shape: (1024, batch_size) for shape, (_, batch_size) in [*SHAPES.items()][:1]} if quick else SHAPES
    workers = numbers_of_workers(quick)
    arms: dict[Any, Callable[[], Any]] = {}
    for shape, (samples, batch_size) in shapes.items():
        for size in (batch_size, SMALL_BATCH):
            arms["limit", shape, size] = partial(fresh, limit, shape, samples, size)
        for number in workers:
            for peer in peers:
                arms[peer, shape, number] = partial(fresh, run, peer, shape, number, samples, batch_size)
    found = rounds(arms, report.rounds)
    warm = {
        (*arm, size): Spread.of(run["warm"][size] for run in runs)
        for arm, runs in found.items()
        if arm[0] != "limit"
        for size in runs[0]["warm"]
    }
    rows, cold, wait = [], [], []
    for shape, (samples, batch_size) in shapes.items():
        name, payload = "x".join(map(str, shape)), samples * torch.Size(shape).numel()
        for size in (batch_size, SMALL_BATCH):
            rivals = (warm[peer, shape, number, size] for peer in peers if peer in OTHERS for number in workers)
            rival = max(rivals, key=median)
            limits = found["limit", shape, size]
            rows.append([f"{name}, batch {size}: the limit", "", thousands(limits), "1", ""])
            for number in workers:
                for peer in peers:
                    rate = warm[peer, shape, number, size]
                    times = f"{Spread.ratio(rate.values, rival.values):.1f}" if peer in OURS else ""
                    share = f"{Spread.ratio(rate.values, limits):.2f}"
                    rows.append([f"{name}, batch {size}: {peer}", number, thousands(rate.values), share, times])
        for number in workers:
            for peer in peers:
                runs = found[peer, shape, number]
                cold.append([f"{name}: {peer}", number, *once(runs, payload)])
                wait.append([f"{name}: {peer}", number, f"{Spread.of(1e6 * run['wait'] for run in runs):.0f}"])
        lines = []
        for peer in peers:
            rates = {number: warm[peer, shape, number, batch_size] for number in workers}
            number = max(rates, key=lambda number, rates=rates: rates[number].median)
            lines.append([peer, number, thousands(rates[number].values), *once(found[peer, shape, number], payload)])
        report.markdown(
            f"{name}, batches of {batch_size}, {samples:,} samples, each with its best number of workers",
            ("", "workers", "1000 samples/s", *ONCE),
            lines,
        )
    report.table("Warm, fully cached", ("", "workers", "1000 samples/s", "of the limit", "times the best other"), rows)
    report.table("Cold", ("", "workers", *ONCE), cold)
    report.table("Wait behind a step of 2 ms that sleeps", ("", "workers", "us per batch"), wait)
    draw(report, warm, found, shapes, peers, workers)
    return {"runs": [{"arm": list(map(str, key)), "rounds": runs} for key, runs in found.items()]}


def once(runs: list[dict[str, Any]], payload: int) -> list[str]:
    """The cells of `ONCE`."""
    seconds = [f"{Spread.of(run[key] for run in runs):.2f}" for key in ("prepare", "first", "one")]
    return [*seconds, f"{Spread.of(run['held'] / payload for run in runs):.2f}"]


def median(spread: Spread) -> float:
    return spread.median


def draw(report: Report, warm: Any, found: Any, shapes: Any, peers: list[str], workers: tuple[int, ...]) -> None:
    made, axes = figure.new(2, len(shapes), width=4.2, height=2.9, sharex=True)
    for column, (shape, (_, large)) in enumerate(shapes.items()):
        for axis, size in zip(axes[:, column], (large, SMALL_BATCH), strict=True):
            most = Spread.of(found["limit", shape, size])
            axis.axhspan(most.low / 1000, most.high / 1000, color="#bbbbbb", alpha=0.5, linewidth=0)
            axis.axhline(most.median / 1000, color="black", linestyle="--", linewidth=1.2, label="gather limit")
            for place, peer in enumerate(peers):
                spreads = [warm[peer, shape, number, size] for number in workers]
                axis.errorbar(
                    [at + 0.8 / len(peers) * (place - (len(peers) - 1) / 2) for at in range(len(workers))],
                    [spread.median / 1000 for spread in spreads],
                    yerr=[[end / 1000 for end in ends] for ends in zip(*(s.bars for s in spreads), strict=True)],
                    fmt=figure.MARKS[place],
                    color=figure.COLOURS[place],
                    markersize=7,
                    label={"CachedDataset": "DataLoader + CachedDataset"}.get(peer, peer),
                )
            figure.logarithmic(axis)
            axis.set_title(f"{'x'.join(map(str, shape))} uint8, batches of {size}", loc="left")
            axis.set_xticks(range(len(workers)), workers)
            axis.set_xlim(-0.5, len(workers) - 0.5)
    for axis in axes[-1]:
        axis.set_xlabel("num_workers")
    for row in axes:
        row[0].set_ylabel("1000 samples/s, warm (log)")
    figure.legend(made, axes[0, 0], 2 * len(shapes))  # columns
    title = f"Fully cached epochs (medians of {report.rounds} runs, bars and grey band: lowest to highest)"
    figure.save(made, report.folder / "peers.png", title, report.machine)


def tiny_batch_seconds(workers: int, samples: int) -> float:
    """Seconds per warm batch of 256 tiny samples."""
    dataset = CachedDataset(Pool(samples, (3, 4, 4)))
    loader = make_loader("CachedLoader", dataset, 256, workers)
    epoch_seconds(loader)
    return warm_seconds(loader, 2) / len(loader)


def tiny_gather_seconds(samples: int) -> float:
    return Spread.of(gather_seconds(samples, (3, 4, 4), 256)).median / (samples // 256)


def measure_python(report: Report, peers: list[str], quick: bool) -> dict[str, Spread]:
    samples = 256 * (20 if quick else 200)
    arms: dict[Any, Callable[[], float]] = {
        number: partial(fresh, tiny_batch_seconds, number, samples) for number in (0, 2)
    }
    arms["limit"] = partial(fresh, tiny_gather_seconds, samples)
    found = rounds(arms, max(report.rounds, 5))
    beyond = {
        f"{number} workers": Spread.of(1e6 * (a - b) for a, b in zip(found[number], found["limit"], strict=True))
        for number in (0, 2)
    }
    rows = [[name, f"{spread:.0f}"] for name, spread in beyond.items()]
    report.table("Python: a warm batch of 256 tiny samples beyond their gather", ("CachedLoader", "us per batch"), rows)
    return beyond


PARTS = {"speed": measure_speed, "python": measure_python, "transforms": measure_transforms}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="some of the parts")
    options.add_argument("--peers", nargs="+", choices=[*OTHERS], default=[*OTHERS], help="others to run")
    chosen = options.parse_args(arguments)
    report = Report("peers", chosen)
    peers = list(OURS)
    for peer in chosen.peers:
        if importlib.util.find_spec(OTHERS[peer]):
            peers.append(peer)
        else:
            report.say(f"{peer} is left out: it is not installed (pip install --no-deps {OTHERS[peer]}).")
    report.save(**{part: PARTS[part](report, peers, report.quick) for part in chosen.only})


if __name__ == "__main__":
    main()
