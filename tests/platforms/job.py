"""What a user does on any system: `job WHAT FOLDER` prints what came of it. Spawned processes import this."""

import contextlib
import csv
import importlib
import io
import json
import logging
import mmap
import multiprocessing
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

import torch

from tests.jobs import Log
from tests.sources import CountedSource

SAMPLES = 24
KEPT = 48  # samples of a cache that lasts: more than set-up stores of them
WINDOWS_LACKS = {
    os: "fork forkpty getuid geteuid getgid O_CLOEXEC O_NOFOLLOW O_NONBLOCK O_DIRECTORY O_TMPFILE memfd_create "
    "MFD_CLOEXEC pread pwrite preadv pwritev posix_fallocate fdatasync statvfs fstatvfs sysconf sched_getaffinity "
    "register_at_fork SEEK_HOLE SEEK_DATA killpg getpgid setsid mkfifo",
    mmap: "MADV_REMOVE MADV_DONTFORK PROT_READ PROT_WRITE MAP_SHARED MAP_PRIVATE",
}


def source(folder: Path, name: str, samples: int = SAMPLES) -> CountedSource:
    return CountedSource(samples, log_path=folder / f"{name}.loads")


def labels(loader: Any, seed: int) -> list[list[int]]:
    """The labels of an epoch's batches."""
    torch.manual_seed(seed)
    return [batch[1].tolist() for batch in loader]


def doors(folder: Path) -> dict[str, Any]:
    """By door: hits per epoch, and whether its batches are those of a plain loader. Of two ranks: their hits. Loads."""
    from torch.utils.data import DataLoader

    from lightning_stocache import CachedDataset, CachedLoader, CacheMonitor, StocacheDataModule
    from tests.training.tiny import Epochs, Model, Watcher, behind, data_hooks, make_trainer

    found: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    for door in ("none", "cache_datamodule", "callback"):
        workers = int(door == "callback" and sys.platform != "win32")
        loader = DataLoader(source(folder, door), 4, shuffle=True, num_workers=workers)
        callbacks, dm = behind(door, data_hooks(train=lambda loader=loader: loader))
        epochs, model = Epochs(), Watcher()
        torch.manual_seed(3)
        options = {"epochs": 2, "logger": False, "num_sanity_val_steps": 0}
        make_trainer(folder, [*callbacks, epochs], **options).fit(model, dm)
        seen[door] = model.batches
        found[door] = [[int(metrics.get("hits", -1)) for metrics in epochs.metrics], seen[door] == seen["none"]]
    dataset = CachedDataset(source(folder, "loop"))
    cached, plain = CachedLoader(dataset, 4, shuffle=True), DataLoader(source(folder, "none"), 4, shuffle=True)
    same, hits = [], []
    for epoch in range(2):
        same.append(labels(cached, epoch) == labels(plain, epoch))
        hits.append(-1 if dataset.counters is None else dataset.counters.totals().hits - sum(hits))
    cached.close()
    dataset.close()
    found["loop"] = [hits, all(same)]
    if sys.platform != "win32":
        dm = StocacheDataModule(source(folder, "ranks"), batch_size=4)
        make_trainer(folder, [CacheMonitor()], epochs=2, devices=2, strategy="ddp_spawn").fit(Model(), dm)
        with open(next(folder.glob("logs/*/metrics.csv"))) as file:
            found["ranks"] = [float(row["stocache/hits"]) for row in csv.DictReader(file) if row.get("stocache/hits")]
    return found | {"loads": [source(folder, name).loads for name in ("ranks", "cache_datamodule", "callback", "loop")]}


def named(folder: Path, **where: Any) -> dict[str, Any]:
    """Of two openings of a named cache, an epoch with a spawned worker each: what it held, hits, and all loads."""
    from lightning_stocache import CachedDataset, CachedLoader

    held, hits = [], []
    for seed in range(2):
        dataset = CachedDataset(source(folder, "kept", KEPT), name="kept", **where)
        held.append(None if dataset.cache is None else dataset.cache.filled)
        loader = CachedLoader(dataset, 4, shuffle=True, num_workers=1)
        labels(loader, seed)
        loader.close()
        hits.append(None if dataset.counters is None else dataset.counters.totals().hits)
        dataset.close()
    return {"held": held, "hits": hits, "loads": source(folder, "kept").loads}


def disk(folder: Path) -> dict[str, Any]:
    return named(folder, dir=str(folder / "disk"))


def said(*commands: str) -> list[str]:
    """What commands print, to either stream."""
    texts = []
    for words in commands:
        with contextlib.redirect_stdout(io.StringIO()) as heard, contextlib.redirect_stderr(heard):
            with contextlib.suppress(SystemExit):
                importlib.import_module("lightning_stocache.__main__").main(words.split())
        texts.append(heard.getvalue())
    return texts


def commands(folder: Path) -> dict[str, Any]:
    """What the commands say of a cache with a name."""
    from lightning_stocache import CachedDataset

    CachedDataset(source(folder, "kept"), name="kept").close()
    return {"said": said("doctor", "list", "clean kept --yes", "list")}


def windows(folder: Path) -> dict[str, Any]:
    """The doors and the commands without what Windows lacks; and every warning. torch and Lightning come first: a
    sys.platform of win32 has the standard library look for modules of its own."""
    importlib.import_module("lightning.pytorch")
    for module, names in WINDOWS_LACKS.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.modules |= dict.fromkeys(("fcntl", "pwd", "grp", "resource"))  # type: ignore[arg-type]
    sys.platform = "win32"
    package = importlib.import_module("lightning_stocache")
    modules = [found.name for found in pkgutil.walk_packages(package.__path__, "lightning_stocache.")]
    for name in modules:
        importlib.import_module(name)
    with Log(logging.WARNING) as log:
        found = doors(folder)
    return found | {"modules": len(modules), "warnings": log.lines, "said": said("doctor", "list", "clean --yes")}


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    torch.set_num_threads(1)
    what = sys.argv[1]
    if sys.platform == "linux" and what != "windows":
        multiprocessing.set_start_method("forkserver")  # as Python 3.14 has it by itself
    print(json.dumps(globals()[what](Path(sys.argv[2]))))
