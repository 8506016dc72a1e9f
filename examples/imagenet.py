"""Photographs of many sizes: the usual recipe as it is, and the same with two lines changed.

    python examples/imagenet.py                                # three trainings, and a table
    python examples/imagenet.py --devices 2 --strategy ddp     # two ranks, one cache
    python examples/imagenet.py --only tensors --epochs 5      # one of them

recipe   RandomResizedCrop, flip, ToTensor and Normalize on images of PIL. What comes before the first random step is
         cached: the decoded photographs, each of its own size. The random steps take their time in every epoch.
tensors  PILToTensor first, v2 transforms on bytes, and normalising on the device, in the module's
         `on_after_batch_transfer`. The random steps are faster on tensors, and a quarter of the bytes travel.

The photographs are JPEG files around 500x375, cut once from drawn pictures, in a folder of the user's cache.
The table has the samples/s of the last epoch, with a network so small that nothing but data takes time.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import photos
from lightning_stocache import StochasticCache
from training import Loads, end, fit, parser

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TRANSFORMS = {
    "recipe": v1.Compose(
        [v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    ),
    "tensors": v2.Compose([v2.PILToTensor(), v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]),
}
TRAININGS = {"recipe, uncached": ("recipe", False), "recipe": ("recipe", True), "tensors": ("tensors", True)}


def normalised(images: Tensor) -> Tensor:
    """Apply the recipe's last two steps to bytes `[samples, 3, height, width]`, with one copy."""
    mean, std = (255 * torch.tensor(values, device=images.device)[:, None, None] for values in (MEAN, STD))
    return images.float().sub_(mean).div_(std)


class Network(LightningModule):
    """Means over squares of 32x32 pixels, and a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(3 * 7 * 7, classes))

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return normalised(images) if images.dtype == torch.uint8 else images, labels

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def make(samples: int) -> Path:
    """A folder of two classes with at least that many JPEG files; missing files are made."""
    folder = photos.cache_folder() / "sizes"
    paths = [folder / photos.CLASSES[number % 2] / f"{number:05}.jpg" for number in range(samples)]
    for path in paths:
        if not path.exists():
            chance = Random(path.stem)
            width, height = round(500 * chance.uniform(0.6, 1.4)), round(375 * chance.uniform(0.6, 1.4))
            left, top = chance.randint(0, 200), chance.randint(0, 150)
            picture = photos.picture(path.parent.name)
            photos.write(path, F.resized_crop(picture, top, left, 270, 400, [height, width], antialias=True), 92)
    return folder


def photographs_of(samples: int, transform: Any, loader: Callable[[str], Any] = default_loader) -> Subset[Any]:
    """That many photographs, evenly from the folder, which may have more: its classes lie one after the other."""
    folder = ImageFolder(str(make(samples)), transform, loader=loader)
    step = len(folder) / samples
    return Subset(folder, [int(number * step) for number in range(samples)])


def load(loads: Loads, path: str) -> Any:
    """A file as ImageFolder loads it, counted."""
    loads.note()
    return default_loader(path)


def main() -> None:
    options = parser(__doc__, samples=800, batch_size=64)
    options.add_argument("--only", nargs="+", choices=list(TRAININGS), default=list(TRAININGS), help="trainings to run")
    chosen, loads = options.parse_args(), Loads()
    rates: dict[str, float] = {}
    for name in chosen.only:
        transform, cached = TRAININGS[name]
        dataset = photographs_of(chosen.samples, TRANSFORMS[transform], partial(load, loads))
        settings = {"num_workers": chosen.workers, "persistent_workers": chosen.workers > 0}
        loader = DataLoader(dataset, chosen.batch_size, shuffle=True, **settings)
        callbacks: list[Callback] = [StochasticCache(budget=chosen.budget)] if cached else []
        print(name, flush=True)
        rates[name] = fit(Network(2), loader, chosen, loads, callbacks)[-1]
    end()
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print("\nsamples/s, last epoch")
        for name, rate in rates.items():
            print(f"{name:<18}{rate:>8,.0f}  {rate / rates[chosen.only[0]]:.1f}")


if __name__ == "__main__":
    main()
