"""The datasets that the benchmarks load, and the ways to cache them that `peers.py` and `records.py` compare."""

import contextlib
import io
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_stocache import CachedDataset, CachedLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where the examples lie, whose data and models are used

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


def jpegs(samples: int) -> Dataset[Any]:
    """320x320 JPEG files of the example, resized to 96x96: samples of both classes. Makes the files, once."""
    from photos import images, make  # here: it imports Lightning, for which the other sources need not wait

    make(train_files=samples, val_files=2)
    files = images("train")
    return Subset(files, torch.linspace(0, len(files) - 1, samples).long().tolist())


class Pool(Dataset[Any]):
    """Images of noise and their index, copied out of a few images: hardly any work, any length, any shape.

    Args:
        samples: length of the dataset.
        shape: of the uint8 images.
        different: number of images that differ; image `index` is `images[index % different]`.
        labelled: return `(image, index)` instead of the image alone.
    """

    def __init__(self, samples: int, shape: Sequence[int], different: int = 64, labelled: bool = True) -> None:
        self.samples, self.shape, self.labelled = samples, tuple(shape), labelled
        chance = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (different, *shape), dtype=torch.uint8, generator=chance)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        image = self.images[index % len(self.images)].clone()
        return (image, index) if self.labelled else image


class _Around(Dataset[Any]):
    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)


class Late(_Around):
    """A source that waits before each read, as a network drive does; the CPU is free meanwhile."""

    def __init__(self, source: Any, milliseconds: float) -> None:
        super().__init__(source)
        self.milliseconds = milliseconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.milliseconds / 1000)
        return self.source[index]


class Then(_Around):
    """A dataset with a transform of samples after it."""

    def __init__(self, source: Any, transform: Callable[[Any], Any]) -> None:
        super().__init__(source)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.source[index])


class Stocached(_Around):
    """The dataset of stocaching's README, with a label."""

    def __init__(self, source: Pool) -> None:
        from stocaching import SharedCache

        super().__init__(source)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it allocates
            gib = len(source) * source[0][0].nbytes // 2**30 + 1
            self.cache = SharedCache(gib, len(source), source.shape, torch.uint8)

    def __getitem__(self, index: int) -> Any:
        image = self.cache.get_slot(index)
        if image is None:
            image, _ = self.source[index]
            self.cache.set_slot(index, image)
        return image, index


class SharedTensor(_Around):
    """A tensor in shared memory that is filled as it is read: what stocaching does, in the fewest lines."""

    def __init__(self, source: Pool) -> None:
        super().__init__(source)
        self.images = torch.empty((len(source), *source.shape), dtype=torch.uint8).share_memory_()
        self.labels = torch.full((len(source),), -1).share_memory_()

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


def monai_dataset(
    source: Any, random: Callable[[Any], Any] | None = None, runtime_cache: str | bool = False
) -> Dataset[Any]:
    """MONAI's CacheDataset, with a random transform after it if there is one."""
    from monai.data.dataset import CacheDataset
    from monai.transforms.compose import Compose
    from monai.transforms.transform import Randomizable, Transform

    class Load(Transform):
        def __call__(self, index: int) -> Any:
            return source[index]

    class Random(Randomizable, Transform):
        def __call__(self, sample: Any) -> Any:
            return random(sample)

    steps = Compose([Load(), Random()] if random else [Load()], map_items=False)
    return CacheDataset(range(len(source)), steps, progress=False, runtime_cache=runtime_cache)


def make_dataset(
    peer: str, source: Pool, workers: int, transform: Callable[[Any], Any] | None = None
) -> Dataset[Any] | list[Any]:
    """The dataset of a peer, with everything that it loads or writes before it can be read."""
    if peer in OURS:
        return CachedDataset(source, transform=transform)
    made: dict[str, Callable[[], Any]] = {
        "stocaching": lambda: Stocached(source),
        "shared tensor": lambda: SharedTensor(source),
        "MONAI": lambda: monai_dataset(source),
        "MONAI runtime": lambda: monai_dataset(source, runtime_cache="processes" if workers else "threads"),
        "memmap": lambda: Memmap(source),
        "list": lambda: [source[index] for index in range(len(source))],
        "DataLoader": lambda: source,
    }
    dataset = made[peer]()
    return dataset if transform is None else Then(dataset, transform)


def make_loader(peer: str, dataset: Any, batch_size: int, workers: int, **settings: Any) -> DataLoader[Any]:
    kind: Any = CachedLoader if peer == "CachedLoader" else DataLoader
    settings |= {"num_workers": workers, "persistent_workers": workers > 0}
    return kind(dataset, batch_size, shuffle=True, **settings)


def import_peer(peer: str) -> None:
    """Import a peer's library, before any clock runs."""
    if peer == "MONAI runtime":  # it keeps a descriptor open for each sample, of which a process may have too few
        torch.multiprocessing.set_sharing_strategy("file_system")
    __import__("monai.data" if OTHERS.get(peer) == "monai" else OTHERS.get(peer, "torch"))
