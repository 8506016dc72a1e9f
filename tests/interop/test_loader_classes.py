"""Loaders of other people's classes: cached where Lightning could make them anew, else left alone with a warning."""

import importlib
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_stocache import StochasticCache
from tests.training.tiny import fit, through

pytestmark = pytest.mark.slow  # the libraries take seconds to import

NUMBERS = TensorDataset(torch.arange(48.0).reshape(24, 2))


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Before the first test: what their imports leave behind is no test's."""
    for name in ("monai.data", "timm.data.loader", "webdataset"):
        pytest.importorskip(name)


def made(kind: str, **options: Any) -> Any:
    """A loader of this class."""
    module, _, name = kind.rpartition(".")
    return getattr(importlib.import_module(module), name)(NUMBERS, batch_size=4, **options)


@pytest.mark.parametrize(
    ("kind", "options", "door", "reload"),
    [
        ("monai.data.DataLoader", {"num_workers": 2}, "cache_datamodule", 1),
        ("monai.data.ThreadDataLoader", {"buffer_size": 2}, "callback", 0),
        ("timm.data.loader.MultiEpochsDataLoader", {"num_workers": 1}, "cache_datamodule", 1),
    ],
)
def test_subclasses_are_cached_and_equal(tmp_path, kind, options, door, reload):
    """Three epochs give the batches of without, bit for bit, and all samples have slots."""
    loaders = {"train": lambda: made(kind, shuffle=True, **options)}
    plain, *_ = fit("none", tmp_path, loaders, epochs=3, reload_dataloaders_every_n_epochs=reload)
    model, _, looking = fit(door, tmp_path, loaders, epochs=3, reload_dataloaders_every_n_epochs=reload)
    assert model.batches == plain.batches
    assert looking.slots["train"] == [24]
    assert type(looking.loaders["train"]) is type(made(kind))


@pytest.mark.parametrize("kind", ["monai.data.DataLoader", "monai.data.ThreadDataLoader"])
def test_lightning_makes_them_anew_to_predict(tmp_path, kind):
    """The loader of MONAI's that Lightning makes anew for predict reads the cache too."""
    seen = []
    for door in ("none", "callback"):
        hooks, cache = {"predict": lambda: made(kind, shuffle=True)}, {} if door == "none" else {"keep_cache": True}
        trainer, model, dm, looking = through(door, tmp_path, hooks, cache=cache)
        torch.manual_seed(0)
        trainer.predict(model, datamodule=dm)
        seen.append(model.batches)
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticCache):
                callback.close()
    assert seen[0] == seen[1]
    assert looking.slots["predict"] == [24]


class Wrapper:
    """A user's own, around a loader."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        self.loader, self.dataset = DataLoader(dataset, **options), dataset

    def __iter__(self) -> Any:
        return iter(self.loader)


THREADS = {"num_workers": 1, "use_thread_workers": True}


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (f"{__name__}.Wrapper", {}, "Wrapper passes through uncached: it is no torch.utils.data.DataLoader. Wrap"),
        ("webdataset.WebLoader", {}, "WebLoader passes through uncached: it is no torch"),
        ("monai.data.ThreadDataLoader", THREADS, "the workers of ThreadDataLoader are threads"),
    ],
)
def test_what_is_left_alone_is_warned_about(tmp_path, caplog, kind, options, words):
    """The object that the user gave is trained on, with one warning."""
    loader = made(kind, **options)
    _, _, looking = fit("callback", tmp_path, {"train": lambda: loader}, epochs=2)
    assert looking.loaders["train"] is loader
    [warning] = [text for text in caplog.messages if "passes through uncached" in text]
    assert words in warning
