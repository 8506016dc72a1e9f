"""The ways to a cached dataset that are compared: ours and others', each as its own documentation shows it."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sources import Pool
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import CachedDataset, CachedLoader

__all__ = ["OTHERS", "OURS", "import_peer", "make_dataset", "make_loader"]

OURS = ("CachedLoader", "CachedDataset")
OTHERS = {  # by the module that they need
    "stocaching": "stocaching",
    "shared tensor": "torch",
    "MONAI": "monai",
    "MONAI runtime": "monai",
    "memmap": "numpy",
    "list": "torch",
    "DataLoader": "torch",
}


class Stocached(Dataset[Any]):
    """The dataset of stocaching's README, with a label."""

    def __init__(self, source: Pool) -> None:
        from stocaching import SharedCache

        self.source = source
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
        return image, label


class SharedTensor(Dataset[Any]):
    """A tensor in shared memory that is filled as it is read: what stocaching does, in the fewest lines."""

    def __init__(self, source: Pool) -> None:
        self.source = source
        self.images = torch.empty((len(source), *source.shape), dtype=torch.uint8).share_memory_()
        self.labels = torch.full((len(source),), -1).share_memory_()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        label = int(self.labels[index])
        if label < 0:
            self.images[index], label = self.source[index]
            self.labels[index] = label
        return self.images[index], label


class Memmap(Dataset[Any]):
    """The samples in a file, written beforehand and mapped."""

    def __init__(self, source: Pool) -> None:
        file, path = tempfile.mkstemp(suffix=".npy")
        os.close(file)
        weakref.finalize(self, os.unlink, path)
        shape, labels = (len(source), *source.shape), []
        written = np.memmap(path, np.uint8, "w+", shape=shape)
        for index in range(len(source)):
            image, label = source[index]
            written[index] = image.numpy()
            labels.append(label)
        written.flush()
        # Not the memmap itself, whose every row costs a microsecond more; "c": torch wants memory that can be written.
        self.images, self.labels = np.asarray(np.memmap(path, np.uint8, "c", shape=shape)), labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.images[index]), self.labels[index]


def monai_dataset(source: Pool, runtime_cache: str | bool = False) -> Dataset[Any]:
    from monai.data import CacheDataset
    from monai.transforms import Compose, Transform

    class Load(Transform):
        def __call__(self, index: int) -> Any:
            return source[index]

    steps = Compose([Load()], map_items=False)
    return CacheDataset(range(len(source)), steps, progress=False, runtime_cache=runtime_cache)


class Then(Dataset[Any]):
    """A cached dataset with a transform after it."""

    def __init__(self, dataset: Any, transform: Callable[[Any], Any]) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.dataset[index])


def make_dataset(
    peer: str, source: Pool, workers: int, transform: Callable[[Any], Any] | None = None
) -> Dataset[Any] | list[Any]:
    """What a peer's loader reads; made with all that it loads or writes beforehand."""
    if peer in OURS:
        return CachedDataset(source, transform=transform)
    made: dict[str, Callable[[], Any]] = {
        "stocaching": lambda: Stocached(source),
        "shared tensor": lambda: SharedTensor(source),
        "MONAI": lambda: monai_dataset(source),
        "MONAI runtime": lambda: monai_dataset(source, "processes" if workers else "threads"),
        "memmap": lambda: Memmap(source),
        "list": lambda: [source[index] for index in range(len(source))],
        "DataLoader": lambda: source,
    }
    dataset = made[peer]()
    return dataset if transform is None else Then(dataset, transform)


def make_loader(peer: str, dataset: Any, batch_size: int, workers: int) -> DataLoader[Any]:
    kind = CachedLoader if peer == "CachedLoader" else DataLoader
    return kind(dataset, batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def import_peer(peer: str) -> None:
    """Before any clock runs."""
    if peer == "MONAI runtime":  # it keeps a descriptor open for each sample, of which a process may have too few
        torch.multiprocessing.set_sharing_strategy("file_system")
    __import__("monai.data" if OTHERS.get(peer) == "monai" else OTHERS.get(peer, "torch"))
