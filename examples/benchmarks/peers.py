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

import importlib.util
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from measure import (
    Report,
    Spread,
    cell,
    epoch_seconds,
    fresh,
    gather_seconds,
    held_bytes,
    parser,
    rounds,
    thousands,
    warm_epochs,
)
from sources import OTHERS, OURS, Pool, import_peer, make_dataset, make_loader
from torch.utils.data import DataLoader
from torchvision.transforms import v2

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
    before = held_bytes([os.getpid()])
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
    found["held"] = middle_of_epoch(loader) - before  # epoch two, which touches cold pages: not timed
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


def middle_of_epoch(loader: DataLoader[Any]) -> int:
    """The memory that is held in the middle of an epoch."""
    held = 0
    for number, _ in enumerate(loader):
        if number == len(loader) // 2:
            held = held_bytes([os.getpid()])
    return held


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
            rival = max(rivals, key=lambda spread: spread.median)
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
                wait.append([f"{name}: {peer}", number, cell(runs, "wait", ".0f", 1e6)])
        lines = []
        for peer in peers:
            rates = {number: warm[peer, shape, number, batch_size] for number in workers}
            number = max(rates, key=lambda number, rates=rates: rates[number].median)
            lines.append([peer, number, thousands(rates[number].values), *once(found[peer, shape, number], payload)])
        title = f"{name}, batches of {batch_size}, {samples:,} samples, each with its best number of workers"
        report.table(title, ("", "workers", "1000 samples/s", *ONCE), lines, markdown=True)
    report.table("Warm, fully cached", ("", "workers", "1000 samples/s", "of the limit", "times the best other"), rows)
    report.table("Cold", ("", "workers", *ONCE), cold)
    report.table("Wait behind a step of 2 ms that sleeps", ("", "workers", "us per batch"), wait)
    return {"runs": [{"arm": list(map(str, key)), "rounds": runs} for key, runs in found.items()]}


def once(runs: list[dict[str, Any]], payload: int) -> list[str]:
    """The cells of `ONCE`."""
    seconds = [cell(runs, key) for key in ("prepare", "first", "one")]
    return [*seconds, cell(runs, "held", scale=1 / payload)]


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


def normalise(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    """Bytes to floats around zero; of a batch just as well as of a sample."""
    image, label = sample
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return image.float().div_(255).sub_(mean).div_(std), label


_CROP = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])


def crop(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    return _CROP(sample[0]), sample[1]


def run_transform(peer: str, name: str, samples: int) -> dict[str, float]:
    """Warm epochs with a transform, in two workers."""
    import_peer(peer)
    transform = {"normalise": normalise, "crop": crop}[name]
    loader = make_loader(peer, make_dataset(peer, Pool(samples, (3, 224, 224)), 2, transform), 64, 2)
    return warm_epochs(loader, samples, 2, 3 if name == "normalise" else 2)


def run_batch_transform(samples: int) -> dict[str, float]:
    """Warm epochs of a CachedLoader whose whole batches are normalised in the main process."""
    loader = make_loader("CachedLoader", CachedDataset(Pool(samples, (3, 224, 224))), 64, 2)
    epoch_seconds(loader)
    seconds = [epoch_seconds(map(normalise, loader)) for _ in range(4)]
    return {"rate": samples / Spread.of(seconds).median}


def transform_alone(samples: int) -> float:
    """CPU microseconds per sample of RandomResizedCrop and flip, on samples that lie in memory."""
    images = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8)
    for number in range(samples + 64):
        if number == 64:  # the first ones load code
            start = time.process_time()
        crop((images[number % 64], 0))
    return 1e6 * (time.process_time() - start) / samples


def measure_transforms(report: Report, peers: list[str], quick: bool) -> dict[str, Any]:
    samples = 192 if quick else 1024
    arms: dict[Any, Callable[[], Any]] = {
        (name, peer): partial(fresh, run_transform, peer, name, samples)
        for name in ("normalise", "crop")
        for peer in peers
    }
    arms["batch"] = partial(fresh, run_batch_transform, samples)
    arms["alone"] = partial(fresh, transform_alone, samples)
    found = rounds(arms, report.rounds)
    rates = {peer: [run["rate"] for run in found["normalise", peer]] for peer in peers}
    best = [max(values) for values in zip(*(rates[peer] for peer in peers if peer in OTHERS), strict=True)]
    rates["CachedLoader, whole batches"] = [run["rate"] for run in found["batch"]]
    rows = [[peer, thousands(values), f"{Spread.ratio(values, best):.1f}"] for peer, values in rates.items()]
    columns = ("", "1000 samples/s", "times the best other")
    report.table("uint8 to normalised float32 of 3x224x224, per sample in 2 workers", columns, rows)
    rows = [["the transform alone", f"{Spread.of(found['alone']):.0f}", "1", ""]]
    for peer in peers:
        runs = found["crop", peer]
        cpu = [run["cpu"] for run in runs]
        own = f"{Spread.ratio(cpu, found['alone']):.2f}"
        rows.append([peer, f"{Spread.of(cpu):.0f}", own, thousands(run["rate"] for run in runs)])
    columns = ("", "CPU us/sample", "over the transform's own", "1000 samples/s")
    report.table("RandomResizedCrop(224) and flip, per sample in 2 workers", columns, rows)
    return {"runs": [{"arm": str(key), "rounds": runs} for key, runs in found.items()]}


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
