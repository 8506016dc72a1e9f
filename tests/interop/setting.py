"""What the ways of holding data are made of: loaders that count their loads, datasets of one line, and small files."""

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from tests.sources import Made

SAMPLES = 24


@dataclasses.dataclass
class Setting:
    """A folder for all files, a file that grows by a byte for every sample read, and the loader's workers."""

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
        """The same object; every sample that it loads, in any process, is noted. The object gets a class of its own
        that only adds the note. Where Python does not let it, nothing is counted."""
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


def fingerprint(value: Any) -> Any:
    """A value that equals another's fingerprint exactly if every bit, type and attribute of the two is equal."""
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        plain = value.detach().as_subclass(torch.Tensor).contiguous()
        dense = plain.to_dense() if plain.layout != torch.strided else plain
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
        return kind, str(value.dtype), tuple(value.shape), data, fingerprint(vars(value))
    if isinstance(value, np.ndarray):
        content = value.tolist() if value.dtype.hasobject else value.tobytes()
        return kind, str(value.dtype), value.shape, content
    if isinstance(value, np.generic):
        return kind, str(value.dtype), value.tobytes()
    if value is None or isinstance(value, str | bytes | int | float | complex | Enum | slice | type | torch.dtype):
        return kind, repr(value)  # nan is not equal to itself, its text is
    if callable(getattr(value, "to_dict", None)):  # TensorDict, Data and Batch of PyG
        return kind, fingerprint(value.to_dict())
    if isinstance(value, Mapping):
        # MONAI notes the address of a transform as its id
        items = [(key, fingerprint(item)) for key, item in value.items() if not (key == "id" and "class" in value)]
        return kind, tuple(items)
    if isinstance(value, list | tuple):
        return kind, tuple(map(fingerprint, value))
    if hasattr(value, "tobytes"):  # an image of PIL
        return kind, value.mode, value.size, value.tobytes()
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return kind, fingerprint(vars(value))
    raise TypeError(f"no fingerprint of a {type(value)}")
