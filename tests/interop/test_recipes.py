"""The recipes of docs/guides/frameworks.md for a loop of one's own and for timm. Others: tests/apps/recipes."""

import importlib
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_stocache import CachedLoader, cache_loader
from lightning_stocache.loading.loader_tree import cached_in_leaves
from tests.apps.recipes.guide import run
from tests.interop.setting import SAMPLES, Setting, fingerprint, images
from tests.loading.twins import looked, seed_all
from tests.sources import CountedSource

pytestmark = pytest.mark.slow  # timm takes seconds to import


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_of_ones_own(tmp_path, capsys, workers):
    """The second epoch comes from memory; batches are equal."""
    seen: list[Any] = []
    source = CountedSource(100, log_path=tmp_path / "loads")
    seed_all()
    expected = [batch for _ in range(3) for batch in DataLoader(CountedSource(100), 64, shuffle=True)]
    seed_all()
    names = run("A loop of your own", cached=True, photos=source, workers=workers, epochs=3, train=seen.append)
    assert fingerprint(seen) == fingerprint(expected)
    assert capsys.readouterr().out.split()[1:] == ["1.0", "1.0"]
    [dataset] = cached_in_leaves(names["loader"])
    counts = dataset.counters.totals()
    assert counts.misses + counts.setup_fills == 100
    assert source.loads <= 100 + 32 + looked(dataset)


def photos(setting: Setting) -> Any:
    """A dataset of timm's, whose reads are counted."""
    timm = pytest.importorskip("timm.data")
    return setting.counted(timm.ImageDataset(str(images(setting.folder))))


def timm_epochs(loader: Any) -> Any:
    """The batches of three epochs, and the state of torch's generator after them."""
    seed_all()
    return fingerprint([[batch for _ in range(3) for batch in loader], torch.get_rng_state()])


@pytest.mark.parametrize("workers", [1, 2])
def test_timm_with_its_prefetcher(tmp_path, workers):
    """The prefetcher stays one; batches are equal, and each image is loaded once."""
    setting, plain = (Setting(tmp_path, tmp_path / name, workers) for name in ("loads", "plain"))
    options = {"workers": workers, "device": torch.device("cpu")}
    expected = timm_epochs(run("timm", cached=False, photos=photos(plain), **options)["loader"])
    loader = run("timm", cached=True, photos=photos(setting), **options)["loader"]
    at_set_up = setting.loads.stat().st_size
    assert timm_epochs(loader) == expected
    assert type(loader).__name__ == "PrefetchLoader"
    assert isinstance(loader.loader, CachedLoader)
    [dataset] = cached_in_leaves(loader)
    assert setting.loads.stat().st_size - at_set_up - looked(dataset) <= SAMPLES


@pytest.mark.processes
def test_timm_with_persistent_epochs(tmp_path):
    """MultiEpochsDataLoader keeps its class, and is cached."""
    create = importlib.import_module("timm.data").create_loader
    options = {"input_size": 16, "batch_size": 4, "is_training": True, "num_workers": 1, "use_prefetcher": False}
    plain = create(photos(Setting(tmp_path, tmp_path / "plain", 1)), use_multi_epochs_loader=True, **options)
    setting = Setting(tmp_path, tmp_path / "loads", 1)
    loader = cache_loader(create(photos(setting), use_multi_epochs_loader=True, **options), "64MiB")
    at_set_up = setting.loads.stat().st_size
    assert type(loader) is type(plain)
    assert timm_epochs(loader) == timm_epochs(plain)
    [dataset] = cached_in_leaves(loader)
    assert dataset.counters.totals().hits
    assert setting.loads.stat().st_size - at_set_up - looked(dataset) <= SAMPLES
