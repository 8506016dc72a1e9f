"""Many trials in one process leave nothing behind: through every door, with errors, pruning and workers."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from tqdm import tqdm

from lightning_stocache import (
    CachedDataset,
    CachedLoader,
    RollingCache,
    StocacheDataModule,
    StochasticCache,
    cache_datamodule,
)
from tests.proc import descendants, memory_files
from tests.sources import CountedSource
from tests.training.tiny import Data, Model, make_trainer

tqdm.get_lock()  # it is made at a first progress bar, in memory that is shared, and stays

MIB = 2**20


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    descriptors: int
    mappings: int
    memory_files: int
    threads: int
    children: int
    anonymous: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        multiprocessing.active_children()
        anonymous = re.search(r"^Pss_Anon: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
        return cls(
            len(os.listdir("/proc/self/fd")),
            len(Path("/proc/self/maps").read_text().splitlines()),
            len(memory_files({os.getpid()})),
            threading.active_count(),
            len(descendants()),
            0 if anonymous is None else int(anonymous[1]) * 1024,
        )


class PrunedError(Exception):
    """What Optuna raises, in a callback."""


class Ending(Callback):
    """Ends a trial in the middle of an epoch."""

    def __init__(self, error: type[Exception] | None) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.error is not None and trainer.current_epoch == 1 and batch_idx == 2:
            raise self.error


class Text(CountedSource):
    """Samples of many sizes, which lie as records."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return {"image": image, "label": label, "text": "word " * index}


class TextModel(Model):
    def loss(self, batch: Any) -> Any:
        return super().loss((batch["image"], batch["label"]))


def callback(folder: Path, more: Sequence[Callback], **options: Any) -> None:
    fit(folder, [StochasticCache(**options), *more], Data(CountedSource(24), CountedSource(8)))


def records(folder: Path, more: Sequence[Callback], **options: Any) -> None:
    fit(folder, [StochasticCache(**options), *more], Data(Text(24), Text(8)), TextModel())


def hooks(folder: Path, more: Sequence[Callback], **options: Any) -> None:
    fit(folder, more, cache_datamodule(Data(CountedSource(24), CountedSource(8)), **options))


def ours(folder: Path, more: Sequence[Callback], **options: Any) -> None:
    fit(folder, more, StocacheDataModule(CountedSource(24), CountedSource(8), batch_size=4, **options))


def workers(folder: Path, more: Sequence[Callback], **options: Any) -> None:
    fit(folder, [StochasticCache(**options), *more], Data(CountedSource(24), CountedSource(8), num_workers=1))


def plain(folder: Path, more: Sequence[Callback], **options: Any) -> None:
    """A dataset that nobody closes."""
    dataset = CachedDataset(CountedSource(24))
    for _ in range(2):
        for _ in CachedLoader(dataset, batch_size=4, shuffle=True):
            pass


def rolling(folder: Path, more: Sequence[Callback], **options: Any) -> None:
    pool = RollingCache(CountedSource(24), budget="1MiB", fillers=1, minimum=8)
    fit(folder, more, StocacheDataModule(train=pool, batch_size=4))


def fit(folder: Path, callbacks: Sequence[Callback], data: Any, model: Model | None = None) -> None:
    trainer = make_trainer(folder, callbacks, epochs=2, num_sanity_val_steps=0)
    trainer.fit(model or Model(), data)


def trials(folder: Path, doors: Sequence[Callable[..., None]]) -> Iterator[Held]:
    """Run trials for ever, and tell what is held after each."""
    number = 0
    while True:
        door = doors[number % len(doors)]
        error = {2: ArithmeticError, 4: PrunedError}.get(number % 5)
        options = {"keep_cache": number % 2 == 1}
        with contextlib.suppress(ArithmeticError, PrunedError):
            door(folder / str(number), [Ending(error)], **options)
        number += 1
        yield Held.now()


def grown(held: Sequence[Held], first: int) -> dict[str, int]:
    """What of all that has grown from the first trials to the last: the least of as many at either end."""
    ends = [list(map(astuple, part)) for part in (held[:first], held[-first:])]
    least = [[min(values) for values in zip(*part, strict=True)] for part in ends]
    return {field.name: least[1][n] - least[0][n] for n, field in enumerate(fields(Held))}


@pytest.mark.processes
def test_a_dozen_trials_leave_nothing_behind(tmp_path):
    """Descriptors, mappings, files in memory, threads and children are as many as after the first ones."""
    held = list(islice(trials(tmp_path, [callback, hooks, ours, plain]), 12))
    growth = grown(held, 4)
    assert growth.pop("anonymous") < 8 * MIB
    assert growth.pop("mappings") <= 4  # of malloc
    assert growth == {"descriptors": 0, "memory_files": 0, "threads": 0, "children": 0}


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_trials_leave_nothing_behind(tmp_path):
    """The same of fifty, with workers, records and a rolling cache, and memory does not grow; -s shows the numbers."""
    held = list(islice(trials(tmp_path, [callback, records, hooks, ours, workers, plain, rolling]), 60))
    for number, now in enumerate(held):
        print(number, now)
    growth = grown(held[10:], 14)
    print(growth)
    assert growth.pop("anonymous") < 8 * MIB
    assert growth.pop("mappings") <= 8
    assert growth == {"descriptors": 0, "memory_files": 0, "threads": 0, "children": 0}
