"""The part `arena` of records.py: an arena is filled until it is full, with records of one size or of many."""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from typing import Any

import torch
from filling import STORE, Clock
from measure import Report, Spread, fresh, rounds
from torch.utils.data import Dataset

from lightning_stocache import CachedDataset, CachedLoader
from lightning_stocache.loading.serve import CachedSource

__all__ = ["SIZES", "measure_arena"]

SIZES = {"300 B": 300, "3 KB": 3_000, "30 KB": 30_000, "300 KB": 300_000, "2 MB": 2_000_000}
MIXED = "mixed"
KEYS = ("records", "own", "copy", "CPU", "beyond")


class Varied(Dataset[tuple[torch.Tensor, int]]):
    """Tensors of noise that differ in length by a half in both directions, around one size or around all in turn."""

    def __init__(self, samples: int, sizes: list[int]) -> None:
        self.samples = samples
        chance = torch.Generator().manual_seed(0)
        each = [size for size in sizes for _ in range(40 // len(sizes))]
        self.lengths = [int(size * (0.5 + torch.rand((), generator=chance))) for size in each]
        self.lengths = [self.lengths[at] for at in torch.randperm(len(self.lengths), generator=chance).tolist()]
        self._noise = torch.randint(0, 256, (max(self.lengths),), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.samples

    def nbytes(self, index: int) -> int:
        """Bytes of the tensor of a sample."""
        return self.lengths[index % len(self.lengths)]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return self.sample(index)

    def sample(self, index: int) -> tuple[torch.Tensor, int]:
        """What a sample of that length looks like."""
        return self._noise[: self.nbytes(index)].clone(), index


def copied(sizes: list[int]) -> int:
    """Nanoseconds of this thread for writing so many bytes for each record to a file in memory, one after the other."""
    content, file, end = memoryview(bytes(max(sizes))), os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR), 0
    start = time.thread_time_ns()
    for size in sizes:
        os.pwrite(file, content[:size], end)
        end += size
    spent = time.thread_time_ns() - start
    os.close(file)
    return spent


def filled(size: str, how: str, megabytes: int) -> dict[str, float]:
    """Shares of the bytes granted that are records and samples' own bytes, when full; CPU microseconds per sample."""
    sizes = [SIZES[size]] if size != MIXED else list(SIZES.values())
    granted, mean = megabytes * 1_000_000, sum(sizes) / len(sizes)
    source = Varied(int(1.4 * granted / (mean + 100)), sizes)
    dataset = CachedDataset(source, granted)
    cache = dataset.cache
    assert cache is not None
    records = [sum(part.nbytes for part in cache.codec.encode(source.sample(at))) for at in range(len(source.lengths))]
    copied([records[index % len(records)] for index in range(len(source))])  # takes the pages, as in filling.py
    if how == STORE:
        clock = Clock(cache.fill)
        for index in torch.randperm(len(source)).tolist():
            sample = source[index]
            if cache.has_room(sample):  # else whoever loads a sample does not encode it
                clock(index, sample)
    else:
        clock = Clock(CachedSource._store)
        CachedSource._store = clock  # type: ignore[method-assign]
        for _ in CachedLoader(dataset, 32, shuffle=True, num_workers=int(how), collate_fn=list):
            pass
    kept = [index for index in range(len(source)) if cache.place(index) >= 0]
    copy = copied([records[index % len(records)] for index in kept])
    found = {
        "records": sum(records[index % len(records)] for index in kept) / granted,
        "own": sum(source.nbytes(index) for index in kept) / granted,
        "copy": copy / len(kept) / 1000,
        "CPU": clock.ns / len(kept) / 1000,
    }
    dataset.close()
    return found | {"beyond": found["CPU"] - found["copy"]}


def measure_arena(report: Report, chosen: argparse.Namespace) -> dict[str, Any]:
    megabytes = chosen.megabytes or (8 if report.quick else 200)
    arms = {
        (size, how): partial(fresh, filled, size, how, min(megabytes, 40) if size == "300 B" else megabytes)
        for size in (chosen.sizes or [*SIZES, MIXED])
        for how in (STORE, str(chosen.workers))
    }
    found = rounds(arms, report.rounds)
    rows = []
    for (size, how), runs in found.items():
        cells = [f"{Spread.of(run[key] for run in runs):.{3 if key in ('records', 'own') else 1}f}" for key in KEYS]
        rows.append([size, how if how == STORE else f"{how} workers", *cells])
    columns = ("tensors of", "filled by", "records / granted", "own / granted", "copy, us", "CPU, us", "beyond, us")
    report.table("Arenas, filled until they are full", columns, rows)
    return {"runs": [{"size": size, "by": how, "rounds": runs} for (size, how), runs in found.items()]}
