"""A dataset that opens its file on first use, so that each process has a handle of its own, keeps it so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_stocache import CachedDataset, CachedLoader, StochasticCache
from tests.interop.sources import storage

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SAMPLES = 3000


class _Reading(LightningModule):
    """Counts the images that are not those of their index."""

    def __init__(self, images: torch.Tensor) -> None:
        super().__init__()
        self.images, self.wrong, self.seen = images, 0, 0
        self.number = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, indices = batch
        self.wrong += int((images != self.images[indices]).flatten(1).any(1).sum())
        self.seen += len(indices)
        return self.number**2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(loader: DataLoader[Any], callbacks: list[Callback], images: torch.Tensor) -> _Reading:
    model = _Reading(images)
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    Trainer(max_epochs=2, callbacks=callbacks, **options, **quiet).fit(model, loader)
    return model


def by_callback(dataset: Any, images: torch.Tensor, **options: Any) -> _Reading:
    return trained(DataLoader(dataset, 50, shuffle=True, **options), [StochasticCache()], images)


def by_cached_loader(dataset: Any, images: torch.Tensor, **options: Any) -> _Reading:
    cached = CachedDataset(dataset)
    try:
        return trained(CachedLoader(cached, batch_size=50, shuffle=True, **options), [], images)
    finally:
        cached.close()


def rows_of(path: Path, count: int) -> torch.Tensor:
    rows = storage.rows(count)
    rows.tofile(path)
    return torch.from_numpy(rows)


@pytest.mark.parametrize("train", [by_callback, by_cached_loader])
def test_forked_workers_do_not_share_a_file_offset(tmp_path: Path, train: Callable[..., _Reading]) -> None:
    """Four workers that seek and read on a handle opened on first use read no other sample's bytes."""
    images = rows_of(tmp_path / "rows.bin", SAMPLES)
    dataset = storage.PlainFile(tmp_path / "rows.bin", SAMPLES)
    model = train(dataset, images, num_workers=4, multiprocessing_context="fork")
    assert model.seen == 2 * SAMPLES
    assert model.wrong == 0
    assert dataset.file is None
