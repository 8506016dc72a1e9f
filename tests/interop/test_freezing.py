"""No random transform of any library is frozen by the cache, however rarely it changes a sample.

A set-up is drawn from a seed: a transform with a probability between 0.05 and 1, what comes before and after it, and
how the dataset holds it. The same seed makes the same set-up, with its generators in the same state.
"""

import random
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from PIL import Image

from lightning_stocache import CachedDataset
from lightning_stocache.setup import find
from tests.interop.fingerprint import fingerprint
from tests.interop.setting import held, pictures

pytestmark = pytest.mark.processes

# Of six libraries together a thousand. Set-up reads in a process of its own, as it does in the table's trainings, too.
THOUSAND = pytest.param(170, True, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])


def as_tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def as_floats(pixels: np.ndarray) -> torch.Tensor:
    return as_tensor(pixels).float() / 255


def one_or_two(steps: list[Any], dice: random.Random) -> list[Any]:
    return dice.sample(steps, dice.randint(1, 2))


def with_probability(module: Any, names: str, p: float) -> list[Any]:
    """The transforms of these names, of a library that calls their probability `p`."""
    return [getattr(module, name)(p=p) for name in names.split()]


def torchvision_v1(p: float, dice: random.Random, name: str = "torchvision.transforms") -> tuple[Any, Any]:
    module = pytest.importorskip(name)
    names = "RandomHorizontalFlip RandomVerticalFlip RandomGrayscale RandomInvert RandomAutocontrast RandomEqualize"
    steps = [
        *with_probability(module, f"{names} RandomPerspective RandomErasing", p),
        module.RandomPosterize(4, p),
        module.RandomSolarize(128, p),
        module.RandomAdjustSharpness(2, p),
        module.RandomApply([module.ColorJitter(0.5)], p),
        module.RandomRotation(20),
        module.RandomCrop(16, padding=2),
    ]
    return module.Compose(one_or_two(steps, dice)), as_tensor


def torchvision_v2(p: float, dice: random.Random) -> tuple[Any, Any]:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    if dice.random() < 0.3:
        return dice.choice([v2.RandomPhotometricDistort(p=p), v2.RandomChannelPermutation()]), as_tensor
    return torchvision_v1(p, dice, v2.__name__)


def albumentations(p: float, dice: random.Random) -> tuple[Any, Any]:
    A = pytest.importorskip("tests.interop.sources.albumentations").A
    names = "HorizontalFlip VerticalFlip RandomBrightnessContrast RandomRotate90 GaussNoise Blur CoarseDropout"
    steps = with_probability(A, f"{names} HueSaturationValue ToGray ChannelShuffle RandomGamma", p)
    return A.Compose([*one_or_two(steps, dice), A.Normalize()], seed=dice.randrange(1000)), np.copy


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
    chosen = [*one_or_two(steps, dice), T.EnsureType(track_meta=False)]
    return T.Compose(chosen).set_random_state(dice.randrange(1000)), as_floats


def timm(p: float, dice: random.Random) -> tuple[Any, Any]:
    chosen = dice.choice(
        [
            {"hflip": p, "color_jitter": None},
            {"vflip": p, "hflip": 0.0, "color_jitter": 0.4, "color_jitter_prob": p},
            {"auto_augment": "rand-m9-mstd0.5-inc1", "hflip": p},
            {"re_prob": p, "hflip": 0.0, "color_jitter": None},
            {"grayscale_prob": p, "gaussian_blur_prob": p},
        ]
    )
    create_transform = pytest.importorskip("timm.data").create_transform
    return create_transform(16, is_training=True, no_aug=False, **chosen), Image.fromarray


def kornia(p: float, dice: random.Random) -> tuple[Any, Any]:
    K = pytest.importorskip("kornia.augmentation")
    names = "RandomHorizontalFlip RandomVerticalFlip RandomGaussianNoise RandomErasing RandomGrayscale RandomInvert"
    steps = [K.ColorJiggle(0.2, 0.2, p=p), K.RandomRotation(20.0, p=p), *with_probability(K, names, p)]
    return torch.nn.Sequential(*one_or_two(steps, dice)), as_floats


def make_setup(maker: Callable[[float, random.Random], tuple[Any, Any]], seed: int) -> Any:
    """The set-up of a seed: images whose transform is an attribute of that name, or of another."""
    dice = random.Random(seed)
    p = dice.choice([0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0])
    seed_everything(seed, verbose=False)
    augment, convert = maker(p, dice)
    name = "transform" if dice.random() < 0.7 else "augment"

    def load(self: Any, index: int) -> Any:
        transform, image = getattr(self, name), convert(pictures()[index])
        return transform(image=image)["image"] if maker is albumentations else transform(image), index

    seed_everything(seed, verbose=False)
    return held(load, 12, **{name: augment})


def read_twice(dataset: Any) -> list[Any]:
    """All samples of two epochs."""
    return [fingerprint(dataset[index]) for _ in range(2) for index in range(len(dataset))]


@pytest.mark.parametrize(("count", "apart"), [(10, False), THOUSAND])
@pytest.mark.parametrize("maker", [torchvision_v1, torchvision_v2, albumentations, monai, timm, kornia])
def test_draws_are_those_of_the_source(maker, count, apart, monkeypatch):
    """Two epochs through the cache hold the draws of two epochs without, over many set-ups of a library."""
    if not apart:
        monkeypatch.setattr(find, "start_method", lambda chosen: None)
    for seed in range(count):
        expected = read_twice(make_setup(maker, seed))
        with closing(CachedDataset(make_setup(maker, seed))) as dataset:
            assert read_twice(dataset) == expected, seed
