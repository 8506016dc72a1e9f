"""What the ways of holding data are made of: loaders that count their loads, datasets of one line, and small files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from tests.sources import Made

__all__ = ["SAMPLES", "Setting", "Way", "held", "images", "made", "pictures"]

SAMPLES = 24


@dataclass
class Setting:
    """What a way makes its loader with.

    Args:
        folder: where it may write files; one folder for all ways and runs, so it may find them there.
        loads: a file that grows by a byte for every sample that is read from the source.
        workers: of the loader.
    """

    folder: Path
    loads: Path
    workers: int

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of every loader."""
        workers = {"num_workers": self.workers, "persistent_workers": self.workers > 0}
        return {"batch_size": 6, "shuffle": True} | workers

    def loader(self, dataset: Any, kind: Callable[..., Any] = DataLoader, **options: Any) -> Any:
        """The loader of a dataset whose loads are counted."""
        return kind(self.counted(dataset), **self.options | options)

    def counted(self, dataset: Any) -> Any:
        """The same object; every sample that it loads, in any process, is noted.

        The object gets a class of its own that only adds the note. Where Python does not let it, nothing is counted.
        """
        plain, path = type(dataset), self.loads

        def __getitem__(self: Any, index: Any) -> Any:
            with open(path, "ab", buffering=0) as log:
                log.write(bytes(len(index) if isinstance(index, list) else 1))
            return plain.__getitem__(self, index)

        names = {"__getitem__": __getitem__, "__module__": plain.__module__}
        try:
            dataset.__class__ = type(plain.__name__, (plain,), names)
        except TypeError:
            return dataset
        path.touch()
        return dataset


Way: TypeAlias = Callable[[Setting], Any]
"""A way of holding data: it makes the loader."""


def made(make: Callable[[int], Any], *, length: int = SAMPLES, **options: Any) -> Way:
    """A loader with these options of samples that a function makes of their index."""
    return lambda setting: setting.loader(Made(make, length), **options)


def held(load: Callable[[Any, int], Any], length: int = SAMPLES, **attributes: Any) -> Any:
    """A user's dataset: an object with these attributes, of a class whose `__getitem__` is `load`."""
    dataset = type("Held", (Dataset,), {"__getitem__": load, "__len__": lambda self: length})()
    vars(dataset).update(attributes)
    return dataset


def pictures(count: int = SAMPLES, height: int = 16, width: int = 16) -> np.ndarray:
    """Images of bytes, height x width x 3, that differ from each other."""
    return np.random.default_rng(3).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def images(folder: Path, *, of_one_size: bool = False) -> Path:
    """A folder of two classes with JPEG files, of many sizes or of one."""
    root = folder / ("one_size" if of_one_size else "many_sizes")
    if not root.exists():
        for number in range(SAMPLES):
            size = (16, 16) if of_one_size else (18 + number % 5, 20 + number % 3)
            path = root / f"class{number % 2}" / f"{number:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pictures(1 + number, size[1], size[0])[number]).save(path, quality=90)
    return root
