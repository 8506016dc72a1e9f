"""Loaders of other people's classes: cached where Lightning could make them anew, else left alone with a warning."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.training.tiny import fit, through

pytestmark = pytest.mark.processes

SAMPLES = 24


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Before the first test: what their imports leave behind is no test's."""
    global monai_data, timm_loader, webdataset
    names = ("monai.data", "timm.data.loader", "webdataset")
    monai_data, timm_loader, webdataset = (pytest.importorskip(name) for name in names)


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2))


def monai(**options: Any) -> DataLoader[Any]:
    return monai_data.DataLoader(numbers(), batch_size=4, shuffle=True, **options)


def monai_thread(**options: Any) -> DataLoader[Any]:
    return monai_data.ThreadDataLoader(numbers(), batch_size=4, shuffle=True, **options)


def multi_epochs() -> DataLoader[Any]:
    return timm_loader.MultiEpochsDataLoader(numbers(), batch_size=4, shuffle=True, num_workers=1)


@pytest.mark.parametrize(
    ("make", "door", "reload"),
    [
        (lambda: monai(num_workers=2), "cache_datamodule", 1),
        (lambda: monai_thread(buffer_size=2), "callback", 0),
        (multi_epochs, "cache_datamodule", 1),
    ],
    ids=["MONAI, anew each epoch", "MONAI, thread", "timm, MultiEpochs"],
)
def test_subclasses_are_cached_and_equal(tmp_path, make, door, reload):
    """Three epochs give the batches of without, bit for bit, and all samples have slots."""
    options = {"epochs": 3, "reload_dataloaders_every_n_epochs": reload}
    plain, *_ = fit("none", tmp_path, {"train": make}, **options)
    model, _, looking = fit(door, tmp_path, {"train": make}, **options)
    assert model.batches == plain.batches
    assert looking.slots["train"] == [SAMPLES]
    assert type(looking.loaders["train"]) is type(make())


@pytest.mark.parametrize("make", [monai, monai_thread])
def test_lightning_makes_them_anew_to_predict(tmp_path, make):
    """The loader that Lightning makes anew for predict reads the cache too."""
    seen = []
    for door in ("none", "callback"):
        trainer, model, dm, looking = through(door, tmp_path, {"predict": make})
        torch.manual_seed(0)
        trainer.predict(model, datamodule=dm)
        seen.append(model.batches)
    assert seen[0] == seen[1]
    assert looking.slots["predict"] == [SAMPLES]


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
            lambda: Wrapper(DataLoader(numbers(), 2)),
            "Wrapper passes through uncached: it is no torch.utils.data.DataLoader. Wrap its TensorDataset",
        ),
        (
            lambda: webdataset.WebLoader(numbers(), batch_size=4),
            "WebLoader passes through uncached: it is no torch.utils.data.DataLoader",
        ),
        (
            lambda: monai_thread(num_workers=1, use_thread_workers=True),
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
