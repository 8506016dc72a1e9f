"""Loaders of other people's classes: cached where Lightning could make them anew, else left alone with a warning."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.training.tiny import fit, through

pytestmark = pytest.mark.processes

NUMBERS = TensorDataset(torch.arange(48.0).reshape(24, 2))


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Before the first test: what their imports leave behind is no test's."""
    global monai, timm, webdataset
    names = ("monai.data", "timm.data.loader", "webdataset")
    monai, timm, webdataset = (pytest.importorskip(name) for name in names)


def made(kind: Any, **options: Any) -> Any:
    return kind(NUMBERS, batch_size=4, shuffle=True, **options)


@pytest.mark.parametrize(
    ("make", "door", "reload"),
    [
        (lambda: made(monai.DataLoader, num_workers=2), "cache_datamodule", 1),
        (lambda: made(monai.ThreadDataLoader, buffer_size=2), "callback", 0),
        (lambda: made(timm.MultiEpochsDataLoader, num_workers=1), "cache_datamodule", 1),
    ],
    ids=["MONAI, anew each epoch", "MONAI, thread", "timm, MultiEpochs"],
)
def test_subclasses_are_cached_and_equal(tmp_path, make, door, reload):
    """Three epochs give the batches of without, bit for bit, and all samples have slots."""
    options = {"epochs": 3, "reload_dataloaders_every_n_epochs": reload}
    plain, *_ = fit("none", tmp_path, {"train": make}, **options)
    model, _, looking = fit(door, tmp_path, {"train": make}, **options)
    assert model.batches == plain.batches
    assert looking.slots["train"] == [24]
    assert type(looking.loaders["train"]) is type(make())


@pytest.mark.parametrize("kind", ["DataLoader", "ThreadDataLoader"])
def test_lightning_makes_them_anew_to_predict(tmp_path, kind):
    """The loader of MONAI's that Lightning makes anew for predict reads the cache too."""
    seen = []
    for door in ("none", "callback"):
        trainer, model, dm, looking = through(door, tmp_path, {"predict": lambda: made(getattr(monai, kind))})
        torch.manual_seed(0)
        trainer.predict(model, datamodule=dm)
        seen.append(model.batches)
    assert seen[0] == seen[1]
    assert looking.slots["predict"] == [24]


class Wrapper:
    """A user's own, around a loader."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.dataset = loader, loader.dataset

    def __iter__(self) -> Any:
        return iter(self.loader)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Wrapper(made(DataLoader)),
            "Wrapper passes through uncached: it is no torch.utils.data.DataLoader. Wrap",
        ),
        (lambda: webdataset.WebLoader(NUMBERS, batch_size=4), "WebLoader passes through uncached: it is no torch"),
        (
            lambda: made(monai.ThreadDataLoader, num_workers=1, use_thread_workers=True),
            "TensorDataset passes through uncached: the workers of ThreadDataLoader are threads",
        ),
    ],
    ids=["wrapper", "WebLoader", "threads"],
)
def test_what_is_left_alone_is_warned_about(tmp_path, caplog, make, words):
    """The object that the user gave is trained on, with one warning."""
    loader = make()
    _, _, looking = fit("callback", tmp_path, {"train": lambda: loader}, epochs=2)
    assert looking.loaders["train"] is loader
    [warning] = [text for text in caplog.messages if "passes through uncached" in text]
    assert words in warning
