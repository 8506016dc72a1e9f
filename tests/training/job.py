"""The trainings of a job of several ranks, as a user's script: `job FOLDER RUNS`, with runs as JSON.

The ranks do one run after the other, each in a folder of its own. There each process writes its log lines to
`<pid>.log`, and each rank its results to `rank<k>.jsonl`, one line for each fit, and the epoch and the labels of each
batch to `rank<k>.seen`.
"""

import errno
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import Checkpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import SubsetRandomSampler, default_collate
from torchmetrics import MeanMetric

from lightning_stocache.node.segment import Segment
from lightning_stocache.setup.segments import CacheMemoryError
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.monitor import CacheMonitor
from tests.jobs import job_environment, start_module
from tests.sources import CountedSource
from tests.training.tiny import (
    SAMPLES,
    Data,
    Epochs,
    Model,
    Narrow,
    behind,
    cached_datasets,
    make_trainer,
    plain_loader,
    source,
)

RANKS: dict[str, Any] = {"strategy": "ddp", "logger": False}
Runs = Mapping[str, Mapping[str, Any]]
ONE_RUN: Runs = {"": {}}


def words(
    kind: str, folder: Path, *, devices: int = 2, nodes: int = 1, runs: Runs = ONE_RUN, **options: Any
) -> list[str]:
    """The module of this job and its arguments: runs by the names of their folders, with what each has of its own."""
    ranks = {"devices": devices, "num_nodes": nodes}
    of_runs = {name: {"kind": kind, "ranks": ranks} | options | dict(run) for name, run in runs.items()}
    return ["tests.training.job", str(folder), json.dumps(of_runs)]


def start_nodes(
    folder: Path,
    kind: str,
    *,
    told: Sequence[Sequence[Mapping[str, str]]] = (),
    devices: int = 2,
    nodes: int = 1,
    **options: Any,
) -> list[BaseProcess]:
    """This job, as a process for each node, whose ranks are started one by one; several nodes have a /dev/shm each.

    Args:
        told: what the launcher tells each rank of each node; by default what Lightning's own does.
        options: of the job, and `runs` if there are several.
    """
    own = [[{"NODE_RANK": str(node), "LOCAL_RANK": str(k)} for k in range(devices)] for node in range(nodes)]
    base, job = job_environment(), words(kind, folder, devices=devices, nodes=nodes, **options)
    return [
        start_module(job, [base | rank for rank in node], folder / "said", shm_mib=64 if nodes > 1 else 0)
        for node in told or own
    ]


def read_ranks(folder: Path, ranks: int) -> list[list[Any]]:
    """The results of each rank, fit by fit."""
    lines = [(folder / f"rank{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    return [list(map(json.loads, of_rank)) for of_rank in lines]


def printed(folder: Path) -> str:
    """The end of what the processes have printed."""
    return (folder / "said").read_text()[-4000:]


def logs(folder: Path) -> str:
    """The log lines of all processes."""
    return "".join(log.read_text() for log in folder.glob("*.log"))


def read_at_setup(folder: Path, stage: str = "") -> int:
    """How many samples set-up has read, of a stage or in all."""
    found = re.findall(rf"{stage}\): (\d+) samples read at set-up", logs(folder))
    return sum(map(int, found))


def write(folder: Path, name: str, saw: Any) -> None:
    """Add a line to a file of results."""
    with open(folder / name, "a") as file:
        print(json.dumps(saw), file=file)


# ---- train ----


class Witness(Epochs):
    """Records batches, metrics, segments and weights of a rank, and its processes when epoch two begins.

    After a batch that is named it sends itself the scheduler's SIGUSR1, and five batches later SIGKILL.
    """

    def __init__(self, folder: Path, stops: Any = None) -> None:
        super().__init__()
        self.folder, self.stops, self.left = folder, stops, -1
        self.inodes: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        epoch, rank = trainer.current_epoch, trainer.global_rank
        write(self.folder, f"rank{rank}.seen", [epoch, batch[1].tolist()])
        if (epoch, batch_idx) == (1, 0):
            pids = [os.getpid(), *(child.pid for child in active_children())]
            part = self.folder / f"rank{rank}.part"
            part.write_text(json.dumps(pids))
            part.rename(self.folder / f"rank{rank}.pids")
        self.left -= 1
        if [epoch, batch_idx] == self.stops:
            self.left = 5
            os.kill(os.getpid(), signal.SIGUSR1)
        elif self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        caches = [dataset.cache for dataset in cached_datasets(trainer.train_dataloader)]
        self.inodes = [cache.segment.handle.inode for cache in caches if cache is not None]

    def on_fit_end(self, trainer, pl_module):
        saw = {"epochs": self.metrics, "inodes": self.inodes, "weights": float(pl_module.weights.double().sum())}
        write(self.folder, f"rank{trainer.global_rank}.jsonl", saw)


class Sets(Data):
    """A DataModule that makes its sets in `setup`."""

    def __init__(self, makes: Sequence[Any], **options: Any) -> None:
        super().__init__(None, **options)
        self.makes = makes

    def setup(self, stage: str) -> None:
        self.train, self.val = (make and make() for make in self.makes)


class Misjudged(CountedSource):
    """Samples with a text, which is long in every sample that set-up may read."""

    def __getitem__(self, index: int) -> Any:
        looked_at = any(index == k * (self.length - 1) // (count - 1) for count in (4, 30) for k in range(count))
        return *super().__getitem__(index), "a" * (4000 if looked_at else 100)


def without_text(samples: list[Any]) -> Any:
    return default_collate([sample[:2] for sample in samples])


def make_set(folder: Path, name: str, samples: int, case: str) -> CountedSource:
    """A set whose labels are the indices, or the bad luck of a case on one rank."""
    if case == "dies" and dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "full" and dist.get_rank() == 2:
        no_space = OSError(errno.ENOSPC, "No space left on device")
        mock.patch.object(Segment, "create", side_effect=no_space).start()
    kind = Misjudged if case == "records" else CountedSource
    return kind(samples, (8,), folder / f"{name}.loads", classes=samples)


def train(
    folder: Path,
    *,
    ranks: dict[str, Any],
    strategy: str = "ddp",
    door: str = "ours",
    fits: int = 1,
    epochs: int = 3,
    samples: int = SAMPLES,
    val: int = 0,
    batch_size: int = 4,
    workers: int = 0,
    early: bool = False,
    case: str = "",
    mesh: tuple[int, int] | None = None,
    stops: tuple[int, int] | None = None,
    **cache: Any,
) -> None:
    """Train by a door.

    Args:
        fits: how often the same objects are trained.
        early: a StocacheDataModule is set up by each process alone, before there are ranks, as a user does who looks at
            a batch first.
        case: `fold`: every fourth sample is drawn. `records`: the samples that set-up reads are ten times as large as
            the others. `full`: no memory on rank 2. `dies`: rank 3 is killed in `setup`.
        mesh: the replicas of ModelParallelStrategy, and the ranks of each.
        stops: the epoch and the batch after which the scheduler ends the job.
        cache: options of the door.
    """
    seed_everything(0, verbose=False)
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers}
    if case == "fold":
        options["sampler"] = SubsetRandomSampler(range(0, samples, 4))
    if case == "records":
        options["collate_fn"] = without_text
    of_trainer = RANKS | ranks | {"strategy": strategy}
    if mesh is not None:
        of_trainer["strategy"] = ModelParallelStrategy(data_parallel_size=mesh[0], tensor_parallel_size=mesh[1])
    sizes = {"train": samples, "val": val}
    makes = [partial(make_set, folder, name, size, case) if size else None for name, size in sizes.items()]
    callbacks, dm = behind(door, Data(*makes, **options) if door == "ours" else Sets(makes, **options), **cache)
    if early:
        dm.setup("fit")
        dm.train_dataloader()
    for _ in range(fits):
        trainer = make_trainer(folder, [*callbacks, Witness(folder, stops)], epochs=epochs, **of_trainer)
        try:
            trainer.fit(Narrow(), dm)
        except CacheMemoryError as error:
            (folder / f"rank{trainer.global_rank}.error").write_text(str(error))
    mock.patch.stopall()


# ---- crossing: callbacks and metrics with collectives of their own ----


class Logging(Model):
    """Logs values that are reduced over the ranks on access: at the end of training and validation epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.means = torch.nn.ModuleDict({"loss": MeanMetric(), "val_loss": MeanMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._logged("loss", super().training_step(batch, batch_idx))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._logged("val_loss", self.loss(batch))

    def on_train_epoch_end(self) -> None:
        self.log("at_the_end", 1.0, prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_at_the_end", 1.0, prog_bar=True, sync_dist=True)

    def _logged(self, name: str, loss: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"on_step": True, "on_epoch": True, "prog_bar": True}
        self.means[name](loss.detach())
        self.log(f"mean_{name}", self.means[name], **options)  # type: ignore[arg-type]
        self.log(name, loss, sync_dist=True, **options)
        return loss


class Printing(Callback):
    """Rank zero alone reads the metrics, which reduces them, as in the code of many users."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            dict(trainer.callback_metrics)

    on_validation_epoch_end = on_train_epoch_end


class Slow(Callback):
    """Delays the last rank at the last step of an epoch, so that its counts come late."""

    def on_train_batch_start(self, trainer, *_: Any):
        if trainer.is_last_batch and trainer.global_rank == trainer.world_size - 1:
            time.sleep(0.03)

    on_train_batch_end = on_train_batch_start


class Watching(Epochs, Checkpoint):
    """Stands where ModelCheckpoint does, and records the metrics that it could watch."""


class Alone(CacheMonitor):
    """A monitor on one rank only, which a job should not have: it posts counts that no rank answers."""

    patience = 0.1

    @property
    def monitors(self) -> bool:
        return dist.get_rank() == dist.get_world_size() - 1


FITS: list[Callable[[], list[Callback]]] = [
    lambda: [TQDMProgressBar(), StochasticCache()],
    lambda: [StochasticCache(), RichProgressBar()],
    lambda: [StochasticCache(), TQDMProgressBar()],
    lambda: [RichProgressBar(), StochasticCache()],
    lambda: [StochasticCache(), Alone()],
    lambda: [StochasticCache(), Alone()],
    lambda: [StochasticCache(), CacheMonitor()],
]


def crossing(folder: Path, *, ranks: dict[str, Any], fits: int) -> None:
    """Trains with the callbacks of the first `FITS`.

    A rank writes one line per fit: the metrics of every epoch, and the samples that the sources have loaded until then.
    """
    for make in FITS[:fits]:
        callbacks, watching = make(), Watching()
        bars = any(hasattr(callback, "get_metrics") for callback in callbacks)
        options = RANKS | ranks | {"enable_checkpointing": True, "enable_progress_bar": bars}
        callbacks += [Printing(), Slow(), watching]
        trainer = make_trainer(folder, callbacks, epochs=2, num_sanity_val_steps=1, **options)
        sets = source(folder), source(folder, "val", 8)
        trainer.fit(Logging(), plain_loader(sets[0], shuffle=True), plain_loader(sets[1]))
        saw = {"epochs": watching.metrics, "loads": [counted.loads for counted in sets]}
        write(folder, f"rank{trainer.global_rank}.jsonl", saw)
        dist.barrier()  # the sources count for all fits together


def log_to(folder: Path) -> None:
    """Write the log lines of this process from now on to a file in this folder."""
    folder.mkdir(exist_ok=True)
    logging.basicConfig(filename=folder / f"{os.getpid()}.log", level=logging.INFO, force=True)


KINDS = {"train": train, "crossing": crossing}

if __name__ == "__mp_main__":  # in a spawned rank
    log_to(Path(sys.argv[1]))

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, run in json.loads(sys.argv[2]).items():
        log_to(Path(sys.argv[1], name))
        KINDS[run.pop("kind")](Path(sys.argv[1], name), **run)
    if dist.is_initialized():
        dist.destroy_process_group()
