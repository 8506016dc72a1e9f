"""What filling a cache costs beside the copy: samples of 100 bytes to 2 MB, stored one by one and in a first epoch.

    python examples/benchmarks/filling.py                      # about 3 minutes on 2 cores
    python examples/benchmarks/filling.py --bytes 150000

Samples are tensors of noise, or such a tensor and a label, out of memory. They are stored by `fill`, one after the
other ("store"), or by the first epoch of a CachedLoader with so many workers. The columns, per sample:

copy      what the system takes to write the same bytes to a file in memory, in the same order of places
fill      by the package's own clock (`fill_ns`): check, copy into the batch, claim, store
CPU       the same by the clocks of the threads that do it: on a busy machine what is left of `fill`
generators  what it takes to see that the source has drawn no random number, by these clocks; not a part of `fill`
CPU/copy  in the same process

There is no gain to be seen here: this is what epoch one pays for those to come. **Memory of virtual machines.** A host
may take back the memory that its guest does not use, and the first write to a page then takes 12 us where it takes 1.5
us, whoever writes: 6 ms instead of 0.8 for 2 MB. So each process first writes as much to a file as the cache will hold
and frees it, then measures the copy, then the fill, in the same pages.
"""

import itertools
import os
import time
from functools import partial
from typing import Any

import torch
from measure import Report, Spread, cell, epoch_seconds, fresh, listed, parser
from sources import Pool
from torch.utils.data import get_worker_info

from lightning_stocache import CachedDataset, CachedLoader
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.source.generators import Generators

STORE = "store"
WORKERS = ("0", "2")
KEYS = ("copy", "fill", "CPU", "generators")


class Clock:
    """Wraps a function, and adds up the CPU time of its thread while it runs, here and in workers."""

    def __init__(self, function: Any) -> None:
        self.function, self.spent = function, torch.zeros(64, dtype=torch.int64).share_memory_()

    @property
    def ns(self) -> int:
        return int(self.spent.sum())

    def __get__(self, owner: Any, kind: Any) -> Any:
        return partial(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time_ns()
        try:
            return self.function(*args, **kwargs)
        finally:
            worker = get_worker_info()
            self.spent[0 if worker is None else worker.id + 1] += time.thread_time_ns() - start


def copied(source: Pool, order: list[int]) -> int:
    """Nanoseconds of this thread for writing all samples to a file in memory, per field one array."""
    contents = [[source.images[0].numpy().data, memoryview(bytes(8))][: 1 + source.labelled]] * len(order)
    sizes = [content.nbytes for content in contents[0]]
    starts = list(itertools.accumulate((size * len(order) for size in sizes), initial=0))
    file = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    start = time.thread_time_ns()
    for place, fields in zip(order, contents, strict=True):
        for base, size, content in zip(starts, sizes, fields, strict=False):
            os.pwrite(file, content, base + place * size)
    spent = time.thread_time_ns() - start
    os.close(file)
    return spent


def measured(samples: int, nbytes: int, fields: int, how: str) -> dict[str, float]:
    """Microseconds per sample."""
    source, order = Pool(samples, (nbytes,), 8, labelled=fields == 2), torch.randperm(samples).tolist()
    copied(source, order)
    spent = {"copy": copied(source, order)}
    dataset = CachedDataset(source)
    cache, counters = dataset.cache, dataset.counters
    assert cache is not None
    assert counters is not None
    if how == STORE:
        loaded = source.images[0] if fields == 1 else (source.images[0], 7)
        clock = Clock(lambda: [cache.fill(index, loaded) for index in order])
        wall = time.perf_counter_ns()
        clock()
        spent |= {"fill": time.perf_counter_ns() - wall, "CPU": clock.ns}
    else:
        keep, state = Clock(CachedSource._store), Clock(Generators.state)
        CachedSource._store, Generators.state = keep, state
        before = counters.totals()
        batch_size = min(64, 16_000_000 // nbytes)
        epoch_seconds(CachedLoader(dataset, batch_size, shuffle=True, num_workers=int(how)))
        spent["fill"] = (counters.totals() - before).fill_ns
        spent |= {"CPU": keep.ns, "generators": state.ns}
    if cache.filled != samples:
        raise RuntimeError(f"{cache.filled} of {samples} samples were stored")
    dataset.close()
    return {key: value / samples / 1000 for key, value in spent.items()}


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--bytes", type=int, nargs="+", default=[100, 1000, 2_000_000], help="of the tensor")
    chosen = options.parse_args()
    report = Report("filling", chosen)
    arms = {}
    for nbytes, fields, how in itertools.product(chosen.bytes, (1, 2), (STORE, *WORKERS)):
        samples = min(20_000, 600_000_000 // nbytes) // (50 if report.quick else 1)
        arms[nbytes, fields, how] = partial(fresh, measured, max(samples, 4), nbytes, fields, how)
    runs = report.measure(arms)
    rows = []
    for (nbytes, fields, how), found in runs.items():
        known = [cell(found, key, ".1f") if key in found[0] else "" for key in KEYS]
        ratio = Spread.ratio((run["CPU"] for run in found), (run["copy"] for run in found))
        rows.append([f"{nbytes:,} bytes", fields, how if how == STORE else f"{how} workers", *known, f"{ratio:.2f}"])
    report.table("us per sample", ("tensor", "fields", "filled by", *KEYS, "CPU/copy"), rows)
    report.save(runs=listed(runs, "bytes", "fields", "by"))


if __name__ == "__main__":
    main()
