"""The promises of every door, over a counted source."""

import json
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import random_split
from torchvision.transforms import v2

from lightning_stocache import (
    CacheMonitor,
    StepTimer,
    StocacheDataModule,
    StochasticCache,
    cache_datamodule,
)
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.named import clean, named_segments
from lightning_stocache.setup import allocation
from tests.jobs import cgroup, has_killed, peak_of
from tests.sources import Made, TransformedSource
from tests.training.tiny import (
    SAMPLES,
    SLOT,
    Data,
    Looking,
    Model,
    Remembers,
    announced,
    behind,
    cached_datasets,
    data_hooks,
    fit,
    logged,
    make_trainer,
    plain_loader,
    read_again,
    said,
    source,
)

# ---- what is cached ----


def train(door: str, tmp_path: Path, dataset: Any, **options: Any) -> list[list[Any]]:
    """The samples of two epochs of training through a door, with tensors as lists."""
    seed_everything(0, verbose=False)
    model = Remembers()
    callbacks, data = behind(door, Data(dataset, collate_fn=list), **options)
    make_trainer(tmp_path, callbacks, epochs=2, logger=False).fit(model, data)
    return list(map(bits, model.epochs))


def bits(samples: Any) -> list[list[Any]]:
    """Samples in a form that can be compared."""
    return [[part.tolist() if isinstance(part, torch.Tensor) else part for part in sample] for sample in samples]


@pytest.mark.epoch_one_reads_all
def test_each_sample_is_loaded_once(tmp_path, caplog, door):
    """Two epochs load each sample once, and draw after the first random step as they do with budget=0."""
    images = TransformedSource(SAMPLES, log_path=tmp_path / "loads")
    images.transform = v2.Compose([v2.Resize(6, antialias=True), v2.RandomCrop(4)])
    epochs = train(door, tmp_path, images)
    loads = images.loads
    assert loads == SAMPLES + announced(caplog) + read_again(caplog)
    assert epochs == train(door, tmp_path, images, budget=0)
    assert images.loads == loads + 2 * SAMPLES
    assert sorted(epochs[0]) != sorted(epochs[1])


@pytest.mark.named
@pytest.mark.parametrize(("door", "on_disk"), [("callback", True), ("cache_datamodule", False), ("ours", True)])
def test_a_name_outlives_the_training(door, on_disk, tmp_path, caplog):
    """A second training, in memory and on a disk, reads only the samples of set-up."""
    data = source(tmp_path)
    directory = str(tmp_path / "caches") if on_disk else None
    options = {"name": f"doors-{os.getpid()}", "dir": directory}
    epochs = train(door, tmp_path, data, **options)
    stored = announced(caplog) // 2  # what set-up has read, twice each, is not read again
    assert data.loads == SAMPLES - stored + announced(caplog) + read_again(caplog)
    epochs += train(door, tmp_path, data, **options)
    assert data.loads == SAMPLES - stored + announced(caplog) + read_again(caplog)
    for segment in named_segments(directory=directory):
        clean(segment.name, directory)
    samples = sorted(bits(map(data.expected, range(SAMPLES))))
    assert list(map(sorted, epochs)) == [samples] * 4


@pytest.mark.epoch_one_reads_all
def test_all_calls_are_cached_and_counted(door, tmp_path, caplog):
    """fit, validate, test and predict, twice each, load a set once; only loggers get metrics outside of fit."""
    sets = {name: source(tmp_path, name, 8) for name in ("train", "val", "test", "predict")}
    options: dict[str, Any] = {"keep_cache": True, "budget": {"test": 0}}
    if door == "ours":
        callbacks, data = [CacheMonitor()], StocacheDataModule(**sets, batch_size=4, **options)
    else:
        hooks = data_hooks(**{name: partial(plain_loader, images) for name, images in sets.items()})
        callbacks, data = behind(door, hooks, **options)
    trainer = make_trainer(tmp_path, [*callbacks, StepTimer()], epochs=2, num_sanity_val_steps=0)
    trainer.fit(Model(), data)
    assert logged(trainer, "stocache/hit_rate")[-1] == 1.0
    assert logged(trainer, "stocache/step/wait_seconds")
    for _ in range(2):
        assert trainer.validate(Model(), data, verbose=False) == [{}]
        assert trainer.test(Model(), data, verbose=False) == [{}]
        assert len(trainer.predict(Model(), data)) == 2
        assert trainer.callback_metrics == {}
    loads = {name: images.loads for name, images in sets.items()}
    assert loads["test"] == 16
    assert sum(loads.values()) == 16 + 3 * 8 + announced(caplog) + read_again(caplog)
    assert logged(trainer, "stocache/val/hits") == [0, 8, 8, 8]
    assert logged(trainer, "stocache/test/bypasses") == [8, 8]
    assert logged(trainer, "stocache/predict/hits") == [0, 8]
    (callbacks[0] if door == "callback" else data).caches.close()


@pytest.mark.processes
@pytest.mark.usefixtures("seeded")
def test_weights_are_the_same_with_and_without_a_cache(tmp_path):
    """The same seed gives the same weights; StocacheDataModule, which samples itself, is compared with `budget=0`."""
    train, val = source(tmp_path), source(tmp_path, "val", 8)
    persistent = {"num_workers": 2, "persistent_workers": True}

    def weights(door: str, **options: Any) -> tuple[torch.Tensor, list[list[int]]]:
        parts = []

        def split(dataset: Any, **options: Any) -> Any:
            part, _ = random_split(dataset, [0.75, 0.25])
            parts.append(part.indices)
            return plain_loader(part, **options, **persistent)

        hooks: Any = data_hooks(train=lambda: split(train, shuffle=True), val=lambda: split(val))
        callbacks, data = behind(door, Data(train, val, **persistent) if door == "ours" else hooks, **options)
        seed_everything(3, verbose=False)
        model = Model()
        model.layer = torch.nn.Sequential(torch.nn.Dropout(), model.layer)  # it draws random numbers itself
        make_trainer(tmp_path, callbacks, epochs=2, logger=False).fit(model, data)
        return model.layer[1].weight.detach(), parts

    plain, parts = weights("none")
    for cached, cached_parts in (weights("callback"), weights("cache_datamodule", budget="50%")):
        assert torch.equal(cached, plain)
        assert cached_parts == parts
    full, half, off = (weights("ours", budget=budget)[0] for budget in ("auto", "50%", 0))
    assert torch.equal(full, off)
    assert torch.equal(half, off)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("door", ["callback", "cache_datamodule"])
def test_the_package_pytorch_lightning_is_served_too(tmp_path, caplog, door):
    """Its loaders that are given to `fit`, and those of its DataModule from datasets, are cached and monitored."""
    pl = pytest.importorskip("pytorch_lightning")

    class Other(pl.LightningModule):  # type: ignore[name-defined,misc]
        def training_step(self, batch, batch_idx):
            return self.layer.weight.sum()

        validation_step = training_step
        configure_optimizers = Model.configure_optimizers

    model = Other()
    model.layer = torch.nn.Linear(1, 1)
    train, val = source(tmp_path), source(tmp_path, "val", 8)
    combined = pl.utilities.CombinedLoader({"one": plain_loader(train)}, "min_size")
    callbacks, given = [StochasticCache()], (combined, plain_loader(val))
    if door == "cache_datamodule":
        data = pl.LightningDataModule.from_datasets(train, val, batch_size=4)
        callbacks, given = [CacheMonitor()], (cache_datamodule(data),)
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    logger = pl.loggers.CSVLogger(tmp_path, name="logs")
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=logger, callbacks=callbacks, **silent)
    trainer.fit(model, *given)
    assert logged(trainer, "stocache/hits") == [0, SAMPLES]
    assert logged(trainer, "stocache/val/misses")[-1] == 0
    assert train.loads <= SAMPLES + announced(caplog)


# ---- when caches open and close ----


def failing(error: type[BaseException]) -> Callback:
    """Raises in the middle of an epoch."""

    def fail(trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            raise error("mine")

    return LambdaCallback(on_train_batch_start=fail)


@pytest.mark.epoch_one_reads_all
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("door", "workers", "error"),
    [("callback", 2, KeyboardInterrupt), ("cache_datamodule", 0, SystemExit), ("ours", 0, ArithmeticError)],
)
def test_a_call_opens_two_segments_per_dataset_and_closes_them(tmp_path, segments, monkeypatch, door, error, workers):
    """A fit creates slots and counters of each set once, and closes them when it ends, also by an exception."""

    def check(opened: int) -> None:
        assert all(segment.closed for segment in segments)
        assert workers or len(segments) == opened  # batches of workers lie in segments, too

    ended_by: list[BaseException] = []
    monkeypatch.setattr(Data, "on_exception", lambda dm, exception: ended_by.append(exception))
    callbacks, dm = behind(door, Data(source(tmp_path), source(tmp_path, "val", 8), num_workers=workers))
    trainer = make_trainer(tmp_path, [*callbacks, failing(error)], logger=False)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        trainer.fit(Model(), dm)
    assert door == "ours" or type(ended_by[0]) is error
    assert "dataloader" not in vars(trainer.fit_loop._data_source), "the loaders are the user's own again"
    check(opened=4)
    trainer = make_trainer(tmp_path, callbacks, epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Model(), dm)
    assert logged(trainer, "stocache/misses") == [SAMPLES, 0]
    check(opened=8)
    trainer.validate(Model(), dm, verbose=False)  # reads once, so it opens none
    check(opened=8)


@pytest.mark.epoch_one_reads_all
def test_a_kept_cache_outlives_a_failure_and_ends_with_its_dataset(tmp_path, segments):
    """The next fit hits what a failed fit has loaded; a fit with a new dataset closes the cache of the one before."""
    dm, cache = Data(source(tmp_path), shuffle=False), StochasticCache(keep_cache=True)
    with pytest.raises(ArithmeticError):
        make_trainer(tmp_path, [cache, failing(ArithmeticError)], logger=False).fit(Model(), dm)
    [state] = cache.cache_state()
    expected = {"dataset": "CountedSource", "stages": ["train"], "samples": SAMPLES, "slots": SAMPLES, "filled": 16}
    assert state.items() >= expected.items()
    trainer = make_trainer(tmp_path, [cache], epochs=1)
    trainer.fit(Model(), dm)
    assert logged(trainer, "stocache/hits") == [16]
    before, dm.train = dm.train, source(tmp_path)
    make_trainer(tmp_path, [cache], logger=False).fit(Model(), dm)
    assert [dataset in cache.caches for dataset in (before, dm.train)] == [False, True]
    cache.close()
    assert all(segment.closed for segment in segments)


@pytest.mark.epoch_one_reads_all
def test_a_copy_in_another_process_has_nothing_open(tmp_path, door):
    """Pickled, as where ranks are spawned, a Trainer and a DataModule keep their options, and open their own caches."""
    callbacks, dm = behind(door, Data(source(tmp_path)), budget="1MiB")
    dm.setup("fit")
    loader = dm.train_dataloader()
    trainer, copy = pickle.loads(pickle.dumps((make_trainer(tmp_path, callbacks, epochs=2), dm)))
    trainer.fit(Model(), copy)
    assert logged(trainer, "stocache/hits") == [0, SAMPLES]
    if door != "callback":
        assert copy.caches.options == dm.caches.options
    if door == "ours":  # by hand, a DataModule of the user's has plain loaders
        assert cached_datasets(loader)[0].cache.filled == 0
    dm.teardown("fit")


@pytest.mark.named
@pytest.mark.parametrize("difference", ["length", "fingerprint"])
def test_a_named_cache_of_other_data_ends_no_training(tmp_path, caplog, name, difference):
    """A dataset that has grown since the last job, or has another fingerprint, passes through with one warning."""
    for job in range(2):
        data = source(tmp_path, samples=SAMPLES + job * (difference == "length"))
        version = str(job) if difference == "fingerprint" else ""
        trainer = make_trainer(tmp_path, [StochasticCache(name=name, fingerprint=version)])
        trainer.fit(Model(), plain_loader(data))
        assert trainer.current_epoch == 2
    [warning] = said(caplog, "passes through uncached: the cache")
    assert f"({difference}: " in warning


# ---- memory ----

MIB = 2**20


@pytest.mark.parametrize(
    ("door", "budget", "sanity", "slots"),
    [
        ("callback", 48 * SLOT, 2, [24, 8]),
        ("callback", 8 * SLOT, 2, [4, 4]),
        ("callback", 24 * SLOT, 0, [24, 0]),
        ("loaders", 16 * SLOT, 2, [12, 4]),
        ("ours", 16 * SLOT, 2, [12, 4]),
    ],
)
def test_stages_divide_the_budget(tmp_path, caplog, door, budget, sanity, slots):
    """Of hooks, val takes at most half before train; known loaders divide bytes by their sizes."""
    train, val, looking = source(tmp_path), source(tmp_path, "val", 8), Looking()
    callbacks, dm = behind("callback" if door == "loaders" else door, Data(train, val), budget=budget)
    given = (plain_loader(train), plain_loader(val)) if door == "loaders" else (dm,)
    reloads = {"epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    trainer = make_trainer(tmp_path, [*callbacks, looking], num_sanity_val_steps=sanity, logger=False, **reloads)
    trainer.fit(Model(), *given)
    assert [*looking.slots["train"], *looking.slots["val"]] == slots
    warnings = said(caplog, "val loader: CountedSource passes through uncached")
    assert ["budget={'val': ...}" in warning for warning in warnings] == [True] * (slots == [24, 0])


@pytest.mark.epoch_one_reads_all
def test_scarce_memory_is_kept_for_train_and_promised_once(tmp_path, monkeypatch):
    """With "auto" val, which opens first, takes at most half of the free memory, and that is not granted again."""
    free = FreeMemory(filesystem=None, available=800 * MIB, cgroup=None, directory=None)
    monkeypatch.setattr(FreeMemory, "measure", lambda *_: free)
    train, val = (Made(lambda _: torch.zeros(MIB, dtype=torch.uint8), length) for length in (800, 400))
    loaders = {"train": lambda: plain_loader(train, batch_size=1), "val": lambda: plain_loader(val, batch_size=1)}
    sanity_check = {"num_sanity_val_steps": 1, "limit_train_batches": 1, "check_val_every_n_epoch": 3, "epochs": 6}
    _, _, looking = fit("callback", tmp_path, loaders, **sanity_check)
    [train_slots], [val_slots] = looking.slots["train"], looking.slots["val"]
    assert 300 < val_slots <= 400 - 64  # a margin of 64 MiB is left
    assert train_slots > 380
    assert train_slots + val_slots <= 800 - 64


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fits", [False, True], ids=["larger", "fits"])
@pytest.mark.parametrize("door", ["callback", "ours"])
@pytest.mark.parametrize("workers", [0, 2, 4])
@pytest.mark.parametrize("limit", [500, 600, 700, 850, 1000, 1200, 1600, 2400, 4096])
def test_a_cache_gets_no_training_killed(tmp_path, limit, workers, door, fits):
    """A fit in a cgroup is killed only if it is killed without a cache, too; -s shows bytes and hit rates."""

    def lives(budget: int | str) -> bool:
        samples = limit if fits else max((limit - 400) * 7, 500)  # of 147 KiB
        job = {"door": door, "budget": budget, "workers": workers, "samples": samples}
        command = [sys.executable, "-m", "tests.training.limited_job", json.dumps(job)]
        with cgroup(limit * MIB) as folder:
            enter = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(folder)]
            with (tmp_path / "said").open("w") as said:  # no pipe: a worker that is left behind would hold it open
                done = subprocess.run([*enter, *command], stdout=said, stderr=said, timeout=1500)
            print(f"\n{limit} MiB {job}: peak {peak_of(folder) // MIB} MiB", (tmp_path / "said").read_text())
            return not has_killed(folder) and done.returncode == 0

    assert lives("auto") or not lives(0)


def test_every_door_keeps_back_what_the_training_will_take(tmp_path, monkeypatch, door):
    """A fit needs seven times its trained parameters: gradients and Adam's state. Lazy parameters have no size yet."""
    grant = Mock(wraps=allocation.grant)
    monkeypatch.setattr(allocation, "grant", grant)
    model = Model()
    model.layer.weight.requires_grad_(False)
    model.lazy = torch.nn.LazyLinear(10)
    callbacks, data = behind(door, Data(source(tmp_path)), budget="1MiB")
    make_trainer(tmp_path, callbacks, limit_train_batches=1, logger=False).fit(model, data)
    assert {call.args[3].private for call in grant.call_args_list} == {7 * 4 * 10}
