"""The promises of all doors, over a counted source; then those of the callback and of cache_datamodule."""

import gc
import os
import pickle
import weakref
from collections.abc import Callable
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
from lightning_stocache.training.step_timer import StepTimer
from tests.sources import CountedSource, CountedStream, Made, TransformedSource
from tests.training.tiny import (
    DOORS,
    SAMPLES,
    Data,
    MadeInSetup,
    Model,
    Photos,
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


class Seeing(Model):
    """Keeps the batches of each epoch."""

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


def train(
    door: str, tmp_path: Path, dataset: Any, after: Callable[[], None] = lambda: None, **options: Any
) -> list[list[Any]]:
    """The samples of two epochs of training through a door. `after` is called after each epoch."""
    seed_everything(0, verbose=False)
    if door in DOORS:
        model = Seeing(after)
        callbacks, data = behind(door, Data(dataset, collate_fn=list), **options)
        make_trainer(tmp_path, callbacks, epochs=2, logger=False).fit(model, data)
        return [[sample for batch in epoch for sample in batch] for epoch in model.epochs]
    if options.pop("streams", False):
        cached: Any = CachedStream(dataset, **options)
    else:
        cached = CachedDataset(dataset, **options)
    shuffle = None if isinstance(dataset, IterableDataset) else True
    loader = CachedLoader(cached, 4, shuffle, collate_fn=list)
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


class Files(Dataset[Any]):
    """Samples that are decoded from files. Both steps are counted, in all processes."""

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
    """With store="encoded" epoch two reads no file, and decodes all samples."""
    files = Files(tmp_path)
    reads: list[int] = []
    epochs = train(door, tmp_path, files, lambda: reads.append(files.count("reads")), store="encoded")
    assert [sorted(index for _, index in epoch) for epoch in epochs] == [list(range(SAMPLES))] * 2
    assert reads[0] == reads[1] == files.count("reads")
    assert files.count("decodes") >= 2 * SAMPLES


class Stream(CountedStream):
    """A stream of tensors and their numbers."""

    length = SAMPLES

    def sample(self, number: int) -> Any:
        return torch.full((3,), number), number


@every_door
def test_streams_are_kept_as_they_pass(door, tmp_path):
    """Epoch two comes from memory, in another order. Set-up reads the first 16 samples twice."""
    stream = Stream()
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
    for data in (Stream(), Made(lambda index: torch.rand(3))):
        with pytest.raises((TypeError, ValueError), match=r"iterable-style|got Stream|it is random"):
            train(door, tmp_path, data, strict=True)


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
@pytest.mark.parametrize("door", DOORS)
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


# ---- the callback ----


@pytest.mark.epoch_one_reads_all
def test_fast_dev_run_and_barebones(tmp_path, recwarn):
    """A fit of one batch, and a Trainer that does not log: both run, without a warning about logging."""
    barebones = Trainer(barebones=True, callbacks=[StochasticCache(), FillProgress()], accelerator="cpu", max_epochs=1)
    for trainer in (make_trainer(tmp_path, [StochasticCache()], fast_dev_run=True), barebones):
        trainer.fit(Model(), plain_loader(source(tmp_path)), plain_loader(source(tmp_path, "val", 8)))
    assert not [warning for warning in recwarn if "self.log" in str(warning.message)]


class Anew(Model):
    """Makes a new dataset for every epoch, by `make` of the number of earlier datasets."""

    def __init__(self, make):
        super().__init__()
        self.make, self.count = make, 0

    def train_dataloader(self):
        self.count += 1
        return plain_loader(self.make(self.count - 1))


@pytest.mark.epoch_one_reads_all
def test_a_dataset_made_anew_goes_on_in_the_cache_of_the_one_before(tmp_path, caplog):
    """Its samples are hits. If it is longer each time, new samples pass through."""
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Anew(lambda count: source(tmp_path, samples=SAMPLES + 4 * count)))
    assert logged(trainer, "stocache/misses") == [SAMPLES, 0, 0]
    assert logged(trainer, "stocache/hits") == [0, SAMPLES, SAMPLES]
    assert logged(trainer, "stocache/bypasses") == [0, 4, 8]
    assert logged(trainer, "stocache/coverage") == pytest.approx([1, SAMPLES / (SAMPLES + 4), SAMPLES / (SAMPLES + 8)])
    assert logged(trainer, "stocache/hit_rate_expected") == [0]  # no formula holds for what grows
    assert "came with a new" not in caplog.text
    assert caplog.text.count("the new part of CountedSource passes through uncached") == 1


@pytest.mark.epoch_one_reads_all
def test_a_dataset_that_grows_in_place_keeps_its_cache(tmp_path, caplog):
    """Its first samples are hits. Samples that came since the cache opened pass through, with one warning."""
    images = source(tmp_path)

    def grown(count):
        images.length = SAMPLES + 4 * count
        return images

    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Anew(grown))
    assert images.loads == SAMPLES + 4 + 8 + announced(caplog)
    assert logged(trainer, "stocache/hits") == [0, SAMPLES, SAMPLES]
    assert logged(trainer, "stocache/bypasses") == [0, 4, 8]
    assert caplog.text.count("the new part of CountedSource passes through uncached") == 1


class Other(CountedSource):
    """Other samples in each object."""

    def expected(self, index):
        image, label = super().expected(index)
        return image + int(Path(self.log_path).name), label


@pytest.mark.epoch_one_reads_all
def test_datasets_that_are_never_the_same_end_the_caching(tmp_path, caplog):
    """The second new dataset without a hit in between passes through, with one warning that says what to do."""
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=5, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Anew(lambda count: Other(SAMPLES, log_path=tmp_path / str(count))))
    assert logged(trainer, "stocache/misses")[:2] == [SAMPLES] * 2
    assert caplog.text.count("not cached any more") == caplog.text.count("RollingCache") == 1


@pytest.mark.epoch_one_reads_all
def test_a_loader_made_anew_for_every_epoch_goes_with_it(tmp_path):
    """A call keeps only the last loader of a hook, also if a loader's own collate function refers to it."""
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

    class Ending(Photos):
        def on_exception(self, exception):
            self.ended_by = type(exception).__name__

    dm = cache_datamodule(Ending(str(tmp_path)))
    trainer = make_trainer(tmp_path)
    with pytest.raises(ArithmeticError, match="mine"):
        trainer.fit(Failing(), dm)
    assert dm.ended_by == "ArithmeticError"
    assert [dataset.cache for dataset in cached_datasets(trainer.train_dataloader)] == [None]


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


def test_a_copy_in_another_process_has_nothing_open(tmp_path):
    """A DataModule that is pickled with open caches keeps its hooks and options, and opens its own caches."""
    dm = cache_datamodule(MadeInSetup(tmp_path), budget="1MiB")
    dm.setup("fit")
    dm.train_dataloader()
    copy = pickle.loads(pickle.dumps(dm))
    assert copy.caches.options == dm.caches.options
    assert dm.train in dm.caches
    assert copy.train not in copy.caches
    assert cached_datasets(copy.train_dataloader())[0].cache is not cached_datasets(dm.train_dataloader())[0].cache
    for module in (dm, copy):
        module.teardown("fit")
