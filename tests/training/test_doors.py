"""The promises of every door, over a counted source: by Lightning, by Fabric, and in a plain loop."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import IterableDataset, random_split
from torchvision.transforms import v2

from lightning_stocache.growing.stream import CachedStream
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.node.named import clean, named_segments
from lightning_stocache.training.callbacks import FillProgress
from lightning_stocache.training.datamodule import StocacheDataModule, cache_datamodule
from lightning_stocache.training.step_timer import StepTimer
from tests.sources import CountedSource, CountedStream, Made, TransformedSource
from tests.training.tiny import (
    DOORS,
    SAMPLES,
    Data,
    MadeInSetup,
    Model,
    Photos,
    Remembers,
    announced,
    behind,
    cached_datasets,
    logged,
    make_trainer,
    plain_loader,
    source,
)

pytestmark = pytest.mark.processes

ALL = (*DOORS, "Fabric", "plain PyTorch")
every_door = pytest.mark.parametrize("door", ALL)
lightnings_doors = pytest.mark.parametrize("door", DOORS)


def train(
    door: str, tmp_path: Path, dataset: Any, after: Callable[[], None] = lambda: None, **options: Any
) -> list[list[Any]]:
    """The samples of two epochs of training through a door. `after` is called after each epoch."""
    seed_everything(0, verbose=False)
    if door in DOORS:
        model, callbacks = Remembers(), [LambdaCallback(on_train_epoch_end=lambda *_: after())]
        more, data = behind(door, Data(dataset, collate_fn=list), **options)
        make_trainer(tmp_path, [*more, *callbacks], epochs=2, logger=False).fit(model, data)
        return model.epochs
    cached: Any = CachedStream if options.pop("streams", False) else CachedDataset
    cached = cached(dataset, **options)
    loader = CachedLoader(cached, 4, None if isinstance(dataset, IterableDataset) else True, collate_fn=list)
    if door == "Fabric":
        loader = Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
    epochs: list[list[Any]] = []
    for _ in range(2):
        epochs.append([sample for batch in loader for sample in batch])
        after()
    cached.close()
    return epochs


def bits(epochs: list[list[Any]]) -> list[list[Any]]:
    """The samples in their order, in a form that can be compared."""
    return [[[part.tolist() if isinstance(part, torch.Tensor) else part for part in s] for s in e] for e in epochs]


@pytest.mark.epoch_one_reads_all
@every_door
def test_each_sample_is_loaded_once(door, tmp_path, caplog):
    """Epoch one loads all samples, and epoch two none. With a budget of zero every epoch loads all."""
    images = source(tmp_path)
    first, second = bits(train(door, tmp_path, images))
    assert sorted(first) == sorted(second)
    loads = images.loads
    assert loads == SAMPLES + announced(caplog)
    train(door, tmp_path, images, budget=0)
    assert images.loads == loads + 2 * SAMPLES


class Augmented(TransformedSource):
    """A source with a random transform inside."""

    transform = v2.Compose([v2.Resize(6, antialias=True), v2.RandomCrop(4)])


@pytest.mark.epoch_one_reads_all
@every_door
def test_a_random_transform_is_split(door, tmp_path, caplog):
    """The steps before the first random step are cached; the others draw the same as without a cache."""
    images = Augmented(SAMPLES, log_path=tmp_path / "loads")
    epochs = bits(train(door, tmp_path, images))
    assert images.loads == SAMPLES + announced(caplog)
    assert epochs == bits(train(door, tmp_path, images, budget=0))
    assert sorted(epochs[0]) != sorted(epochs[1])


class Texts(CountedSource):
    """Samples of many sizes."""

    def expected(self, index: int) -> Any:
        return f"{index}," * (index % 7), {"boxes": super().expected(index)[0][0, : index % 3].tolist()}


@pytest.mark.epoch_one_reads_all
@every_door
def test_samples_of_any_kind_are_kept(door, tmp_path, caplog):
    """Strings and lists of many lengths come out unchanged, from one load each."""
    texts = Texts(SAMPLES, log_path=tmp_path / "loads")
    epochs = train(door, tmp_path, texts)
    assert texts.loads == SAMPLES + announced(caplog)
    for epoch in epochs:
        assert sorted(epoch, key=str) == sorted((texts.expected(index) for index in range(SAMPLES)), key=str)


class Files(CountedSource):
    """Samples that are decoded from files. Its loads are the reads; `decodes` counts the others."""

    def __init__(self, folder: Path) -> None:
        super().__init__(SAMPLES, log_path=folder / "reads")
        self.decodes = source(folder, "decodes")

    def read(self, index: int) -> bytes:
        return bytes([super().__getitem__(index)[1]] * 20)

    def decode(self, content: bytes, index: int) -> Any:
        self.decodes[index]
        return torch.tensor(list(content)), index

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.read(index), index)


@every_door
def test_files_may_be_kept_instead(door, tmp_path):
    """With store="encoded" epoch two reads no file, and decodes all samples."""
    files = Files(tmp_path)
    reads: list[int] = []
    epochs = train(door, tmp_path, files, lambda: reads.append(files.loads), store="encoded")
    assert [sorted(index for _, index in epoch) for epoch in epochs] == [list(range(SAMPLES))] * 2
    assert reads[0] == reads[1] == files.loads
    assert files.decodes.loads >= 2 * SAMPLES


@every_door
def test_streams_are_kept_as_they_pass(door, tmp_path):
    """Epoch two comes from memory, in another order. Set-up reads the first 16 samples twice."""
    stream = CountedStream(SAMPLES, lambda number: (torch.full((3,), number), number))
    epochs = bits(train(door, tmp_path, stream, streams=True, budget="16MiB"))
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert stream.reads == SAMPLES + 2 * 16


@pytest.mark.named
@pytest.mark.parametrize(("door", "where"), [*zip(ALL, ["memory", "disk"] * 3, strict=False), ("callback", "disk")])
def test_a_name_outlives_the_training(door, where, tmp_path, caplog):
    """A second training under a name, in memory and on a disk, reads only the samples of set-up."""
    images = source(tmp_path)
    name = f"doors-{os.getpid()}-{ALL.index(door)}"
    options = {"dir": str(tmp_path / "caches")} if where == "disk" else {}
    try:
        train(door, tmp_path, images, name=name, **options)
        stored = announced(caplog) // 2  # what set-up has read, twice each, is not read again
        assert images.loads == SAMPLES - stored + announced(caplog)
        train(door, tmp_path, images, name=name, **options)
        assert images.loads == SAMPLES - stored + announced(caplog)
    finally:
        for segment in named_segments(directory=options.get("dir")):
            if segment.name.startswith(name):
                clean(segment.name, directory=options.get("dir"))


@every_door
def test_strict_makes_errors(door, tmp_path):
    """A stream and a random source are refused; without `strict` they pass through."""
    for data in (CountedStream(SAMPLES), Made(lambda index: torch.rand(3))):
        with pytest.raises((TypeError, ValueError), match=r"iterable-style|got CountedStream|it is random"):
            train(door, tmp_path, data, strict=True)


# ---- Lightning's doors ----


class Stages(Data):
    """A DataModule with all four stages."""

    def __init__(self, train: Any, val: Any, test: Any, predict: Any) -> None:
        super().__init__(train, val)
        self.test, self.predict = test, predict

    def test_dataloader(self) -> Any:
        return plain_loader(self.test)

    def predict_dataloader(self) -> Any:
        return plain_loader(self.predict)


@pytest.mark.epoch_one_reads_all
@lightnings_doors
def test_all_calls_are_cached_and_counted(door, tmp_path, caplog):
    """fit, validate, test and predict, twice each, load a set once. Epochs have a hit rate, and steps have parts."""
    sets = {name: source(tmp_path, name, 8) for name in ("train", "val", "test", "predict")}
    options: dict[str, Any] = {"keep_cache": True, "stage_budgets": {"test": 0}}
    callbacks, data = behind(door, Stages(**sets), **options)
    if door == "ours":
        data = StocacheDataModule(**sets, batch_size=4, **options)
    trainer = make_trainer(tmp_path, [*callbacks, StepTimer()], epochs=2, num_sanity_val_steps=0)
    trainer.fit(Model(), data)
    assert logged(trainer, "stocache/hit_rate")[-1] == 1.0
    assert logged(trainer, "stocache/step/wait_seconds")
    for _ in range(2):
        trainer.validate(Model(), data, verbose=False)
        trainer.test(Model(), data, verbose=False)
        trainer.predict(Model(), data)
    loads = {name: images.loads for name, images in sets.items()}
    assert loads["test"] == 16
    assert sum(loads.values()) == 16 + 3 * 8 + announced(caplog)
    (callbacks[0] if door == "callback" else data).caches.close()


class Dropping(Model):
    """A model that draws random numbers itself."""

    def loss(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        images = torch.nn.functional.dropout(images.flatten(1).float() / 255, training=self.training)
        return torch.nn.functional.cross_entropy(self.layer(images), labels)


class Splitting(Data):
    """May draw its splits inside of the loader hooks, from the global generator, and remembers them."""

    def __init__(self, tmp_path: Path, workers: int, splits: bool) -> None:
        super().__init__(source(tmp_path), source(tmp_path, "val", 8), num_workers=workers)
        self.options["persistent_workers"] = workers > 0
        self.splits, self.parts = splits, list[list[int]]()

    def draw(self, dataset: Any) -> Any:
        if not self.splits:
            return dataset
        self.parts.append((part := random_split(dataset, [0.75, 0.25])[0]).indices)
        return part

    def train_dataloader(self) -> Any:
        return plain_loader(self.draw(self.train), shuffle=True, **self.options)

    def val_dataloader(self) -> Any:
        return plain_loader(self.draw(self.val), **self.options)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize(("workers", "splits"), [(0, False), (2, False), (0, True)])
def test_weights_are_the_same_with_and_without_a_cache(tmp_path, workers, splits):
    """The same seed gives the same weights through every door, cached in full, in half, or not at all, also where
    loader hooks draw splits. StocacheDataModule, which deals its samples by a sampler of its own, is compared with
    `budget=0`."""

    def weights(door: str, **options: Any) -> tuple[torch.Tensor, list[list[int]]]:
        dm = Splitting(tmp_path, workers, splits)
        callbacks, data = behind(door, dm, **options)
        seed_everything(3)
        model = Dropping()
        make_trainer(tmp_path, [*callbacks, FillProgress()], epochs=3).fit(model, data)
        return model.weights, dm.parts

    plain, parts = weights("none")
    for cached, cached_parts in (weights("callback"), weights("cache_datamodule", budget="50%")):
        assert torch.equal(cached, plain)
        assert cached_parts == parts
    if not splits:
        full, half, off = (weights("ours", budget=budget)[0] for budget in ("auto", "50%", 0))
        assert torch.equal(full, off)
        assert torch.equal(half, off)


# ---- when caches open and close ----


def data_for(door: str, folder: Path, **options: Any) -> Data:
    """A DataModule that makes its datasets in `setup`, and for StocacheDataModule the datasets."""
    if door == "ours":
        return Data(source(folder), source(folder, "val", 8), **options)
    return MadeInSetup(folder, **options)


@pytest.mark.looks_apart
@lightnings_doors
def test_a_call_opens_two_segments_per_dataset(tmp_path, segments, door):
    """A fit with a sanity check and reloads creates slots and counters of train and val once, and closes them."""
    callbacks, dm = behind(door, data_for(door, tmp_path))
    trainer = make_trainer(tmp_path, callbacks, epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Model(), dm)
    assert len(segments) == 4
    assert all(segment.closed for segment in segments)
    trainer.validate(Model(), dm, verbose=False)
    assert len(segments) == 6
    assert all(segment.closed for segment in segments)


class Failing(Model):
    """Raises in the middle of an epoch."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise self.error("mine")
        return super().training_step(batch, batch_idx)


@pytest.mark.epoch_one_reads_all
@pytest.mark.looks_apart
@pytest.mark.parametrize(
    ("door", "workers", "error"),
    [
        ("callback", 0, ArithmeticError),
        ("callback", 0, KeyboardInterrupt),
        ("cache_datamodule", 0, SystemExit),
        ("ours", 0, ArithmeticError),
        ("ours", 2, KeyboardInterrupt),
    ],
)
@pytest.mark.usefixtures("interruptible")
def test_caches_are_closed_after_every_kind_of_end(tmp_path, segments, monkeypatch, door, error, workers):
    """An exception, Ctrl-C or SystemExit in a step closes all segments, and the next fit works. The user's own
    `on_exception` runs."""
    ended_by: list[BaseException] = []
    monkeypatch.setattr(MadeInSetup, "on_exception", lambda dm, exception: ended_by.append(exception))
    callbacks, dm = behind(door, data_for(door, tmp_path, num_workers=workers))
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        (trainer := make_trainer(tmp_path, callbacks)).fit(Failing(error), dm)
    assert door == "ours" or type(ended_by[0]) is error
    assert len(segments) >= 4
    assert all(segment.closed for segment in segments)
    assert "dataloader" not in vars(trainer.fit_loop._data_source), "the loaders are the user's own again"
    trainer = make_trainer(tmp_path, callbacks, epochs=2)
    trainer.fit(Model(), dm)
    assert logged(trainer, "stocache/misses") == [SAMPLES, 0]
    assert all(segment.closed for segment in segments)


@pytest.mark.epoch_one_reads_all
def test_a_kept_cache_outlives_a_failure(tmp_path, segments):
    """With keep_cache=True the next fit hits the samples that a failed fit has loaded."""
    callbacks, dm = behind("ours", Data(source(tmp_path), shuffle=False), keep_cache=True)
    with pytest.raises(ArithmeticError):
        make_trainer(tmp_path, callbacks).fit(Failing(ArithmeticError), dm)
    trainer = make_trainer(tmp_path, callbacks)
    trainer.fit(Model(), dm)
    assert logged(trainer, "stocache/hits")[-1] == 16
    dm.close()
    assert all(segment.closed for segment in segments)


def test_the_object_stays_what_it_is(tmp_path):
    """The same object comes back, of the same class, with its hyperparameters; undefined hooks stay undefined."""
    dm = Photos(str(tmp_path))
    cached = cache_datamodule(dm, budget="1MiB")
    assert cached is dm
    assert type(dm) is Photos
    assert dm.hparams.batch_size == 4
    overridden = {
        hook for hook in vars(LightningDataModule.__mro__[1]) if "dataloader" in hook and is_overridden(hook, dm)
    }
    assert overridden == {"train_dataloader", "val_dataloader"}
    assert not is_overridden("on_after_batch_transfer", dm)


def test_a_kept_cache_is_replaced_when_setup_makes_a_new_dataset(tmp_path):
    """keep_cache=True keeps no unreachable cache: a second fit with new datasets closes the caches of the first."""
    made = []

    class Remaking(MadeInSetup):
        def setup(self, stage):
            super().setup(stage)
            made.append((self.train, self.val))

    dm = cache_datamodule(Remaking(tmp_path), keep_cache=True)
    for _ in range(3):
        make_trainer(tmp_path).fit(Model(), dm)
    assert [[one in dm.caches for one in sets] for sets in made] == [[False, False], [False, False], [True, True]]
    dm.caches.close()


@pytest.mark.epoch_one_reads_all
@lightnings_doors
def test_a_copy_in_another_process_has_nothing_open(tmp_path, door):
    """A Trainer with a DataModule that is pickled, as where ranks are spawned, keeps callbacks, hooks and options, and
    opens its own caches, also if the caches of the DataModule are open."""
    callbacks, dm = behind(door, data_for(door, tmp_path), budget="1MiB")
    if door != "callback":
        dm.setup("fit")
        dm.train_dataloader()
        assert dm.train in dm.caches
    trainer, copy = pickle.loads(pickle.dumps((make_trainer(tmp_path, callbacks, epochs=2), dm)))
    if door != "callback":
        assert copy.caches.options == dm.caches.options
        assert copy.train not in copy.caches
    trainer.fit(Model(), copy)
    assert logged(trainer, "stocache/hits") == [0, SAMPLES]
    if door != "callback":
        assert cached_datasets(dm.train_dataloader())[0].cache.filled == 0
    dm.teardown("fit")
