"""What a user does with the package on any system: `job WHAT FOLDER`; it prints what came of it.

`doors` trains through each of the three doors, the callback's with a spawned worker; `ranks` trains on two ranks by
ddp_spawn; `named` and `disk` fill a cache that lasts, with a spawned worker, and open it again; `commands` is the
command line. Spawned processes import this module: so that they start fast it imports little.
"""

import contextlib
import csv
import io
import json
import logging
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

from tests.sources import CountedSource

SAMPLES = 24
KEPT = 48
"""Samples of a cache that lasts: more than set-up stores of them."""


def source(folder: Path, name: str, samples: int = SAMPLES) -> CountedSource:
    return CountedSource(samples, log_path=folder / f"{name}.loads")


def labels(loader: Any) -> list[list[int]]:
    """The labels of an epoch's batches."""
    return [batch[1].tolist() for batch in loader]


def trained(folder: Path, callbacks: list[Any], data: Any) -> tuple[list[Any], list[int]]:
    """What a model sees in two epochs, and how many hits the callbacks have logged in each."""
    from lightning.pytorch.callbacks import LambdaCallback

    from tests.training.tiny import Watcher, make_trainer

    model, hits = Watcher(), list[int]()
    noted = LambdaCallback(
        on_train_epoch_end=lambda trainer, _: hits.append(int(trainer.callback_metrics.get("stocache/hits", -1)))
    )
    torch.manual_seed(3)
    make_trainer(folder, [*callbacks, noted], epochs=2, logger=False, num_sanity_val_steps=0).fit(model, data)
    return model.batches, hits


def doors(folder: Path) -> dict[str, Any]:
    """By door: hits per epoch, whether its batches are those of a plain loader, how often the source was read."""
    from torch.utils.data import DataLoader

    from lightning_stocache import CachedDataset, CachedLoader, CacheMonitor, StochasticCache, cache_datamodule
    from tests.training.tiny import data_hooks

    def loader(name: str, **more: Any) -> Any:
        return DataLoader(source(folder, name), 4, shuffle=True, **more)

    found: dict[str, Any] = {}
    without, _ = trained(folder, [], loader("plain"))
    one = loader("datamodule")
    seen, hits = trained(folder, [CacheMonitor()], cache_datamodule(data_hooks(train=lambda: one)))
    found["datamodule"] = [hits, seen == without]
    seen, hits = trained(
        folder, [StochasticCache()], loader("callback", num_workers=0 if sys.platform == "win32" else 1)
    )
    found["callback"] = [hits, seen == without]
    dataset = CachedDataset(source(folder, "loop"))
    cached, plain = CachedLoader(dataset, 4, shuffle=True), loader("plain")
    same, hits = [], []
    for epoch in range(2):
        torch.manual_seed(epoch)
        came = labels(cached)
        torch.manual_seed(epoch)
        same.append(came == labels(plain))
        hits.append(-1 if dataset.counters is None else dataset.counters.totals().hits - sum(hits))
    cached.close()
    dataset.close()
    found["loop"] = [hits, all(same)]
    return found | {"loads": [source(folder, name).loads for name in ("datamodule", "callback", "loop")]}


def ranks(folder: Path) -> dict[str, Any]:
    """What two ranks have loaded of one source in two epochs, and the hits that they have logged together."""
    from lightning_stocache import CacheMonitor, StocacheDataModule
    from tests.training.tiny import Model, make_trainer

    dm = StocacheDataModule(source(folder, "ranks"), batch_size=4)
    make_trainer(folder, [CacheMonitor()], epochs=2, devices=2, strategy="ddp_spawn").fit(Model(), dm)
    with open(next(folder.glob("logs/*/metrics.csv"))) as file:
        hits = [int(float(row["stocache/hits"])) for row in csv.DictReader(file) if row.get("stocache/hits")]
    return {"hits": hits, "loads": source(folder, "ranks").loads}


def lasting(folder: Path, **where: Any) -> dict[str, Any]:
    """Of two openings of a cache with a name, one epoch each: what it held then, the hits, and all loads."""
    from lightning_stocache import CachedDataset, CachedLoader

    held, hits = [], []
    for _ in range(2):
        dataset = CachedDataset(source(folder, "kept", KEPT), name="kept", **where)
        held.append(None if dataset.cache is None else dataset.cache.filled)
        loader = CachedLoader(dataset, 4, shuffle=True, num_workers=1)
        labels(loader)
        loader.close()
        hits.append(None if dataset.counters is None else dataset.counters.totals().hits)
        dataset.close()
    return {"held": held, "hits": hits, "loads": source(folder, "kept").loads}


def commands(folder: Path) -> dict[str, Any]:
    """What the commands say of a cache with a name."""
    from lightning_stocache import CachedDataset
    from lightning_stocache.__main__ import main

    CachedDataset(source(folder, "kept"), name="kept").close()
    said = []
    for words in ("doctor", "list", "clean kept --yes", "list"):
        with contextlib.redirect_stdout(io.StringIO()) as heard:
            main(words.split())
        said.append(heard.getvalue())
    return {"said": said}


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    torch.set_num_threads(1)
    what, place = sys.argv[1], Path(sys.argv[2])
    if sys.platform == "linux":
        multiprocessing.set_start_method("forkserver")  # as Python 3.14 has it by itself
    jobs = {"doors": doors, "ranks": ranks, "named": lasting, "commands": commands}
    came = lasting(place, dir=str(place / "disk")) if what == "disk" else jobs[what](place)
    print(json.dumps(came))
