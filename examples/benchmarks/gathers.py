"""How fast a batch is gathered from a full cache, by one thread and by several, on this machine.

    python examples/benchmarks/gathers.py                      # about a minute on 2 cores
    python examples/benchmarks/gathers.py --threads 1 4 8

The package gathers rows of 64 KiB and more by several threads, if a batch has 8 MiB or more: at most eight, the cores
of the node over its ranks, and `torch.get_num_threads()`. Rows lie in shared memory, indices are drawn beforehand, and
three batches take turns as a loader's do. All numbers of threads take turns in one process. The columns:

GB/s      bytes of the batch over the time of a gather
of one    how many times as fast as one thread
CPU       CPU time over that of one thread: several threads wait for memory together

There is no gain where one thread takes all that the memory gives, or where cores are busy: then one thread gathers,
whatever the number.
"""

import os
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from measure import Report, Spread, fresh, listed, parser

from lightning_stocache.cache.gather_pool import GatherPool

CASES = {"3x224x224 bytes": 150_528, "3x224x224 floats": 602_112, "64 KiB": 65_536, "3x64x64 bytes": 12_288}
BATCHES = (64, 256)
TURNS = 5


def measured(row_bytes: int, batch: int, threads: Sequence[int], cache_bytes: int) -> dict[int, tuple[float, float]]:
    """Wall and CPU seconds of a gather, by number of threads: the median of a few turns."""
    samples = max(cache_bytes // row_bytes, batch)
    rows = torch.empty(samples, row_bytes, dtype=torch.uint8).share_memory_().random_(256).numpy()
    batches = [torch.zeros(batch, row_bytes, dtype=torch.uint8).numpy() for _ in range(3)]
    pools = {number: GatherPool(number) for number in threads}
    rng = np.random.default_rng(0)
    found: dict[int, list[tuple[float, float]]] = {number: [] for number in threads}
    for turn in range(1 + TURNS):
        for number, pool in pools.items():
            draws = [rng.integers(0, samples, batch) for _ in range(max(samples // batch, 3))]
            start, spent = time.perf_counter(), time.process_time()
            for place, slots in enumerate(draws):
                pool.take(rows, slots, batches[place % 3])
            if turn:  # the first touches cold pages
                seconds = (time.perf_counter() - start, time.process_time() - spent)
                found[number].append((seconds[0] / len(draws), seconds[1] / len(draws)))
    for pool in pools.values():
        pool.close()
    return {number: sorted(turns)[len(turns) // 2] for number, turns in found.items()}


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--threads", type=int, nargs="+", help="numbers of threads (1, 2, 4, 8, as many as cores)")
    chosen = options.parse_args()
    cores = len(os.sched_getaffinity(0))
    threads = sorted({1, *(chosen.threads or [number for number in (2, 4, 8) if number <= cores])})
    report = Report("gathers", chosen)
    cache_bytes = (16 if report.quick else 512) << 20
    arms = {
        (name, batch): partial(fresh, measured, row_bytes, batch, threads, cache_bytes)
        for name, row_bytes in CASES.items()
        for batch in BATCHES
    }
    found = report.measure(arms)
    lines = []
    for (name, batch), runs in found.items():
        for number in threads:
            rate = Spread.of(CASES[name] * batch / run[number][0] / 1e9 for run in runs)
            gain = Spread.ratio((run[1][0] for run in runs), (run[number][0] for run in runs))
            cost = Spread.ratio((run[number][1] for run in runs), (run[1][1] for run in runs))
            lines.append((f"{batch} x {name}", number, f"{rate:.1f}", f"{gain:.2f}", f"{cost:.2f}"))
    report.table("Gathers", ("batch", "threads", "GB/s", "of one", "CPU"), lines)
    report.save(runs=listed(found, "rows", "batch"))


if __name__ == "__main__":
    main()
