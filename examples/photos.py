"""The example's data: a few thousand real JPEG files, made once from crops of two photographs, or your own folder.

Layout, as torchvision's ImageFolder has it: `<root>/train/<class>/<name>.jpg`, `<root>/val/<class>/<name>.jpg`.
Without a root, `make` cuts the files out of the two photographs that scikit-learn ships (a Chinese temple, a flower),
into a folder of the user's cache; the class is the photograph that a crop came from. Crops differ in place, scale,
orientation, light and colour; those of train and val come from different parts of each photograph. Each file depends
only on its own name and appears whole or not at all, so an interrupted run goes on where it stopped.
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import find_classes
from torchvision.io import ImageReadMode, decode_image, encode_jpeg, read_file
from torchvision.transforms.v2 import functional as F
from tqdm import tqdm

from lightning_stocache import StocacheDataModule

CLASSES = ("china", "flower")
SIDE = 320
TRAIN_SHARE = 2 / 3  # of each photograph's width, from the left; val has the rest


def datamodule(root: str | None = None, **knobs: Any) -> StocacheDataModule:
    """A StocacheDataModule; `root` is here so that one override, `data.root`, reaches all parts of its config."""
    return StocacheDataModule(**knobs)


def images(split: str, root: str | None = None, size: int = 96) -> ImageFolder:
    """One split as `(uint8 tensor [3, size, size], class)`: the deterministic and expensive part, worth caching."""
    folder = folder_of(root)
    dataset = ImageFolder(str(folder / split), loader=partial(load, size=size))
    if dataset.classes != (expected := find_classes(str(folder / "train"))[0]):
        raise ValueError(f"{folder / split} has the classes {dataset.classes}, {folder / 'train'} has {expected}")
    return dataset


def load(path: str, size: int) -> Tensor:
    """Read, decode and resize one file; grey and CMYK files become RGB."""
    try:
        image = decode_image(read_file(path), mode=ImageReadMode.RGB)
    except RuntimeError as error:  # it does not say which file
        raise RuntimeError(f"cannot read {path}: {error}") from error
    return F.resize(F.to_dtype(image, torch.uint8, scale=True), [size, size], antialias=True)


def normalise(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Bytes to floats around zero, on the device: four times as much would have to be cached and sent after it."""
    images, labels = batch
    return images.float().div(127.5).sub(1), labels


def count_classes(root: str | None = None) -> int:
    return len(CLASSES) if root is None else len(find_classes(str(folder_of(root) / "train"))[0])


def folder_of(root: str | None) -> Path:
    """The folder that `root` means, from whatever directory it is asked; None: one in the user's cache."""
    if root is not None:
        folder = Path(root).expanduser().absolute()
        if not (folder / "train").is_dir() or not (folder / "val").is_dir():
            raise FileNotFoundError(f"root must hold train/<class>/<image> and val/<class>/<image>; {folder} does not")
        return folder
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "lightning_stocache" / "photos"


def make(root: str | None = None, train_files: int = 4000, val_files: int = 800) -> None:
    """Make the files that are missing; nothing where `root` says that you bring your own."""
    if root is not None:
        folder_of(root)
        return
    missing = [(name, path) for name, path in _plan(folder_of(None), train_files, val_files) if not path.exists()]
    if not missing:
        return
    from sklearn.datasets import load_sample_images  # only whoever makes the files needs it

    sample = load_sample_images()
    photos = {
        Path(name).stem: torch.from_numpy(image.copy()).movedim(-1, 0)  # its own array is not writable
        for name, image in zip(sample.filenames, sample.images, strict=True)
    }
    for name, path in tqdm(missing, desc="Making JPEG files, once", unit="file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        crop = _crop(photos[path.parent.name], train=name.startswith("train/"), random=Random(name))
        # Written beside its place and moved there: whoever looks finds a whole file or none.
        draft = path.with_suffix(f".{os.getpid()}.part")
        draft.write_bytes(encode_jpeg(crop, quality=90).numpy().tobytes())
        os.replace(draft, path)


def _plan(folder: Path, train_files: int, val_files: int) -> Iterator[tuple[str, Path]]:
    for split, files in (("train", train_files), ("val", val_files)):
        for number in range(files):
            name = f"{split}/{CLASSES[number % len(CLASSES)]}/{number // len(CLASSES) + 1:05d}.jpg"
            yield name, folder / name


def _crop(photo: Tensor, train: bool, random: Random) -> Tensor:
    height, width = photo.shape[-2:]
    border = round(width * TRAIN_SHARE)
    left, right = (0, border) if train else (border, width)
    side = random.randint(64, 192)
    crop = F.crop(photo, random.randint(0, height - side), random.randint(left, right - side), side, side)
    crop = torch.rot90(crop, random.randrange(4), (-2, -1))
    if random.random() < 0.5:
        crop = F.horizontal_flip(crop)
    crop = F.adjust_brightness(crop, random.uniform(0.5, 1.5))
    crop = F.adjust_contrast(crop, random.uniform(0.5, 1.5))
    crop = F.adjust_saturation(crop, random.uniform(0.0, 1.0))
    crop = F.adjust_hue(crop, random.uniform(-0.5, 0.5))
    return F.resize(crop, [SIDE, SIDE], antialias=True)
