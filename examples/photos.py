"""The example's data: a few thousand JPEG files, made once from two drawn pictures, or your own folder.

Layout, as torchvision's ImageFolder has it: `<root>/train/<class>/<name>.jpg`, `<root>/val/<class>/<name>.jpg`.
Without a root, `make` draws two pictures of noise (clouds, and streaks), and cuts the files out of them, into a folder
of the user's cache; the class is the picture that a crop came from. Crops differ in place, scale, orientation, light
and colour; those of train and val come from different parts of each picture. They compress as photographs do. Each
file depends on its own name only and appears whole or not at all, so an interrupted run continues where it stopped.
"""

import os
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import find_classes
from torchvision.io import ImageReadMode, decode_image, encode_jpeg, read_file
from torchvision.transforms.v2 import functional as F
from tqdm import tqdm

from lightning_stocache import StocacheDataModule

CLASSES = ("clouds", "streaks")
SIDE = 320
HEIGHT, WIDTH = 427, 640  # of a picture
TRAIN_SHARE = 2 / 3  # of each picture's width, from the left; val has the rest


def datamodule(root: str | None = None, **knobs: Any) -> StocacheDataModule:
    """A StocacheDataModule; `root` is here so that one override, `data.root`, reaches all parts of its config."""
    return StocacheDataModule.from_options(**knobs)


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
    """Bytes to floats around zero, on the device: floats are four times as large in the cache and on the way there."""
    images, labels = batch
    return images.float().div_(127.5).sub_(1), labels


def count_classes(root: str | None = None) -> int:
    return len(CLASSES) if root is None else len(find_classes(str(folder_of(root) / "train"))[0])


def folder_of(root: str | None) -> Path:
    """The absolute path of `root`; None: a folder in the user's cache."""
    if root is not None:
        folder = Path(root).expanduser().absolute()
        if not (folder / "train").is_dir() or not (folder / "val").is_dir():
            raise FileNotFoundError(f"root must hold train/<class>/<image> and val/<class>/<image>; {folder} does not")
        return folder
    return cache_folder() / "pictures"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_stocache"


def make(root: str | None = None, train_files: int = 4000, val_files: int = 800) -> None:
    """Make the files that are missing. With a `root`, which has your own files, make none."""
    if root is not None:
        folder_of(root)
        return
    for split, files in (("train", train_files), ("val", val_files)):
        names = [f"{split}/{CLASSES[at % 2]}/{at // 2 + 1:05d}.jpg" for at in range(files)]
        missing = [name for name in names if not (folder_of(None) / name).exists()]
        for name in tqdm(missing, desc="Making JPEG files, once", unit="file", disable=not missing):
            crop = _crop(picture(name.split("/")[1]), train=split == "train", random=Random(name))
            write(folder_of(None) / name, crop)


@cache
def picture(name: str) -> Tensor:
    """Draw the picture of a class: noise of many scales, uint8 `[3, 427, 640]`; that of streaks is finer across."""
    chance, across = torch.Generator().manual_seed(CLASSES.index(name)), 4 if name == "streaks" else 1
    total = torch.zeros(3, HEIGHT, WIDTH)
    for octave in range(1, 9):
        noise = torch.rand(1, 3, 2**octave, across * 2**octave, generator=chance)
        total += 0.8**octave * interpolate(noise, (HEIGHT, WIDTH), mode="bicubic")[0]
    total = (total - total.mean()) / (total.max() - total.min())
    return (255 * (1.7 * total + 0.5)).clamp(0, 255).to(torch.uint8)


def write(path: Path, image: Tensor, quality: int = 90) -> None:
    """Write a JPEG file beside its place and move it there, so that nobody finds half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.part")
    draft.write_bytes(encode_jpeg(image, quality=quality).numpy().tobytes())
    os.replace(draft, path)


def _crop(whole: Tensor, train: bool, random: Random) -> Tensor:
    border = round(WIDTH * TRAIN_SHARE)
    left, right = (0, border) if train else (border, WIDTH)
    side = random.randint(64, 192)
    crop = F.crop(whole, random.randint(0, HEIGHT - side), random.randint(left, right - side), side, side)
    crop = torch.rot90(crop, random.randrange(4), (-2, -1))
    if random.random() < 0.5:
        crop = F.horizontal_flip(crop)
    crop = F.adjust_brightness(crop, random.uniform(0.5, 1.5))
    crop = F.adjust_contrast(crop, random.uniform(0.5, 1.5))
    crop = F.adjust_saturation(crop, random.uniform(0.0, 1.0))
    crop = F.adjust_hue(crop, random.uniform(-0.5, 0.5))
    return F.resize(crop, [SIDE, SIDE], antialias=True)
