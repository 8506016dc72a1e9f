"""What the doors promise: the same in all of them, over a counted source; then what the callback and cache_datamodule
leave as it is."""

import gc
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import Dataset, IterableDataset, default_collate
from torchvision.transforms import v2

from lightning_stocache.growing.stream import CachedStream
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.node.named import clean, named_segments
from lightning_stocache.training.callbacks import FillProgress, StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule, cache_datamodule
from lightning_stocache.training.monitor import CacheMonitor
from lightning_stocache.training.step_timer import StepTimer
from tests.sources import CountedSource
from tests.training.tiny import (
    SAMPLES,
    MadeInSetup,
    Model,
    announced,
    cached_datasets,
    logged,
    make_trainer,
    plain_loader,
    source,
)

pytestmark = pytest.mark.processes

DOORS = ("StocacheDataModule", "cache_datamodule", "StochasticCache", "Fabric", "plain PyTorch")
OF_THE_TRAINER = DOORS[:3]
every_door = pytest.mark.parametrize("door", DOORS)


class Seeing(Model):
    """Keeps what it was given to train on."""

    def __init__(self, after: Callable[[], None]) -> None:
        super().__init__()
        self.epochs: list[list[Any]] = []
        self.after = after

    def on_train_epoch_end(self) -> None:
        self.after()

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.epochs[-1].append(batch)
        return self.layer.weight.sum()


class Noise(Dataset[torch.Tensor]):
    """Another tensor whenever it is read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3)


class Data(LightningDataModule):
    """A DataModule of a user's, whose loaders are lists of samples."""

    def __init__(self, **sets: Any) -> None:
        super().__init__()
        self.sets = sets

    def train_dataloader(self) -> Any:
        return plain_loader(self.sets["train"], collate_fn=list, shuffle=shuffled(self.sets["train"]))

    def val_dataloader(self) -> Any:
        return plain_loader(self.sets["val"]) if "val" in self.sets else []

    def test_dataloader(self) -> Any:
        return plain_loader(self.sets["test"])

    def predict_dataloader(self) -> Any:
        return plain_loader(self.sets["predict"])


def shuffled(dataset: Any) -> bool | None:
    return None if isinstance(dataset, IterableDataset) else True


def train(
    door: str, tmp_path: Path, dataset: Any, after: Callable[[], None] = lambda: None, **options: Any
) -> list[list[Any]]:
    """Train for two epochs through a door; the samples of each epoch, after which a function is called."""
    seed_everything(0, verbose=False)
    if door in OF_THE_TRAINER:
        model, callbacks, data = Seeing(after), [], Data(train=dataset)
        if door == "StochasticCache":
            callbacks = [StochasticCache(**options)]
        elif door == "cache_datamodule":
            data = cache_datamodule(data, **options)
        else:
            loader = {"collate_fn": list, "shuffle": shuffled(dataset)}
            data = StocacheDataModule(dataset, batch_size=4, loader=loader, **options)  # type: ignore[assignment]
        make_trainer(tmp_path, callbacks, epochs=2, logger=False).fit(model, data)
        return [[sample for batch in epoch for sample in batch] for epoch in model.epochs]
    if options.pop("streams", False):
        cached: Any = CachedStream(dataset, **options)
    else:
        cached = CachedDataset(dataset, **options)
    loader = CachedLoader(cached, 4, shuffled(dataset), collate_fn=list)
    if door == "Fabric":
        loader = Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
    epochs: list[list[Any]] = []
    for _ in range(2):
        epochs.append([sample for batch in loader for sample in batch])
        after()
    cached.close()
    return epochs


def bits(epochs: list[list[Any]]) -> list[list[Any]]:
    """Something that can be compared, with the order of samples."""
    return [[[part.tolist() if isinstance(part, torch.Tensor) else part for part in s] for s in e] for e in epochs]


@pytest.mark.epoch_one_reads_all
@every_door
def test_each_sample_is_loaded_once(door, tmp_path, caplog):
    """Epoch one loads all samples, and epoch two none."""
    images = source(tmp_path)
    first, second = bits(train(door, tmp_path, images))
    assert sorted(first) == sorted(second)
    assert images.loads == SAMPLES + announced(caplog)


@every_door
def test_off_is_off(door, tmp_path):
    """With a budget of zero all is loaded in every epoch."""
    images = source(tmp_path)
    train(door, tmp_path, images, budget=0)
    assert images.loads == 2 * SAMPLES


class Augmented(CountedSource):
    """A source with a random transform inside."""

    transform: Any = v2.Compose([v2.Resize(6, antialias=True), v2.RandomCrop(4)])

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return self.transform(image), label


@pytest.mark.epoch_one_reads_all
@every_door
def test_a_random_transform_is_split(door, tmp_path, caplog):
    """What comes before its first random step is cached; the rest draws what it draws without a cache."""
    images = Augmented(SAMPLES, log_path=tmp_path / "loads")
    epochs = bits(train(door, tmp_path, images))
    assert images.loads == SAMPLES + announced(caplog)
    assert epochs == bits(train(door, tmp_path, images, budget=0))
    assert sorted(epochs[0]) != sorted(epochs[1])


class Texts(CountedSource):
    """Samples that are no rows."""

    def expected(self, index: int) -> Any:
        return f"{index}," * (index % 7), {"boxes": super().expected(index)[0][0, : index % 3].tolist()}


@pytest.mark.epoch_one_reads_all
@every_door
def test_samples_of_any_kind_are_kept(door, tmp_path, caplog):
    """Strings and lists of many lengths come out as they went in, from one load each."""
    texts = Texts(SAMPLES, log_path=tmp_path / "loads")
    epochs = train(door, tmp_path, texts)
    assert texts.loads == SAMPLES + announced(caplog)
    for epoch in epochs:
        assert sorted(epoch, key=str) == sorted((texts.expected(index) for index in range(SAMPLES)), key=str)


class Files(Dataset[Any]):
    """Samples that are decoded of files; both steps are counted, in whatever process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return SAMPLES

    def count(self, what: str) -> int:
        return os.path.getsize(self.folder / what)

    def _note(self, what: str) -> None:
        with open(self.folder / what, "ab", buffering=0) as log:
            log.write(b".")

    def read(self, index: int) -> bytes:
        self._note("reads")
        return bytes([index] * 20)

    def decode(self, content: bytes, index: int) -> Any:
        self._note("decodes")
        return torch.tensor(list(content)), index

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.read(index), index)


@every_door
def test_files_may_be_kept_instead(door, tmp_path):
    """With store="encoded" epoch two reads no file, and decodes all of them."""
    files = Files(tmp_path)
    reads: list[int] = []
    epochs = train(door, tmp_path, files, lambda: reads.append(files.count("reads")), store="encoded")
    assert [sorted(index for _, index in epoch) for epoch in epochs] == [list(range(SAMPLES))] * 2
    assert reads[0] == reads[1] == files.count("reads")
    assert files.count("decodes") >= 2 * SAMPLES


class Stream(IterableDataset[Any]):
    """A stream that counts how often it was begun and what it gave."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __iter__(self) -> Iterator[Any]:
        for index in range(SAMPLES):
            with open(self.log, "ab", buffering=0) as log:
                log.write(b".")
            yield torch.full((3,), index), index


@every_door
def test_streams_are_kept_as_they_pass(door, tmp_path):
    """Epoch two comes from memory, in another order. Its first 16 samples are read at set-up, and once more then."""
    epochs = bits(train(door, tmp_path, Stream(tmp_path / "stream"), streams=True))
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert os.path.getsize(tmp_path / "stream") == SAMPLES + 2 * 16


@pytest.mark.named
@pytest.mark.parametrize("where", ["memory", "disk"])
@every_door
def test_a_name_outlives_the_training(door, where, tmp_path, caplog):
    """The second training under a name, in memory and on a disk, reads nothing but what set-up reads."""
    images = source(tmp_path)
    name = f"doors-{os.getpid()}-{DOORS.index(door)}"
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
    """What cannot be cached, and would be passed by with a warning, is refused: a stream, and what is random."""
    for data in (Stream(tmp_path / "stream"), Noise()):
        with pytest.raises((TypeError, ValueError), match=r"iterable-style|got Stream|it is random"):
            train(door, tmp_path, data, strict=True)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("door", OF_THE_TRAINER)
def test_all_calls_are_cached_and_counted(door, tmp_path, caplog):
    """fit, validate, test and predict, twice each, load a set once; epochs have a hit rate, and steps their parts."""
    names = ("train", "val", "test", "predict")
    sets = {name: source(tmp_path, name, 8) for name in names}
    options: dict[str, Any] = {"keep_cache": True, "stage_budgets": {"test": 0}}
    callbacks = [StochasticCache(**options) if door == "StochasticCache" else CacheMonitor(), StepTimer()]
    data: Any = StocacheDataModule(**sets, batch_size=4, **options) if door == "StocacheDataModule" else Data(**sets)
    if door != "StocacheDataModule":
        vars(data)["train_dataloader"] = lambda: plain_loader(sets["train"], shuffle=True)
    if door == "cache_datamodule":
        data = cache_datamodule(data, **options)
    trainer = make_trainer(tmp_path, callbacks, epochs=2, num_sanity_val_steps=0)
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
    (callbacks[0] if door == "StochasticCache" else data).close() if door != "cache_datamodule" else data.caches.close()


# ---- the callback ----


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(
    ("origin", "reload"),
    [("fit", 1), ("module", 1), ("from_datasets", 0), ("cache_datamodule", 1)],
)
def test_loaders_from_anywhere_are_cached(tmp_path, caplog, origin, reload):
    """Given to fit, from a module's hooks or from a DataModule: each sample is loaded once in three epochs.

    A DataModule that `cache_datamodule` has cached keeps its caches beside the callback.
    """
    train, val = source(tmp_path), source(tmp_path, "val", 8)

    class OwnModel(Model):
        def train_dataloader(self) -> Any:
            return plain_loader(train, shuffle=True)

        def val_dataloader(self) -> Any:
            return plain_loader(val)

    dm = LightningDataModule.from_datasets(train, val)
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=3, reload_dataloaders_every_n_epochs=reload)
    if origin == "fit":
        trainer.fit(Model(), plain_loader(train, shuffle=True), plain_loader(val))
    elif origin == "module":
        trainer.fit(OwnModel())
    else:
        trainer.fit(Model(), cache_datamodule(dm) if origin == "cache_datamodule" else dm)
    assert train.loads + val.loads == SAMPLES + 8 + announced(caplog)
    assert logged(trainer, "stocache/hit_rate")[-1] == 1


@pytest.mark.epoch_one_reads_all
def test_fast_dev_run_and_barebones(tmp_path, recwarn):
    """One batch of everything, and a Trainer that does not log: both run, and nobody is told that logging is off."""
    barebones = Trainer(barebones=True, callbacks=[StochasticCache(), FillProgress()], accelerator="cpu", max_epochs=1)
    for trainer in (make_trainer(tmp_path, [StochasticCache()], fast_dev_run=True), barebones):
        trainer.fit(Model(), plain_loader(source(tmp_path)), plain_loader(source(tmp_path, "val", 8)))
    assert not [warning for warning in recwarn if "self.log" in str(warning.message)]


class Anew(Model):
    """Makes its dataset for every epoch; `make` is given how many it has made."""

    def __init__(self, make):
        super().__init__()
        self.make, self.count = make, 0

    def train_dataloader(self):
        self.count += 1
        return plain_loader(self.make(self.count - 1))


@pytest.mark.epoch_one_reads_all
def test_a_dataset_made_anew_goes_on_in_the_cache_of_the_one_before(tmp_path, caplog):
    """Also where it is longer each time: its samples are hits, and what is new passes through."""
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Anew(lambda count: source(tmp_path, samples=SAMPLES + 4 * count)))
    assert logged(trainer, "stocache/misses") == [SAMPLES, 0, 0]
    assert logged(trainer, "stocache/hits") == [0, SAMPLES, SAMPLES]
    assert logged(trainer, "stocache/bypasses") == [0, 4, 8]
    assert logged(trainer, "stocache/coverage") == pytest.approx([1, SAMPLES / (SAMPLES + 4), SAMPLES / (SAMPLES + 8)])
    assert logged(trainer, "stocache/hit_rate_expected") == [0]  # no formula holds for what grows
    assert "came with a new" not in caplog.text


class Other(CountedSource):
    """Other samples in each object."""

    def expected(self, index):
        image, label = super().expected(index)
        return image + int(Path(self.log_path).name), label


@pytest.mark.epoch_one_reads_all
def test_datasets_that_are_never_the_same_end_the_caching(tmp_path, caplog):
    """The second that comes before anything was hit passes through, with one warning that says what to do."""
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=5, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Anew(lambda count: Other(SAMPLES, log_path=tmp_path / str(count))))
    assert logged(trainer, "stocache/misses")[:2] == [SAMPLES] * 2
    assert caplog.text.count("not cached any more") == caplog.text.count("RollingCache") == 1


@pytest.mark.epoch_one_reads_all
def test_a_loader_made_anew_for_every_epoch_goes_with_it(tmp_path):
    """Also one that its own collate function holds: the call keeps the last one alone."""
    train, made, alive = source(tmp_path), [], []

    class Anew(Model):
        def train_dataloader(self):
            loader = plain_loader(train)
            loader.collate_fn = MethodType(lambda loader, samples: default_collate(samples), loader)
            made.append(weakref.ref(loader))
            gc.collect()
            alive.append(sum(loader() is not None for loader in made))
            return loader

    make_trainer(tmp_path, [StochasticCache()], epochs=5, reload_dataloaders_every_n_epochs=1).fit(Anew())
    assert len(alive) == 5
    assert max(alive) <= 3


# ---- cache_datamodule ----


class Photos(LightningDataModule):
    """A DataModule as people write it: datasets in setup, a loader per stage."""

    def __init__(self, folder: str, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.ended_by = ""

    def setup(self, stage: str) -> None:
        self.train, self.val = source(self.hparams.folder), source(self.hparams.folder, "val", 8)

    def train_dataloader(self):
        return plain_loader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return plain_loader(self.val, batch_size=self.hparams.batch_size)

    def on_exception(self, exception: BaseException) -> None:
        self.ended_by = type(exception).__name__


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


def test_the_users_on_exception_runs_and_the_caches_close(tmp_path):
    """An exception in training reaches the user's on_exception, and the caches are closed after it."""

    class Failing(Model):
        def training_step(self, batch, batch_idx):
            raise ArithmeticError("mine")

    dm = cache_datamodule(Photos(str(tmp_path)))
    trainer = make_trainer(tmp_path)
    with pytest.raises(ArithmeticError, match="mine"):
        trainer.fit(Failing(), dm)
    assert dm.ended_by == "ArithmeticError"
    assert [dataset.cache for dataset in cached_datasets(trainer.train_dataloader)] == [None]


def test_a_kept_cache_is_replaced_when_setup_makes_a_new_dataset(tmp_path):
    """keep_cache=True keeps no cache that nobody can reach: a second fit with new datasets closes the first one's."""
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


def test_a_copy_in_another_process_has_nothing_open(tmp_path):
    """Pickled with open caches, a DataModule arrives with its hooks and options, and opens its own."""
    dm = cache_datamodule(Photos(str(tmp_path)), budget="1MiB")
    dm.setup("fit")
    dm.train_dataloader()
    copy = pickle.loads(pickle.dumps(dm))
    assert copy.caches.options == dm.caches.options
    assert dm.train in dm.caches
    assert copy.train not in copy.caches
    assert cached_datasets(copy.train_dataloader())[0].cache is not cached_datasets(dm.train_dataloader())[0].cache
    for module in (dm, copy):
        module.teardown("fit")
