"""Loaders of other people's classes: cached where Lightning could make them anew, else left alone with a warning."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.training.loaders import with_dataset
from tests.training.tiny import fit, through

pytestmark = pytest.mark.processes

SAMPLES = 24


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Before the first test: what their imports leave behind is no test's."""
    global monai_data, timm_loader, torch_geometric, webdataset
    monai_data, timm_loader, torch_geometric, webdataset = (
        pytest.importorskip(name) for name in ("monai.data", "timm.data.loader", "torch_geometric", "webdataset")
    )


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2))


def monai(name: str, **options: Any) -> Callable[[], DataLoader[Any]]:
    kind = getattr(monai_data, name)
    return lambda: kind(numbers(), batch_size=4, shuffle=True, **options)


def multi_epochs(**options: Any) -> Callable[[], DataLoader[Any]]:
    kind = timm_loader.MultiEpochsDataLoader
    return lambda: kind(numbers(), batch_size=4, shuffle=True, **options)


CACHED = {
    "MONAI": lambda: monai("DataLoader"),
    "MONAI, workers": lambda: monai("DataLoader", num_workers=2),
    "MONAI, thread": lambda: monai("ThreadDataLoader", buffer_size=2),
    "timm, MultiEpochs": lambda: multi_epochs(num_workers=1),
}


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize(("door", "reload"), [("callback", 0), ("cache_datamodule", 1)])
def test_subclasses_are_cached_and_equal(tmp_path, name, door, reload):
    """Three epochs give the batches of without, bit for bit, and all samples have slots."""
    make = CACHED[name]()
    options = {"epochs": 3, "reload_dataloaders_every_n_epochs": reload}
    plain, *_ = fit("none", tmp_path, {"train": make}, **options)
    model, _, looking = fit(door, tmp_path, {"train": make}, **options)
    assert model.batches == plain.batches
    assert looking.slots["train"] == [SAMPLES]
    assert type(looking.loaders["train"]) is type(make())


@pytest.mark.parametrize("name", ["MONAI", "MONAI, thread"])
def test_lightning_makes_them_anew_to_predict(tmp_path, name):
    """The loader that Lightning makes anew for predict reads the cache too."""
    make = CACHED[name]()
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

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return iter(self.loader)


def wrapper() -> Any:
    images = TensorDataset(torch.zeros(8, 3, 4, 4, dtype=torch.uint8), torch.zeros(8))
    return Wrapper(DataLoader(images, 2))


def web() -> Any:
    return webdataset.WebLoader(numbers(), batch_size=4)


def threads() -> Any:
    return monai("ThreadDataLoader", num_workers=1, use_thread_workers=True)()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (wrapper, "Wrapper passes through uncached: it is no torch.utils.data.DataLoader. Wrap its TensorDataset"),
        (web, "WebLoader passes through uncached: it is no torch.utils.data.DataLoader"),
        (threads, "TensorDataset passes through uncached: the workers of ThreadDataLoader are threads"),
    ],
)
def test_what_is_left_alone_is_warned_about(tmp_path, caplog, make, words):
    """The object that the user gave is trained on, with one warning."""
    loader = make()
    _, _, looking = fit("callback", tmp_path, {"train": lambda: loader}, epochs=2)
    assert looking.loaders["train"] is loader
    [warning] = [text for text in caplog.messages if "passes through uncached" in text]
    assert re.search(words, warning)


def test_pygs_loader_keeps_its_way_to_collate():
    """torch_geometric's DataLoader takes `collate_fn` away from its arguments; a copy has it, with its options."""
    edges = torch.tensor([[0, 1], [1, 2]])
    graphs = [torch_geometric.data.Data(x=torch.full((3, 2), float(node)), edge_index=edges) for node in range(12)]
    loader = torch_geometric.loader.DataLoader(graphs, batch_size=4, shuffle=True, follow_batch=["x"])
    copy = with_dataset(loader, CachedDataset(graphs, defer=True))
    seen = []
    for one in (loader, copy):
        torch.manual_seed(0)
        seen.append([batch.to_dict() for batch in one])
    assert len(seen[0]) == 3
    for expected, got in zip(*seen, strict=True):
        assert expected.keys() == got.keys() >= {"x", "edge_index", "x_batch", "ptr"}
        assert all(torch.equal(expected[name], got[name]) for name in ("x", "edge_index", "x_batch", "ptr"))
