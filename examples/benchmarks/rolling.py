"""How fast is a rolling cache while others write to it, and does it ever hand out half of a sample?

    python examples/benchmarks/rolling.py
    python examples/benchmarks/rolling.py --sizes 1000 100000 1000000
    python examples/benchmarks/rolling.py --dir /local/nvme     # the pool lies on a disk

One process trains (it takes batches and does nothing with them) while others append as fast as they can. Every sample
holds its own number in every word, and all words of every batch are looked at in a second, slower pass: "torn" is how
many had words of two samples, which has to be 0. "renewed" is how many samples of an epoch had left by the time their
batch was made, and came as the newer ones of their slots. "alone" is the reader without writers, in the same round.

There is no gain where the writers are slower than the training needs new samples: what is read at memory speed is then
the same samples again.
"""

import multiprocessing
import os
import shutil
import tempfile
import time
from functools import partial
from typing import Any

import torch
from measure import Report, cell, fresh, listed, parser

from lightning_stocache import CachedLoader, RollingCache, RollingWriter

POOL_BYTES = 512 * 2**20
WRITERS = 2
SHOWN = {
    "MB/s read": "read_mb",
    "alone": "read_mb",
    "MB/s written by all": "read_written_mb",
    "renewed": "renewed",
}


def sample(words: int, number: int) -> tuple[torch.Tensor, int]:
    return torch.full((words,), number, dtype=torch.int64), number


def write(handle: Any, words: int, first: int, appended: Any, parent: int) -> None:
    """Append until the parent has gone or says stop; every sample is made once and written many times."""
    torch.set_num_threads(1)
    ready = [sample(words, first + number) for number in range(8)]
    with RollingWriter.attach(handle) as writer:
        count = 0
        while os.getppid() == parent and not appended[0]:
            writer.append(ready[count % len(ready)])
            count += 1
            appended[1 + first // 1000] = count


def read(nbytes: int, writers: int, seconds: float, folder: str | None) -> dict[str, float]:
    """MB/s into this process and out of each writer, and what was torn."""
    words = nbytes // 8
    place = {} if folder is None else {"dir": tempfile.mkdtemp(dir=folder), "name": "rolling"}
    pool = RollingCache(budget=POOL_BYTES, spec=sample(words, 0), minimum=1, **place)
    with RollingWriter.attach(pool.handle) as writer:
        for number in range(pool.stats().capacity):
            writer.append(sample(words, number % 900))
    appended = multiprocessing.RawArray("q", 1 + max(writers, 1))
    children = [
        multiprocessing.get_context("fork").Process(
            target=write, args=(pool.handle, words, 1000 * number, appended, os.getpid()), daemon=True
        )
        for number in range(writers)
    ]
    for child in children:
        child.start()
    loader = CachedLoader(pool, batch_size=max(min(64, 2**26 // nbytes), 1), shuffle=True)
    patience = time.perf_counter() + 10
    while writers and not all(appended[1:]) and time.perf_counter() < patience:
        time.sleep(0.01)
    found: dict[str, float] = {}
    for what in ("read", "checked"):
        count = torn = 0
        before, start = sum(appended[1:]), time.perf_counter()
        while time.perf_counter() < start + seconds:
            for rows, numbers in loader:
                count += len(numbers)
                if what == "checked":
                    torn += int((rows != numbers[:, None]).any(dim=1).sum())
        took = time.perf_counter() - start
        found |= {f"{what}_mb": count * nbytes / took / 1e6, f"{what}_torn": torn, f"{what}_samples": count}
        found[f"{what}_written_mb"] = (sum(appended[1:]) - before) * nbytes / took / 1e6
    found["renewed"] = pool.stats().renewed
    appended[0] = 1
    for child in children:
        child.join()
    pool.close()
    shutil.rmtree(place.get("dir", ""), ignore_errors=True)
    return found


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--sizes", type=int, nargs="+", default=[10_000, 150_000, 1_000_000, 4_000_000])
    options.add_argument("--dir", help="a directory on a disk for the pool (default: in memory)")
    chosen = options.parse_args()
    report = Report("rolling", chosen)
    sizes, seconds = (chosen.sizes[:1], 0.2) if report.quick else (chosen.sizes, 3.0)
    arms = {
        (nbytes, writers): partial(fresh, read, nbytes, writers, seconds, chosen.dir)
        for nbytes in sizes
        for writers in (WRITERS, 0)
    }
    found, rows = report.measure(arms), []
    for nbytes in sizes:
        runs, alone = found[nbytes, WRITERS], found[nbytes, 0]
        cells = [cell(alone if key == "alone" else runs, column, ".0f") for key, column in SHOWN.items()]
        torn, checked = (sum(run[f"checked_{what}"] for run in runs) for what in ("torn", "samples"))
        rows.append([f"{nbytes:,}", *cells, f"{torn:.0f} of {checked:,.0f}"])
    columns = ("bytes per sample", *SHOWN, "torn")
    report.table(f"One reader and {WRITERS} writers", columns, rows)
    report.save(runs=listed(found, "bytes", "writers"))


if __name__ == "__main__":
    main()
