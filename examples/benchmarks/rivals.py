"""The ways to a cached dataset that are compared: ours and others', each as its own documentation shows it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
from sources import Pool
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import CachedDataset, CachedLoader

__all__ = ["DATASETS", "OTHERS", "OURS", "import_peer", "make_loader"]

OURS = ("CachedLoader", "CachedDataset")
OTHERS = {"stocaching": "stocaching", "MONAI": "monai", "DataLoader": "torch"}  # by the module that they need


class Stocached(Dataset[Any]):
    """The dataset of stocaching's README, with a label and a transform."""

    def __init__(self, source: Pool, transform: Callable[[Any], Any] | None = None) -> None:
        from stocaching import SharedCache

        self.source, self.transform = source, transform
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it allocates
            gib = len(source) * source[0][0].nbytes // 2**30 + 1
            self.cache = SharedCache(gib, len(source), source.shape, torch.uint8)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        image, label = self.cache.get_slot(index), index % 10
        if image is None:
            image, label = self.source[index]
            self.cache.set_slot(index, image)
        return (image, label) if self.transform is None else self.transform((image, label))


class Plain(Dataset[Any]):
    """The source itself with a transform."""

    def __init__(self, source: Pool, transform: Callable[[Any], Any] | None = None) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index] if self.transform is None else self.transform(self.source[index])


def monai_dataset(source: Pool, transform: Callable[[Any], Any] | None = None) -> Dataset[Any]:
    from monai.data import CacheDataset
    from monai.transforms import Compose, Transform

    class Load(Transform):
        def __call__(self, index: int) -> Any:
            return source[index]

    # Only what is a Transform is cached: the user's function comes after the cache, as everywhere else.
    steps = Compose([Load(), *([] if transform is None else [transform])], map_items=False)
    return CacheDataset(range(len(source)), steps, progress=False)


DATASETS: dict[str, Callable[..., Dataset[Any]]] = {
    "CachedLoader": lambda source, transform=None: CachedDataset(source, transform=transform),
    "CachedDataset": lambda source, transform=None: CachedDataset(source, transform=transform),
    "stocaching": Stocached,
    "MONAI": monai_dataset,
    "DataLoader": Plain,
}


def make_loader(peer: str, dataset: Dataset[Any], batch_size: int, workers: int) -> DataLoader[Any]:
    kind = CachedLoader if peer == "CachedLoader" else DataLoader
    return kind(dataset, batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def import_peer(peer: str) -> None:
    """Before any clock runs."""
    __import__("monai.data" if peer == "MONAI" else OTHERS.get(peer, "torch"))
