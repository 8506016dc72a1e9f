"""The life of the caches: opened once, closed at every kind of end, and nothing left."""

import gc
import multiprocessing
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningDataModule

from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule, cache_datamodule
from lightning_stocache.training.monitor import CacheMonitor
from tests.sources import CountedSource
from tests.training.tiny import SAMPLES, MadeInSetup, Model, logged, make_trainer, plain_loader, source

pytestmark = [pytest.mark.processes, pytest.mark.looks_apart]


def door(name: str, folder: Path, workers: int = 0, **options: Any) -> tuple[list[Any], LightningDataModule]:
    """The callbacks and the DataModule with which a test trains through one of the doors."""
    if name == "callback":
        return [StochasticCache(**options)], MadeInSetup(folder, num_workers=workers)
    if name == "cached":
        return [CacheMonitor()], cache_datamodule(MadeInSetup(folder, num_workers=workers), **options)
    sets = source(folder), source(folder, "val", 8)
    return [CacheMonitor()], StocacheDataModule(*sets, batch_size=4, num_workers=workers, **options)


DOORS = pytest.mark.parametrize("name", ["callback", "cached", "ours"])


@DOORS
def test_a_call_opens_two_segments_per_dataset(tmp_path, segments, name):
    """Slots and counters of train and val are made once in a fit with sanity check and reloads, and closed after it."""
    callbacks, dm = door(name, tmp_path)
    trainer = make_trainer(tmp_path, callbacks, epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Model(), dm)
    assert len(segments) == 4
    assert all(segment.closed for segment in segments)
    trainer.validate(Model(), dm, verbose=False)
    assert len(segments) == 6
    assert all(segment.closed for segment in segments)


@pytest.mark.parametrize("name", ["callback", "cached"])
def test_a_reloaded_loader_takes_its_workers_with_it(tmp_path, name):
    """Loaders that a hook makes anew for every epoch leave no more worker processes than one epoch has."""

    class Reloading(MadeInSetup):
        def setup(self, stage: str) -> None:
            if self.train is None:
                super().setup(stage)

        def train_dataloader(self) -> Any:
            return plain_loader(self.train, num_workers=1, persistent_workers=True)

    class Counting(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            workers.append(len(multiprocessing.active_children()))

    workers = list[int]()
    cached, counting = Reloading(tmp_path), Counting()
    callbacks = [StochasticCache("50%"), counting] if name == "callback" else [counting]
    if name == "cached":
        cache_datamodule(cached, "50%")
    make_trainer(tmp_path, callbacks, epochs=4, reload_dataloaders_every_n_epochs=1, limit_val_batches=0).fit(
        Model(), cached
    )
    assert workers == [1, 1, 1, 1]
    gc.collect()
    assert not multiprocessing.active_children()


class Failing(Model):
    """Raises in the middle of an epoch."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise self.error("mine")
        return super().training_step(batch, batch_idx)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Lightning ignores Ctrl-C for good once it has seen one."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(
    ("name", "workers", "error"),
    [
        ("callback", 0, ArithmeticError),
        ("callback", 0, KeyboardInterrupt),
        ("cached", 0, SystemExit),
        ("ours", 0, ArithmeticError),
        ("ours", 2, KeyboardInterrupt),
    ],
)
@pytest.mark.usefixtures("_interruptible")
def test_caches_are_closed_after_every_kind_of_end(tmp_path, segments, name, error, workers):
    """An exception, Ctrl-C or SystemExit in a step closes all segments at once, and the next fit works."""
    callbacks, dm = door(name, tmp_path, workers)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        (trainer := make_trainer(tmp_path, callbacks)).fit(Failing(error), dm)
    assert len(segments) >= 4
    assert all(segment.closed for segment in segments)
    assert "dataloader" not in vars(trainer.fit_loop._data_source), "the loaders are the user's own again"
    trainer = make_trainer(tmp_path, callbacks, epochs=2)
    trainer.fit(Model(), dm)
    assert logged(trainer, "stocache/misses") == [SAMPLES, 0]
    assert all(segment.closed for segment in segments)


@pytest.mark.epoch_one_reads_all
def test_a_kept_cache_outlives_a_failure(tmp_path, segments):
    """With keep_cache=True what a failed fit had loaded is there for the next one."""
    train = source(tmp_path)
    dm = StocacheDataModule(train, batch_size=4, loader={"shuffle": False}, keep_cache=True)
    with pytest.raises(ArithmeticError):
        make_trainer(tmp_path).fit(Failing(ArithmeticError), dm)
    trainer = make_trainer(tmp_path, [CacheMonitor()])
    trainer.fit(Model(), dm)
    assert logged(trainer, "stocache/hits")[-1] == 16
    dm.close()
    assert all(segment.closed for segment in segments)


class Broken(CountedSource):
    """A source one of whose samples cannot be read."""

    broken = 13

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise ZeroDivisionError(f"sample {index} is mine")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_source_is_the_users_own(tmp_path, segments, workers):
    """A source that raises ends training with its own exception and traceback, the same with the cache off."""
    ends = []
    for budget in ("auto", 0):
        dm = StocacheDataModule(Broken(SAMPLES), batch_size=4, num_workers=workers, budget=budget)
        with pytest.raises(ZeroDivisionError, match="sample 13 is mine") as error:
            make_trainer(tmp_path).fit(Model(), dm)
        message = str(error.value)  # from a worker it holds the traceback, ours in front of the user's
        ends.append(message[message.find(f'File "{__file__}"') :])
        assert workers or any(Path(entry.path).name == Path(__file__).name for entry in error.traceback[1:])
        assert all(segment.closed for segment in segments)
    assert ends[0] == ends[1]
    assert not workers or "in __getitem__" in ends[0]


def test_an_error_of_the_source_at_set_up_is_the_users_own(tmp_path, segments):
    """A source that raises for its first sample raises through the Trainer, and nothing stays open."""

    class BrokenFirst(Broken):
        broken = 0

    for budget in ("auto", 0):
        callbacks, dm = (
            [StochasticCache(budget)],
            LightningDataModule.from_datasets(BrokenFirst(SAMPLES), num_workers=0),
        )
        with pytest.raises(ZeroDivisionError, match="sample 0 is mine"):
            make_trainer(tmp_path, callbacks).fit(Model(), dm)
    assert all(segment.closed for segment in segments)
