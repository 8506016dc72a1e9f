"""The training jobs of several ranks, as a user's script: `job KIND FOLDER WORD...`, where KIND is one of `KINDS`.

Each process writes its log lines to `<pid>.log`, and each rank writes its results to `rank<k>.*` in the folder.
"""

import errno
import json
import logging
import os
import re
import signal
import sys
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import Checkpoint, RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler, WeightedRandomSampler, default_collate
from torchmetrics import MeanMetric

from lightning_stocache.node.segment import Segment
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.monitor import CacheMonitor
from tests.jobs import Job, free_port, job_environment, start_module
from tests.sources import CountedSource
from tests.training.seen import Looking, Watcher
from tests.training.tiny import (
    Data,
    Epochs,
    MadeInSetup,
    Model,
    Narrow,
    behind,
    cached_datasets,
    make_trainer,
    plain_loader,
    source,
)

FITS = [  # of `crossing`: each pair of a bar, an order and a way
    (TQDMProgressBar, "bar first", "sync_dist"),
    (TQDMProgressBar, "ours first", "metric"),
    (RichProgressBar, "bar first", "metric"),
    (RichProgressBar, "ours first", "sync_dist"),
]
NODES_SAMPLES, NODES_BATCH = 16384, 64
NODES_FOLD = range(0, NODES_SAMPLES, 4)
CLUSTER_SAMPLES, CLUSTER_BATCH = 512, 8
RANKS: dict[str, Any] = {"strategy": "ddp", "logger": False}


def write(folder: Path, rank: int, saw: Any) -> None:
    """Add a line to the results of a rank."""
    with open(folder / f"rank{rank}.jsonl", "a") as file:
        print(json.dumps(saw), file=file)


def start_nodes(folder: Path, *words: str | int, devices: int = 2, nodes: int = 1) -> list[Job]:
    """This job, each of whose ranks is started by itself, as a process for each node; several have a /dev/shm each."""
    meeting, jobs = job_environment(free_port()), list[Job]()
    for node in range(nodes):
        told = [meeting | {"NODE_RANK": str(node), "LOCAL_RANK": str(local)} for local in range(devices)]
        command = ("tests.training.job", words[0], folder, *words[1:])
        jobs.append(start_module(*command, environments=told, said=folder / "said", shm_mib=64 * (nodes > 1)))
    return jobs


def read_ranks(folder: Path, ranks: int) -> list[list[Any]]:
    """The results of each rank, line by line."""
    lines = [(folder / f"rank{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    return [list(map(json.loads, of_rank)) for of_rank in lines]


def logs(folder: Path) -> str:
    """The log lines of all processes."""
    return "".join(log.read_text() for log in folder.glob("*.log"))


def read_at_setup(folder: Path, stage: str = "") -> int:
    """How many samples set-up has read, of a stage or in all."""
    found = re.findall(rf"{stage}\): (\d+) samples read at set-up", logs(folder))
    return sum(map(int, found))


# ---- ddp: two ranks ----


class Witness(Epochs):
    """Records metrics, segments and weights of a rank. It stands after the monitor."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.inodes = folder, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0 and trainer.current_epoch == 1:
            pids = [os.getpid(), *(child.pid for child in active_children())]
            part = self.folder / f"rank{trainer.global_rank}.part"
            part.write_text(json.dumps(pids))
            part.rename(self.folder / f"rank{trainer.global_rank}.pids")

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        datasets = cached_datasets(trainer.train_dataloader)
        self.inodes = [dataset.cache.segment.handle.inode for dataset in datasets]

    def on_fit_end(self, trainer, pl_module):
        saw = {"epochs": self.metrics, "inodes": self.inodes, "weights": float(pl_module.weights.double().sum())}
        write(self.folder, trainer.global_rank, saw)
        self.metrics = []


def ddp(folder: Path, door: str, strategy: str, epochs: str, fits: str) -> None:
    """Writes a line per fit, and in `rank<k>.pids` the rank's processes when epoch two begins, itself first."""
    own = door not in ("callback", "cache_datamodule")
    data = Data(source(folder), source(folder, "val", 8)) if own else MadeInSetup(folder)
    if door == "workers":  # all in memory needs no worker
        data.options = {"num_workers": 1}
    callbacks, dm = behind("ours" if own else door, data, budget="50%" if door == "workers" else "auto")
    if own:
        dm.setup("fit")  # as a user does who looks at a batch first: every rank alone, before there are ranks
        dm.train_dataloader()
    for _ in range(int(fits)):
        options = RANKS | {"devices": 2, "strategy": strategy}
        make_trainer(folder, [*callbacks, Witness(folder)], epochs=int(epochs), **options).fit(Model(), dm)


# ---- samplers: two ranks ----


def samplers_of(data: Any, samples: int) -> dict[str, Any]:
    fold = list(range(0, samples, 4))
    return {
        "distributed": DistributedSampler(data, 2, dist.get_rank()),
        "weighted": WeightedRandomSampler(1.0 + torch.arange(samples) % 7, samples),
        "fold": SubsetRandomSampler(fold),
        "a fold of each rank": SubsetRandomSampler(fold[dist.get_rank() :: 2]),
    }


def samplers(folder: Path, samples: int = 120) -> None:
    """Writes for each sampler by name whether its batches were those of a training without a cache, the number of
    batches, the metrics of the epochs and the slots."""
    options = RANKS | {"devices": 2}
    make_trainer(folder, epochs=1, **options).fit(Watcher(), DataLoader(source(folder, "first")))  # from here on: ranks
    saw = {}
    for name in samplers_of([0], samples):
        each, seen = [], list[Any]()
        options["use_distributed_sampler"] = name != "a fold of each rank"
        for cached in (False, True):
            noted, looking = Epochs(), Looking()
            callbacks = [StochasticCache("50%"), noted, looking] if cached else []
            model, data = Watcher(), source(folder, f"{name}-{cached}", samples)
            seed_everything(0, verbose=False)
            loader = DataLoader(data, 4, sampler=samplers_of(data, samples)[name])
            make_trainer(folder, callbacks, epochs=3, log_every_n_steps=1000, **options).fit(model, loader)
            seen.append(model.batches)
            each.append(noted.metrics)
        slots = looking.slots["train"]
        saw[name] = {"same": seen[0] == seen[1], "steps": len(seen[1]), "epochs": each[1], "slots": slots}
    write(folder, dist.get_rank(), saw)


# ---- nodes: two of two ranks ----


class Misjudged(CountedSource):
    """Samples with a text, which is long in every sample that set-up may read."""

    def __getitem__(self, index: int) -> Any:
        looked_at = any(index == k * (NODES_SAMPLES - 1) // (count - 1) for count in (4, 30) for k in range(count))
        return *super().__getitem__(index), "a" * (4000 if looked_at else 100)


def without_text(samples: list[Any]) -> Any:
    return default_collate([sample[:2] for sample in samples])


def full(*_: Any) -> Segment:
    raise OSError(errno.ENOSPC, "No space left on device")


def nodes(folder: Path, case: str, epochs: str) -> None:
    """Writes the metrics of every epoch, or in `rank<k>.error` the error of a rank.

    CASE is a way of sampling with half of the dataset per node (`locality`, `global`), another door with that
    (`callback`, `cache_datamodule`), or one of these:

    - `fold`: half of a fold per node, through the callback, and then by a DataModule.
    - `whole`: a cache of everything on each node.
    - `records`: the samples that set-up reads are ten times as large as the others; a node has memory for a tenth.
    - `full`: no memory on the second node.
    - `dies`: the last rank is killed in `setup`.
    """
    witness = Epochs()
    seed_everything(0, verbose=False)

    def train() -> CountedSource:
        if case == "dies" and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "full" and dist.get_rank() == 2:
            Segment.create = full  # type: ignore[method-assign,assignment]
        return (Misjudged if case == "records" else CountedSource)(NODES_SAMPLES, (8,), folder / "train.loads")

    options: dict[str, Any] = {}
    if case == "fold":
        options = {"sampler": SubsetRandomSampler(NODES_FOLD)}
    if case == "records":
        options = {"collate_fn": without_text}
    if case in ("callback", "cache_datamodule"):
        callbacks, dm = behind(case, Data(train(), batch_size=NODES_BATCH), budget="50%")
    else:
        callbacks, dm = behind(
            "ours",
            Data(train, batch_size=NODES_BATCH, **options),
            budget={"whole": "auto", "records": "6MiB"}.get(case, "50%"),
            sampling="global" if case in ("global", "whole") else "locality",
            strict=case == "full",
        )
    ranks = RANKS | {"epochs": int(epochs), "devices": 2, "num_nodes": 2}
    if case == "fold":
        loader = DataLoader(train(), NODES_BATCH, **options)
        make_trainer(folder, [StochasticCache("50%"), witness], **ranks).fit(Narrow(), loader)
    trainer = make_trainer(folder, [*callbacks, witness], **ranks)
    try:
        trainer.fit(Narrow(), dm)
    except BaseException as error:
        (folder / f"rank{trainer.global_rank}.error").write_text(f"{type(error).__name__}: {error}")
        raise
    write(folder, trainer.global_rank, witness.metrics)


# ---- crossing: callbacks and metrics with collectives of their own ----


class Logging(Model):
    """Logs values that are reduced over the ranks on access: at the end of training and validation epochs."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.mean, self.val_mean = MeanMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self._log("loss", loss, self.mean)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log("val_loss", self.loss(batch), self.val_mean)

    def on_train_epoch_end(self) -> None:
        self.log("at_the_end", 1.0, prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_at_the_end", 1.0, prog_bar=True, sync_dist=True)

    def _log(self, name: str, loss: torch.Tensor, metric: MeanMetric) -> None:
        if self.way == "metric":
            metric(loss.detach())
            self.log(name, metric, on_step=True, on_epoch=True, prog_bar=True)
        else:
            self.log(name, loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)


class Printing(Callback):
    """Rank zero alone reads the metrics, which reduces them, as in the code of many users."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            dict(trainer.callback_metrics)

    on_validation_epoch_end = on_train_epoch_end


class Slow(Callback):
    """Delays the last rank after the last step of an epoch, so that its counts come late."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.is_last_batch and trainer.global_rank == trainer.world_size - 1:
            time.sleep(0.1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.on_train_batch_start(trainer, pl_module, batch, batch_idx)


class Watching(Epochs, Checkpoint):
    """Stands where ModelCheckpoint does, and records the metrics that it could watch."""


class Alone(CacheMonitor):
    """A monitor on one rank only, which a job should not have."""

    patience = 0.5

    @property
    def monitors(self) -> bool:
        return dist.get_rank() == dist.get_world_size() - 1


def crossing(folder: Path, devices: str, nodes: str) -> None:
    """Trains once for each of `FITS`, twice with a monitor on the last rank alone, and once more with one on all ranks.

    A rank writes one line per fit: the metrics of every epoch, and the samples that the sources have loaded until then.
    """
    fits: list[tuple[list[Callback], str]] = []
    for bar, order, way in FITS:
        callbacks = [bar(), StochasticCache()]
        fits.append((callbacks if order == "bar first" else callbacks[::-1], way))
    for monitor in (Alone, Alone, CacheMonitor):  # a lone monitor posts counts that no rank answers
        fits.append(([StochasticCache(), monitor()], "metric"))
    for callbacks, way in fits:
        watching = Watching()
        trainer = make_trainer(
            folder,
            [*callbacks, Printing(), Slow(), watching],
            epochs=2,
            devices=int(devices),
            num_nodes=int(nodes),
            enable_checkpointing=True,
            enable_progress_bar=any(hasattr(callback, "get_metrics") for callback in callbacks),
            num_sanity_val_steps=1,
            **RANKS,
        )
        train, val = plain_loader(source(folder), shuffle=True), plain_loader(source(folder, "val", 8))
        trainer.fit(Logging(way), train, val)
        loads = [source(folder, name).loads for name in ("train", "val")]
        write(folder, trainer.global_rank, {"epochs": watching.metrics, "loads": loads})
        dist.barrier()  # the sources count for all fits together


# ---- cluster: one rank, as a launcher starts it ----


class Stopping(Epochs):
    """Records samples and metrics, and may end the job in the middle of an epoch."""

    def __init__(self, folder: Path, stops: str = "") -> None:
        super().__init__()
        self.folder, self.left = folder, -1
        self.stops = [int(number) for number in stops.split(".")] if stops else None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with open(self.folder / f"rank{trainer.global_rank}.seen", "a") as file:
            print(json.dumps([trainer.current_epoch, batch[1].tolist()]), file=file)
        if [trainer.current_epoch, batch_idx] == self.stops:
            os.kill(os.getpid(), signal.SIGUSR1)
            self.left = 5
        elif self.left >= 0:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_end(self, trainer, pl_module):
        write(self.folder, trainer.global_rank, self.metrics)


def cluster(folder: Path, door: str, epochs: str, *words: str) -> None:
    """Writes the metrics of each epoch, and to `rank<k>.seen` the epoch and the labels of each batch, a line each.

    Options: `mesh=DxT` (ModelParallelStrategy, T ranks to each of D replicas), `nodes=N`, `devices=N`, `budget=...`,
    `name=...`, `dir=...`, `stops=E.B` (after batch B of epoch E the scheduler's SIGUSR1 comes, and five batches later
    SIGKILL). The label of a sample is its index.
    """
    given = dict(word.split("=", 1) for word in words)
    data = CountedSource(CLUSTER_SAMPLES, (8,), folder / "train.loads", classes=CLUSTER_SAMPLES)
    knobs: dict[str, Any] = {name: given[name] for name in ("budget", "name", "dir") if name in given}
    callbacks, dm = behind(door, Data(data, batch_size=CLUSTER_BATCH), **knobs)
    options = RANKS | {"devices": int(given.get("devices", 1)), "num_nodes": int(given.get("nodes", 1))}
    if "mesh" in given:
        from lightning.pytorch.strategies import ModelParallelStrategy

        replicas, parallel = map(int, given["mesh"].split("x"))
        options["strategy"] = ModelParallelStrategy(data_parallel_size=replicas, tensor_parallel_size=parallel)
    callbacks.append(Stopping(folder, given.get("stops", "")))
    make_trainer(folder, callbacks, epochs=int(epochs), **options).fit(Narrow(), dm)


KINDS = {"ddp": ddp, "samplers": samplers, "nodes": nodes, "crossing": crossing, "cluster": cluster}

if __name__ in ("__main__", "__mp_main__"):  # in spawned ranks, too
    logging.basicConfig(filename=Path(sys.argv[2]) / f"{os.getpid()}.log", level=logging.INFO)

if __name__ == "__main__":
    torch.set_num_threads(1)
    KINDS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    if dist.is_initialized():
        dist.destroy_process_group()
