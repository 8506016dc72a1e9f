"""Streams in a Trainer call: uncached without `streams=True`, which keeps them."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_stocache import CachedStream, FillProgress
from tests.sources import CountedStream
from tests.training.tiny import Data, Remembers, behind, logged, make_trainer, said

pytestmark = pytest.mark.processes

LENGTH = 40
ALL = [float(number) for number in range(LENGTH)]
KEEPS: dict[str, Any] = {"budget": "64MiB", "streams": True}


class Numbers(CountedStream):
    """Tensors of their number."""

    length = LENGTH

    def sample(self, number: int) -> torch.Tensor:
        return torch.full((3,), float(number))


@pytest.mark.parametrize("door", ["callback", "ours", "the user's"])
def test_streams_are_kept(tmp_path: Path, door: str, caplog: pytest.LogCaptureFixture) -> None:
    """Every sample comes once an epoch. Later epochs come from memory, before the transform of StocacheDataModule. A
    CachedStream in the user's own loader is monitored. One line says that a stream is stored, and one, in the first
    epoch that comes from memory, that the cache is full."""
    caplog.set_level(logging.INFO)
    train, val, model = Numbers(), Numbers(12), Remembers()
    kept = CachedStream(train, "64MiB") if door == "the user's" else train
    more = {"transform": lambda sample: sample + 100} if door == "ours" else {}
    workers = 2 if door == "callback" else 0
    data = Data(kept, val, num_workers=workers)
    callbacks, data = behind("callback" if door == "the user's" else door, data, **KEEPS | more)
    trainer = make_trainer(tmp_path, [*callbacks, FillProgress()], epochs=4)
    trainer.fit(model, data)
    shift = 100 if more else 0
    assert model.sorted_epochs == [[number + shift for number in ALL]] * 4
    assert list(map(sorted, model.validated[1:])) == [[float(number + shift) for number in range(12)]] * 4
    assert train.reads <= LENGTH + 32
    assert caplog.text.count("Numbers: a stream, stored as it passes, in at most") == 2
    lines = said(caplog, "stocache: ")
    [full] = [number for number, line in enumerate(lines) if "the cache is full: 40 of 40 samples" in line]
    assert "epoch 0" in lines[full - 1]
    assert "epoch 1" in lines[full + 1]
    assert logged(trainer, "stocache/hit_rate") == [0, 1, 1, 1]
    assert logged(trainer, "stocache/coverage")[-1] == 1
    assert logged(trainer, "stocache/fill_fraction") == [1] * 4
    if isinstance(kept, CachedStream):
        kept.close()


@pytest.mark.parametrize(
    ("budget", "batches", "words"), [("64MiB", 3, "broken off"), ("50%", 10, "nobody knows the size")]
)
def test_a_stream_of_unknown_contents_passes_by(tmp_path: Path, caplog: Any, budget: str, batches: int, words: str):
    """With limit_train_batches, or a budget in percent, it is what it is without a cache, with one warning."""
    model, (callbacks, data) = Remembers(), behind("callback", Data(Numbers()), **KEEPS | {"budget": budget})
    limit = batches if batches < 10 else 1.0
    make_trainer(tmp_path, callbacks, epochs=5, limit_train_batches=limit).fit(model, data)
    assert model.sorted_epochs == [ALL[: 4 * batches]] * 5
    assert caplog.text.count(words) == 1


def test_a_stream_that_is_made_anew_replaces_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Loaders that are reloaded with a new stream give the memory of the old one back, with one warning."""

    class Anew(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(Numbers(), batch_size=4)

    model, (callbacks, data) = Remembers(), behind("callback", Anew(None), **KEEPS)
    make_trainer(tmp_path, callbacks, epochs=4, reload_dataloaders_every_n_epochs=1).fit(model, data)
    assert model.sorted_epochs == [ALL] * 4
    assert caplog.text.count("came with a new Numbers") == 1
