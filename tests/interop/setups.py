"""Random transforms of six libraries, and datasets that call them: set-ups in which a cache could freeze a draw.

A set-up is drawn from a seed: a transform with a probability between 0.05 and 1, what comes before and after it, and
how the dataset holds it. The same seed makes the same set-up, with its generators in the same state.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from PIL import Image
from torch.utils.data import Dataset

from tests.interop.sources.files import pictures

__all__ = ["LIBRARIES", "Augmented", "make_setup"]

SAMPLES = 12


class Augmented(Dataset[Any]):
    """Images of one size and a function that augments them, held as a transform or under another name."""

    def __init__(self, augment: Callable[..., Any], convert: Callable[[Any], Any], *, as_transform: bool) -> None:
        self.convert, self.name = convert, "transform" if as_transform else "augment"
        setattr(self, self.name, augment)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return getattr(self, self.name)(self.convert(pictures()[index])), index


class AugmentedByKeyword(Augmented):
    """Images whose augmentation is called by keyword and gives a dict."""

    def __getitem__(self, index: int) -> Any:
        return getattr(self, self.name)(image=self.convert(pictures()[index]))["image"], index


def _as_tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _as_floats(pixels: np.ndarray) -> torch.Tensor:
    return _as_tensor(pixels).float() / 255


def _one_or_two(steps: list[Any], dice: random.Random) -> list[Any]:
    return dice.sample(steps, dice.randint(1, 2))


def _with_probability(module: Any, names: str, p: float) -> list[Any]:
    """The transforms of these names, of a library that calls their probability `p`."""
    return [getattr(module, name)(p=p) for name in names.split()]


def _torchvision(module: Any, p: float, dice: random.Random) -> tuple[Any, Any]:
    steps = [
        *_with_probability(module, "RandomHorizontalFlip RandomVerticalFlip RandomGrayscale RandomInvert", p),
        module.RandomPosterize(4, p),
        module.RandomSolarize(128, p),
        module.RandomAdjustSharpness(2, p),
        *_with_probability(module, "RandomAutocontrast RandomEqualize RandomPerspective RandomErasing", p),
        module.RandomApply([module.ColorJitter(0.5)], p),
        module.RandomRotation(20),
        module.RandomCrop(16, padding=2),
    ]
    return module.Compose(_one_or_two(steps, dice)), _as_tensor


def torchvision_v1(p: float, dice: random.Random) -> tuple[Any, Any]:
    return _torchvision(pytest.importorskip("torchvision.transforms"), p, dice)


def torchvision_v2(p: float, dice: random.Random) -> tuple[Any, Any]:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    if dice.random() < 0.3:
        return dice.choice([v2.RandomPhotometricDistort(p=p), v2.RandomChannelPermutation()]), _as_tensor
    return _torchvision(v2, p, dice)


def albumentations(p: float, dice: random.Random) -> tuple[Any, Any]:
    A = pytest.importorskip("tests.interop.sources.albumentations").A
    names = "HorizontalFlip VerticalFlip RandomBrightnessContrast RandomRotate90 GaussNoise Blur CoarseDropout"
    steps = _with_probability(A, f"{names} HueSaturationValue ToGray ChannelShuffle RandomGamma", p)
    return A.Compose([*_one_or_two(steps, dice), A.Normalize()], seed=dice.randrange(1000)), np.copy


def monai(p: float, dice: random.Random) -> tuple[Any, Any]:
    T = pytest.importorskip("monai.transforms")
    steps = [
        T.RandFlip(p, spatial_axis=0),
        T.RandShiftIntensity(0.2, prob=p),
        T.RandScaleIntensity(0.2, prob=p),
        T.RandGaussianNoise(prob=p),
        T.RandRotate90(p),
        T.RandZoom(p),
        T.RandAdjustContrast(prob=p),
        T.RandGaussianSmooth(prob=p),
    ]
    chosen = [*_one_or_two(steps, dice), T.EnsureType(track_meta=False)]
    return T.Compose(chosen).set_random_state(dice.randrange(1000)), _as_floats


def timm(p: float, dice: random.Random) -> tuple[Any, Any]:
    timm_data = pytest.importorskip("timm.data")
    chosen = dice.choice(
        [
            {"hflip": p, "color_jitter": None},
            {"vflip": p, "hflip": 0.0, "color_jitter": 0.4, "color_jitter_prob": p},
            {"auto_augment": "rand-m9-mstd0.5-inc1", "hflip": p},
            {"re_prob": p, "hflip": 0.0, "color_jitter": None},
            {"grayscale_prob": p, "gaussian_blur_prob": p},
        ]
    )
    return timm_data.create_transform(16, is_training=True, no_aug=False, **chosen), Image.fromarray


def kornia(p: float, dice: random.Random) -> tuple[Any, Any]:
    K = pytest.importorskip("kornia.augmentation")
    steps = [
        K.ColorJiggle(0.2, 0.2, p=p),
        K.RandomRotation(20.0, p=p),
        *_with_probability(K, "RandomHorizontalFlip RandomVerticalFlip RandomGaussianNoise RandomErasing", p),
        *_with_probability(K, "RandomGrayscale RandomInvert", p),
    ]
    return torch.nn.Sequential(*_one_or_two(steps, dice)), _as_floats


LIBRARIES: dict[str, Callable[[float, random.Random], tuple[Any, Any]]] = {
    maker.__name__: maker for maker in (torchvision_v1, torchvision_v2, albumentations, monai, timm, kornia)
}


def make_setup(library: str, seed: int) -> Augmented:
    """The set-up of a seed; all generators start as its seed says."""
    dice = random.Random(seed)
    p = dice.choice([0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0])
    seed_everything(seed, verbose=False)
    augment, convert = LIBRARIES[library](p, dice)
    kind = AugmentedByKeyword if library == "albumentations" else Augmented
    setup = kind(augment, convert, as_transform=dice.random() < 0.7)
    seed_everything(seed, verbose=False)
    return setup
