"""The trainings of a job of several ranks, as a user's script: `job FOLDER RUNS`, with runs as JSON.

The ranks do one run after the other, each in a folder of its own. There each process writes its log lines to
`<pid>.log`, and each rank its results to `rank<k>.jsonl`, one line for each fit, and the epoch, the number and the
labels of each batch to `rank<k>.seen`.
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
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import SubsetRandomSampler, default_collate
from torchmetrics import MeanMetric

from lightning_stocache.node.segment import Segment
from lightning_stocache.setup.segments import CacheMemoryError
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.monitor import CacheMonitor
from tests.jobs import job_environment, start_module
from tests.sources import CountedSource
from tests.training.tiny import SAMPLES, Data, Epochs, Narrow, behind, cached_datasets, make_trainer


def words(folder: Path, *, runs: Mapping[str, Any] | None = None, **options: Any) -> list[str]:
    """The module of this job and its arguments: runs by the names of their folders, with what each has of its own."""
    described = {name: options | run for name, run in (runs or {"": {}}).items()}
    return ["tests.training.job", str(folder), json.dumps(described)]


def start_nodes(folder: Path, told: Sequence[Sequence[Mapping[str, str]]], **options: Any) -> list[BaseProcess]:
    """This job, as a process for each node with a /dev/shm of its own, whose launcher tells each rank `told`."""
    base, job, shm_mib = job_environment(), words(folder, **options), 64 if len(told) > 1 else 0
    return [start_module(job, [base | rank for rank in node], folder / "said", shm_mib=shm_mib) for node in told]


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
    found = re.findall(rf"{stage}\): (\d+) reads at set-up", logs(folder))
    return sum(map(int, found))


def read_again(folder: Path, kind: str = "") -> int:
    """How many stored samples were read again while the training went on, of a class of datasets or in all."""
    return sum(map(int, re.findall(rf"{kind}: (\d+) stored samples were read again", logs(folder))))


def write(folder: Path, name: str, saw: Any) -> None:
    """Add a line to a file of results."""
    with open(folder / name, "a") as file:
        print(json.dumps(saw), file=file)


class Witness(Epochs, Checkpoint):
    """Records batches, metrics, segments and weights of a rank, and its processes when epoch two begins. It stands
    where ModelCheckpoint does, so the metrics are those that this could watch."""

    def __init__(self, folder: Path, signals: Sequence[tuple[str, int, int]]) -> None:
        super().__init__()
        self.folder, self.signals = folder, signals
        self.inodes: list[int] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for name, rank, step in self.signals:
            if (rank, step) == (trainer.global_rank, trainer.global_step):
                os.kill(os.getpid(), signal.Signals[name])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        epoch, rank = trainer.current_epoch, trainer.global_rank
        write(self.folder, f"rank{rank}.seen", [epoch, batch_idx, batch[1].tolist()])
        if (epoch, batch_idx) == (1, 0):
            pids = [os.getpid(), *(child.pid for child in active_children())]
            part = self.folder / f"rank{rank}.part"
            part.write_text(json.dumps(pids))
            part.rename(self.folder / f"rank{rank}.pids")

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        caches = [dataset.cache for dataset in cached_datasets(trainer.train_dataloader)]
        self.inodes = [cache.segment.handle.inode for cache in caches if cache is not None]

    def on_fit_end(self, trainer, pl_module):
        saw = {"epochs": self.metrics, "inodes": self.inodes, "weights": float(pl_module.weights.double().sum())}
        write(self.folder, f"rank{trainer.global_rank}.jsonl", saw)


class Misjudged(CountedSource):
    """Samples with a text, which is long in every sample that set-up may read."""

    def __getitem__(self, index: int) -> Any:
        looked_at = any(index == k * (self.length - 1) // (count - 1) for count in (4, 30) for k in range(count))
        return *super().__getitem__(index), "a" * (4000 if looked_at else 100)


def without_text(samples: list[Any]) -> Any:
    return default_collate([sample[:2] for sample in samples])


def make_set(folder: Path, name: str, samples: int, case: str) -> CountedSource | None:
    """A set whose labels are the indices, or the bad luck of a case on one rank."""
    if not samples:
        return None
    if case == "dies" and dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "full" and dist.get_rank() == 2:
        no_space = OSError(errno.ENOSPC, "No space left on device")
        mock.patch.object(Segment, "create", side_effect=no_space).start()
    kind = Misjudged if case == "records" else CountedSource
    return kind(samples, (8,), folder / f"{name}.loads", classes=samples)


class Logging(Narrow):
    """Logs values that are reduced over the ranks on access: at each step, and at the ends of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.means = torch.nn.ModuleDict({"loss": MeanMetric(), "val_loss": MeanMetric()})

    def training_step(self, batch: Any, batch_idx: int, name: str = "loss") -> torch.Tensor:
        options: dict[str, Any] = {"on_step": True, "on_epoch": True, "prog_bar": True}
        loss = self.loss(batch)
        self.means[name](loss.detach())
        self.log(f"mean_{name}", self.means[name], **options)  # type: ignore[arg-type]
        self.log(name, loss, sync_dist=True, **options)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.training_step(batch, batch_idx, "val_loss")

    def on_train_epoch_end(self) -> None:
        self.log("at_the_end", 1.0, prog_bar=True, sync_dist=True)

    on_validation_epoch_end = on_train_epoch_end


class Users(Callback):
    """Rank zero alone reads the metrics, which reduces them; the last rank is slow at an epoch's last step."""

    def on_train_batch_start(self, trainer, *_: Any):
        if trainer.is_last_batch and trainer.global_rank == trainer.world_size - 1:
            time.sleep(0.03)

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            dict(trainer.callback_metrics)

    on_train_batch_end = on_train_batch_start
    on_validation_epoch_end = on_train_epoch_end


class Alone(CacheMonitor):
    """A monitor on one rank only, which a job should not have: it posts counts that no rank answers."""

    patience = 0.1

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        self._is_first = dist.get_rank() == dist.get_world_size() - 1


FITS: list[Callable[[], list[Callback]]] = [
    lambda: [TQDMProgressBar(), StochasticCache()],
    lambda: [StochasticCache(), Alone()],
    lambda: [StochasticCache(), RichProgressBar(), CacheMonitor()],
]


def train(
    folder: Path,
    *,
    devices: int = 2,
    nodes: int = 1,
    strategy: str | Sequence[int] = "ddp",
    door: str = "ours",
    fits: int = 1,
    epochs: int = 3,
    samples: int = SAMPLES,
    val: int = 0,
    batch_size: int = 4,
    workers: int = 0,
    case: str = "",
    signals: Sequence[tuple[str, int, int]] = (),
    saves: bool = False,
    **cache: Any,
) -> None:
    """Train by a door.

    Args:
        fits: how often the same objects are trained.
        case: `early`: each process sets the DataModule up alone, before there are ranks, as a user does who looks at a
            batch first. `fold`: every second sample is drawn. `records`: the samples that set-up reads are ten times as
            large as the others. `full`: no memory on rank 2. `dies`: rank 3 is killed in `setup`. `crossing`: callbacks
            and metrics have collectives of their own; each fit has other callbacks, the first of `FITS`.
        strategy: its name, or of a mesh the number of replicas, and of the ranks of each.
        signals: their names, each with the rank that gets it, and in which step.
        saves: save a checkpoint every second step, and resume from the last one in the folder.
        cache: options of the door.
    """
    seed_everything(0, verbose=False)
    if ckpt := max(folder.glob("step=*.ckpt"), default=None):
        torch.manual_seed(99)  # a resumed process has other random states
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers}
    if case == "fold":
        options["sampler"] = SubsetRandomSampler(range(0, samples, 2))
    if case == "records":
        options["collate_fn"] = without_text
    chosen = strategy if isinstance(strategy, str) else ModelParallelStrategy(*strategy)
    of_trainer: dict[str, Any] = {"devices": devices, "num_nodes": nodes, "strategy": chosen, "max_epochs": epochs}
    of_trainer |= {"logger": False, "enable_checkpointing": True}
    makes = [partial(make_set, folder, name, size, case) for name, size in (("train", samples), ("val", val))]
    sets = makes[: 1 + bool(val)] if door == "ours" else [make() for make in makes]
    callbacks, dm = behind(door, Data(*sets, **options), **cache)
    if case == "early":
        dm.setup("fit")
        dm.train_dataloader()
    for number in range(fits):
        if case == "crossing":
            callbacks = [*FITS[number](), Users()]
            of_trainer["enable_progress_bar"] = any(hasattr(callback, "get_metrics") for callback in callbacks)
        if saves:
            callbacks.append(ModelCheckpoint(folder, "{step:02d}", every_n_train_steps=2, save_top_k=-1))
        trainer = make_trainer(folder, [*callbacks, Witness(folder, signals)], **of_trainer)
        try:
            trainer.fit(Logging() if case == "crossing" else Narrow(), dm, ckpt_path=ckpt)
        except CacheMemoryError as error:
            (folder / f"rank{trainer.global_rank}.error").write_text(str(error))
    mock.patch.stopall()


def log_to(folder: Path) -> None:
    """Write the log lines of this process from now on to a file in this folder."""
    folder.mkdir(exist_ok=True)
    logging.basicConfig(filename=folder / f"{os.getpid()}.log", level=logging.INFO, force=True)
    logging.getLogger("lightning_stocache.loading.changes").setLevel(logging.DEBUG)  # which says what is read again


if __name__ == "__mp_main__":  # in a spawned rank
    log_to(Path(sys.argv[1]))

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, run in json.loads(sys.argv[2]).items():
        log_to(Path(sys.argv[1], name))
        train(Path(sys.argv[1], name), **run)
    if dist.is_initialized():
        dist.destroy_process_group()
