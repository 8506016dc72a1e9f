"""Streams in a Trainer call: passed by unless `streams=True`, which keeps them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_stocache import CachedStream, FillProgress, StocacheDataModule, StochasticCache
from tests.sources import CountedStream
from tests.training.seen import Remembers
from tests.training.tiny import logged, make_trainer

pytestmark = pytest.mark.processes

LENGTH = 40


class Numbers(CountedStream):
    """Tensors of their number."""

    length = LENGTH

    def sample(self, number: int) -> torch.Tensor:
        return torch.full((3,), float(number))


ALL = [float(number) for number in range(LENGTH)]


def test_the_callback_keeps_streams(tmp_path: Path) -> None:
    """Every sample comes once an epoch; after the first epoch they come from memory, and the hit rate is logged."""
    train, val, model = Numbers(), Numbers(12), Remembers()
    callbacks = [StochasticCache(budget="64MiB", streams=True), FillProgress()]
    trainer = make_trainer(tmp_path, callbacks, epochs=4)
    trainer.fit(model, DataLoader(train, batch_size=4, num_workers=2), DataLoader(val, batch_size=4))
    assert model.sorted_epochs == [ALL] * 4
    assert set(map(tuple, model.validated[1:])) == {tuple(map(float, range(12)))}
    assert train.reads <= LENGTH + 32
    assert logged(trainer, "stocache/hit_rate") == [0, 1, 1, 1]
    assert logged(trainer, "stocache/coverage")[-1] == 1
    assert logged(trainer, "stocache/fill_fraction") == [1] * 4


def test_our_datamodule_keeps_streams_with_a_transform_after_them(tmp_path: Path) -> None:
    """StocacheDataModule runs its transform after what is kept."""
    train, model = Numbers(), Remembers()
    datamodule = StocacheDataModule(
        train=train, batch_size=4, budget="64MiB", streams=True, transform=lambda sample: sample + 100
    )
    make_trainer(tmp_path, epochs=4).fit(model, datamodule)
    assert model.sorted_epochs == [[number + 100 for number in ALL]] * 4
    assert train.reads <= LENGTH + 32


def test_a_stream_that_its_user_keeps_is_left_to_him(tmp_path: Path) -> None:
    """A CachedStream in the user's own loader is monitored, and made the node's common one."""
    train, model = Numbers(), Remembers()
    stream = CachedStream(train, "64MiB")
    trainer = make_trainer(tmp_path, [StochasticCache(budget="64MiB")], epochs=4)
    trainer.fit(model, DataLoader(stream, batch_size=4))
    assert model.sorted_epochs == [ALL] * 4
    assert logged(trainer, "stocache/hit_rate") == [0, 1, 1, 1]
    stream.close()


@pytest.mark.parametrize(
    ("budget", "batches", "words"), [("64MiB", 3, "broken off"), ("50%", 10, "nobody knows the size")]
)
def test_a_stream_of_unknown_contents_passes_by(tmp_path: Path, caplog: Any, budget: str, batches: int, words: str):
    """With limit_train_batches, or a budget in percent, it is what it is without a cache, with one warning."""
    model, callbacks = Remembers(), [StochasticCache(budget=budget, streams=True)]
    trainer = make_trainer(tmp_path, callbacks, epochs=5, limit_train_batches=batches if batches < 10 else 1.0)
    trainer.fit(model, DataLoader(Numbers(), batch_size=4))
    assert model.sorted_epochs == [ALL[: 4 * batches]] * 5
    assert caplog.text.count(words) == 1


def test_a_stream_that_is_made_anew_replaces_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Loaders that are reloaded with a new stream give the memory of the old one back, with one warning."""

    class Anew(LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(Numbers(), batch_size=4)

    model, callbacks = Remembers(), [StochasticCache(budget="64MiB", streams=True)]
    make_trainer(tmp_path, callbacks, epochs=4, reload_dataloaders_every_n_epochs=1).fit(model, Anew())
    assert model.sorted_epochs == [ALL] * 4
    assert caplog.text.count("came with a new Numbers") == 1
