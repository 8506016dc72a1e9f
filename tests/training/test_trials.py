"""Many trials in one process leave nothing behind: through every door, with errors, pruning and workers."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import threading
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from tqdm import tqdm

from lightning_stocache import CachedDataset, CachedLoader, RollingCache, StocacheDataModule
from tests.proc import descendants, memory_files
from tests.sources import CountedSource
from tests.training.tiny import DOORS, Data, Model, behind, make_trainer

tqdm.get_lock()  # it is made at a first progress bar, in memory that is shared, and stays

MIB = 2**20


def resources() -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    multiprocessing.active_children()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's, which keeps some for later
        trim(0)
    anonymous = re.search(r"^Pss_Anon: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "memory_files": len(memory_files({os.getpid()})),
        "threads": threading.active_count(),
        "children": len(descendants()),
        "anonymous": 0 if anonymous is None else int(anonymous[1]) * 1024,
    }


class PrunedError(Exception):
    """Stands for Optuna's error in a callback."""


class Ending(Callback):
    """Ends a trial in the middle of an epoch."""

    def __init__(self, error: type[Exception] | None) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.error is not None and trainer.current_epoch == 1 and batch_idx == 2:
            raise self.error


class Large(CountedSource):
    """Images of 192 KiB, so that an image that stays in memory is noticed."""

    def __init__(self, length: int) -> None:
        super().__init__(length, (3, 256, 256))


class Text(Large):
    """Samples of many sizes, which lie as records."""

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), "word " * index


class Corner(Model):
    """Takes the first corner of an image."""

    def loss(self, batch: Any) -> Any:
        return super().loss((batch[0][:, :, :8, :8], batch[1]))


def fit(folder: Path, door: str, error: type[Exception] | None, **options: Any) -> None:
    """One trial."""
    source = Text if door == "records" else Large
    data: Any = Data(source(24), source(8), num_workers=door == "workers")
    if door == "rolling":
        pool = RollingCache(Large(24), budget="10MiB", fillers=1, minimum=8)
        callbacks, data = [], StocacheDataModule(train=pool, batch_size=4)
    else:
        callbacks, data = behind(door if door in DOORS else "callback", data, **options)
    make_trainer(folder, [*callbacks, Ending(error)], epochs=2, num_sanity_val_steps=0).fit(Corner(), data)


def loop() -> None:
    """Read a CachedDataset without closing it."""
    dataset = CachedDataset(Large(24))
    for _ in range(2):
        for _ in CachedLoader(dataset, batch_size=4, shuffle=True):
            pass


def growth(held: Sequence[dict[str, int]], first: int) -> dict[str, int]:
    """The growth of each resource from the first trials to the last: the difference of the minima at both ends."""
    return {name: min(now[name] for now in held[-first:]) - min(now[name] for now in held[:first]) for name in held[0]}


FEW = [*DOORS, "plain"]
LONG = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("doors", "count", "warm", "ends", "mappings"),
    [(FEW, 12, 0, 4, 4), pytest.param([*DOORS, "records", "workers", "rolling", "plain"], 60, 10, 14, 8, marks=LONG)],
    ids=["a dozen", "many"],
)
def test_trials_leave_nothing_behind(tmp_path, doors, count, warm, ends, mappings):
    """After the first trials the numbers of descriptors, mappings, files in memory, threads and children do not grow,
    nor does memory; -s shows the numbers."""
    held = []
    for number, door in enumerate(islice(cycle(doors), count)):
        error = {2: ArithmeticError, 4: PrunedError}.get(number % 5)
        with contextlib.suppress(ArithmeticError, PrunedError):
            loop() if door == "plain" else fit(tmp_path / str(number), door, error, keep_cache=number % 2 == 1)
        held.append(resources())
        print(number, held[-1])
    grown = growth(held[warm:], ends)
    print(grown)
    assert grown.pop("anonymous") < 8 * MIB
    assert grown.pop("mappings") <= mappings  # of malloc
    assert grown == {"descriptors": 0, "memory_files": 0, "threads": 0, "children": 0}
