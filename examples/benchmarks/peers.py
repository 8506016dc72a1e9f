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
all         the same for each number of workers, against the limit (one thread that copies rows by NumPy's `take` out of
            shared memory into three buffers in rotation, indices drawn beforehand, first epochs left out, median of 5)
            and as a multiple of the best of the others with its best number of workers
transforms  uint8 to normalised float32 of 3x224x224 per sample on the CPU, after the cache, in 2 workers

There is no gain where the step is slower than the slowest row here: a model that takes 10 ms for a batch does not
become faster when the batch comes in 0.5 ms instead of 5. And none in epoch one.
"""

import importlib.util
import os
import time
from functools import partial
from typing import Any

import torch
from measure import Report, Spread, cell, epoch_seconds, fresh, gather_seconds, held_bytes, parser, thousands
from sources import OTHERS, OURS, Pool, import_peer, make_dataset, make_loader
from torch.utils.data import DataLoader

# Samples of each shape, several times as large as an L3 cache, and the batch size.
SHAPES = {(3, 32, 32): (25600, 256), (3, 64, 64): (8192, 256), (3, 224, 224): (1024, 64)}
ONCE = ("preparation, s", "first batch, s", "epoch one, s", "memory / samples")


def run(peer: str, shape: tuple[int, ...], workers: int, samples: int, batch_size: int) -> dict[str, float]:
    """Preparation, first batch, epoch one, memory, warm epochs."""
    import_peer(peer)
    source = Pool(samples, shape)
    before = held_bytes([os.getpid()])
    start = time.perf_counter()
    dataset = make_dataset(peer, source, workers)
    prepared = time.perf_counter()
    loader = make_loader(peer, dataset, batch_size, workers)
    batches = iter(loader)
    next(batches)
    found = {"prepare": prepared - start, "first": time.perf_counter() - prepared}
    for _ in batches:
        pass
    found["one"] = time.perf_counter() - prepared
    found["held"] = middle_of_epoch(loader) - before  # epoch two, which touches cold pages: not timed
    return found | {"rate": samples / warm_seconds(loader)}


def warm_seconds(loader: DataLoader[Any]) -> float:
    """The median epoch of as many as fit into 0.4 s, one at least, nine at most."""
    found: list[float] = []
    while not found or (sum(found) < 0.4 and len(found) < 9):
        found.append(epoch_seconds(loader))
    return Spread.of(found).median


def middle_of_epoch(loader: DataLoader[Any]) -> int:
    """The memory that is held in the middle of an epoch."""
    held = 0
    for number, _ in enumerate(loader):
        if number == len(loader) // 2:
            held = held_bytes([os.getpid()])
    return held


def limit(shape: tuple[int, ...], samples: int, batch_size: int) -> dict[str, float]:
    """Samples/s that one thread gathers."""
    return {"rate": samples / Spread.of(gather_seconds(samples, shape, batch_size)).median}


def measure_speed(report: Report, peers: list[str]) -> dict[str, Any]:
    shapes = {(3, 32, 32): (1024, 256)} if report.quick else SHAPES
    cores = len(os.sched_getaffinity(0))
    workers = (0, 2) if report.quick else sorted({0, 1, 2, *(number for number in (4, 8, cores) if number <= cores)})
    arms: dict[Any, Any] = {}
    for shape, sizes in shapes.items():
        arms["limit", shape, 0] = partial(fresh, limit, shape, *sizes)
        for number in workers:
            arms |= {(peer, shape, number): partial(fresh, run, peer, shape, number, *sizes) for peer in peers}
    found = report.measure(arms)
    rates = {arm: Spread.of(one["rate"] for one in runs) for arm, runs in found.items()}
    rows = []
    for shape, (samples, batch_size) in shapes.items():
        name, payload = f"{'x'.join(map(str, shape))}, batch {batch_size}", samples * torch.Size(shape).numel()
        limits = rates["limit", shape, 0].values
        rows.append([f"{name}: the limit", "", thousands(limits), "1", "", *[""] * len(ONCE)])
        others = [rates[peer, shape, number] for peer in peers if peer in OTHERS for number in workers]
        rival = max(others, key=lambda spread: spread.median).values
        best = []
        for peer in peers:
            cells = {}
            for number in workers:
                runs, rate = found[peer, shape, number], rates[peer, shape, number].values
                once = [cell(runs, key) for key in ("prepare", "first", "one")]
                once.append(cell(runs, "held", scale=1 / payload))
                cells[number] = [thousands(rate), *once]
                times = f"{Spread.ratio(rate, rival):.1f}" if peer in OURS else ""
                share = f"{Spread.ratio(rate, limits):.2f}"
                rows.append([f"{name}: {peer}", number, thousands(rate), share, times, *once])
            fastest = max(workers, key=lambda number: rates[peer, shape, number].median)
            best.append([peer, fastest, *cells[fastest]])
        title = f"{name}, {samples:,} samples, each with its best number of workers"
        report.table(title, ("", "workers", "1000 samples/s", *ONCE), best)
    columns = ("", "workers", "1000 samples/s", "of the limit", "times the best other", *ONCE)
    report.table("Each number of workers", columns, rows)
    return {"runs": [{"arm": list(map(str, arm)), "rounds": runs} for arm, runs in found.items()]}


def normalise(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    """Bytes to floats around zero."""
    image, label = sample
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return image.float().div_(255).sub_(mean).div_(std), label


def run_transform(peer: str, samples: int) -> float:
    """Samples/s of warm epochs with a transform, in two workers."""
    import_peer(peer)
    loader = make_loader(peer, make_dataset(peer, Pool(samples, (3, 224, 224)), 2, normalise), 64, 2)
    seconds = [epoch_seconds(loader) for _ in range(5)]
    return samples / Spread.of(seconds[2:]).median


def measure_transforms(report: Report, peers: list[str]) -> dict[str, Any]:
    samples = 192 if report.quick else 1024
    arms: dict[str, Any] = {peer: partial(fresh, run_transform, peer, samples) for peer in peers}
    found = report.measure(arms)
    best = [max(values) for values in zip(*(found[peer] for peer in peers if peer in OTHERS), strict=True)]
    rows = [[arm, thousands(values), f"{Spread.ratio(values, best):.1f}"] for arm, values in found.items()]
    columns = ("", "1000 samples/s", "times the best other")
    report.table("uint8 to normalised float32 of 3x224x224, per sample in 2 workers", columns, rows)
    return {"runs": found}


PARTS = {"speed": measure_speed, "transforms": measure_transforms}


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="some of the parts")
    options.add_argument("--peers", nargs="+", choices=[*OTHERS], default=[*OTHERS], help="others to run")
    chosen = options.parse_args()
    report = Report("peers", chosen)
    peers = list(OURS)
    for peer in chosen.peers:
        if importlib.util.find_spec(OTHERS[peer]):
            peers.append(peer)
        else:
            report.say(f"{peer} is left out: it is not installed (pip install --no-deps {OTHERS[peer]}).")
    report.save(**{part: PARTS[part](report, peers) for part in chosen.only})


if __name__ == "__main__":
    main()
