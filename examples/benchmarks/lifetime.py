"""What a cache on a disk costs and gives: its first batch, its epochs beside those from memory, and shared trials.

    python examples/benchmarks/lifetime.py --dir /local/nvme     # about 4 minutes; 2 GiB are written there

Samples are uint8 images of 3x224x224 with a label, out of memory, so that nothing but the cache takes time. Tables:

first batch  a job that finds the cache: seconds from opening to the first batch in hand. "page cache": as the system
             has it after the job that filled it; "disk": its pages were given back before.
epochs       samples/s of warm epochs from the disk's pages in the page cache, every checksum verified in the epoch
             before, beside the same cache in memory, in the same process, in turn. "first": the epoch that verifies.
trials       four jobs that draw the same order, over a source of 2 ms: loads counted by the source, one job after the
             other, and all at the same time; beside four jobs without a cache.

When there is no gain: where the disk of the cache is the one that the source reads, and reading is all that it does.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Report, Spread, cell, fresh, listed, parser
from sources import Late, Pool

from lightning_stocache import CachedDataset, CachedLoader
from lightning_stocache.node.named import clean

SHAPE = (3, 224, 224)
BATCH = 64
TRIALS = 4
WORKERS = (0, 2)
CACHES = ("no cache", "a named cache in memory", "one on a disk")


def images(samples: int) -> Pool:
    return Pool(samples, SHAPE, 8)


def cached(source: Any, folder: str | None, name: str | None) -> CachedDataset:
    """A cache on a disk, or in memory, that reads no sample at set-up."""
    spec = torch.zeros(SHAPE, dtype=torch.uint8), 0
    return CachedDataset(source, dir=folder, name=name, spec=spec, freeze_random=True, fingerprint="noise")


def epoch(loader: CachedLoader) -> float:
    """Seconds of an epoch; the first image of each batch is compared with the source's."""
    expected = images(1).images
    start = time.perf_counter()
    for batch, indices in loader:
        if not torch.equal(batch[0], expected[int(indices[0]) % 8]):
            raise RuntimeError(f"a wrong sample under {int(indices[0])}")
    return time.perf_counter() - start


def fill(samples: int, folder: str, name: str) -> None:
    """A job that fills the cache, the last writes to the file included."""
    dataset = cached(images(samples), folder, name)
    epoch(CachedLoader(dataset, BATCH, shuffle=True))
    dataset.close()


def first_batch(samples: int, folder: str, name: str, dropped: bool) -> dict[str, float]:
    """A job that finds the cache."""
    if dropped:
        for path in Path(folder).glob(f"*{name}"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    source = images(samples)
    start = time.perf_counter()
    dataset = cached(source, folder, name)
    next(iter(CachedLoader(dataset, BATCH, shuffle=True)))
    seconds = time.perf_counter() - start
    counts = dataset.counters.totals() if dataset.counters else None
    if counts is None or counts.misses or not counts.hits:
        raise RuntimeError(f"the cache was not warm: {counts}")
    dataset.close()
    return {"seconds": seconds}


def epochs(samples: int, folder: str, name: str, num_workers: int) -> dict[str, float]:
    """Warm epochs from the disk's pages and from memory, in turn."""
    source = images(samples)
    on_disk, in_memory = cached(source, folder, name), cached(source, None, None)
    loaders = [CachedLoader(data, BATCH, shuffle=True, num_workers=num_workers) for data in (on_disk, in_memory)]
    first, _ = (epoch(loader) for loader in loaders)
    spent: list[list[float]] = [[], []]
    for _ in range(5):
        for seconds, loader in zip(spent, loaders, strict=True):
            seconds.append(epoch(loader))
    on_disk.close()
    in_memory.close()
    disk, memory = (samples / statistics.median(seconds) for seconds in spent)
    return {"first": samples / first, "disk": disk, "memory": memory}


def trial(samples: int, log: str, folder: str | None, name: str | None) -> None:
    """One trial of a sweep: three epochs."""
    from training import Counted, Loads

    torch.manual_seed(0)
    source = Counted(Late(images(samples), 2), Loads(log))
    dataset: Any = source if name is None else cached(source, folder, name)
    for _ in range(3):
        epoch(CachedLoader(dataset, BATCH, shuffle=True))
    if name is not None:
        dataset.close()


def trials(samples: int, folder: str, how: str, together: bool) -> dict[str, float]:
    """Four of them: the loads that the source has counted, and the seconds of all."""
    name = None if how == "no cache" else f"trials-{os.getpid()}"
    where = folder if how == "one on a disk" else None
    with tempfile.TemporaryDirectory(dir=folder) as logs:
        log = str(Path(logs, "loads"))
        start = time.perf_counter()
        jobs = [multiprocessing.Process(target=trial, args=(samples, log, where, name)) for _ in range(TRIALS)]
        for job in jobs:
            job.start()
            if not together:
                job.join()
        for job in jobs:
            job.join()
        seconds, loads = time.perf_counter() - start, Path(log).stat().st_size
    if any(job.exitcode for job in jobs):
        raise RuntimeError("a trial failed")
    if name is not None:
        clean(name, where)
    return {"loads": loads, "seconds": seconds}


def measure_warm(report: Report, samples: int, folder: str) -> dict[str, Any]:
    fresh(fill, samples, folder, "images")
    pages = ("page cache", "disk")
    arms: dict[Any, Any] = {
        ("first batch", where): partial(fresh, first_batch, samples, folder, "images", where == "disk")
        for where in pages
    }
    arms |= {("epochs", workers): partial(fresh, epochs, samples, folder, "images", workers) for workers in WORKERS}
    found = report.measure(arms)
    size = samples * (3 * 224 * 224 + 8) / 2**30
    rows = [[where, cell(found["first batch", where], "seconds")] for where in pages]
    report.table(f"first batch of a cache of {size:.1f} GiB", ("its pages in", "seconds"), rows)
    rows = []
    for workers in WORKERS:
        runs = found["epochs", workers]
        ratio = Spread.ratio((run["disk"] for run in runs), (run["memory"] for run in runs))
        rates = [cell(runs, key, ",.0f") for key in ("first", "disk", "memory")]
        rows.append([f"{workers} workers", *rates, f"{ratio:.2f}"])
    report.table("samples/s", ("", "first, verifying", "disk", "memory", "disk/memory"), rows)
    return {"warm": listed(found, "what", "arm")}


def measure_trials(report: Report, samples: int, folder: str) -> dict[str, Any]:
    arms = {
        (how, together): partial(fresh, trials, samples, folder, how, together)
        for how in CACHES
        for together in (False, True)
    }
    found = report.measure(arms)
    rows = []
    for (how, together), runs in found.items():
        when = "at the same time" if together else "one after the other"
        rows.append([how, when, *(cell(runs, key, ",.1f") for key in ("loads", "seconds"))])
    report.table(f"{TRIALS} trials, {samples} samples, 3 epochs", ("", "", "loads", "seconds"), rows)
    return {"trials": listed(found, "cache", "together")}


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--dir", default=None, help="on the disk that is measured (default: a folder in TMPDIR)")
    options.add_argument("--megabytes", type=int, default=2048, help="of the cache (2048)")
    chosen = options.parse_args()
    report = Report("lifetime", chosen)
    samples = 4 * BATCH if report.quick else max(chosen.megabytes * 2**20 // (3 * 224 * 224), BATCH)
    with tempfile.TemporaryDirectory(dir=chosen.dir, prefix="lifetime-") as folder:
        warm = measure_warm(report, samples, folder)
        report.save(**warm, **measure_trials(report, min(samples, 600), folder))


if __name__ == "__main__":
    main()
