"""No random transform of any library is frozen by the cache, however rarely it changes a sample.

A set-up is drawn from a seed: a transform with a probability between 0.05 and 1, what comes before and after it, and
how the dataset holds it. The same seed makes the same set-up, with its generators in the same state.
"""

import random
import re
from contextlib import closing
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from PIL import Image

from lightning_stocache import CachedDataset
from lightning_stocache.setup import find
from tests.interop.setting import fingerprint, held, pictures

pytestmark = pytest.mark.slow  # the libraries take seconds to import

# Of six libraries together a thousand. Set-up reads in a process of its own, as it does in the table's trainings, too.
THOUSAND = pytest.param(170, True, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])


_V1 = """
    RandomHorizontalFlip(p)  RandomVerticalFlip(p)  RandomGrayscale(p)  RandomInvert(p)  RandomAutocontrast(p)
    RandomEqualize(p)  RandomPerspective(p=p)  RandomErasing(p)  RandomPosterize(4, p)  RandomSolarize(128, p)
    RandomAdjustSharpness(2, p)  RandomApply([ColorJitter(0.5)], p)  RandomRotation(20)  RandomCrop(16, padding=2)"""
_V2 = f"{_V1}  RandomPhotometricDistort(p=p)  RandomChannelPermutation()"
LIBRARIES = {
    "torchvision.transforms": (_V1, "Compose(steps)"),
    "torchvision.transforms.v2": (_V2, "Compose(steps)"),
    "albumentations": (
        """HorizontalFlip(p=p)  VerticalFlip(p=p)  RandomBrightnessContrast(p=p)  RandomRotate90(p=p)  GaussNoise(p=p)
        Blur(p=p)  CoarseDropout(p=p)  HueSaturationValue(p=p)  ToGray(p=p)  ChannelShuffle(p=p)  RandomGamma(p=p)""",
        "Compose([*steps, Normalize()], seed=seed)",
    ),
    "monai.transforms": (
        """RandFlip(p, spatial_axis=0)  RandShiftIntensity(0.2, prob=p)  RandScaleIntensity(0.2, prob=p)  RandZoom(p)
        RandGaussianNoise(prob=p)  RandRotate90(p)  RandAdjustContrast(prob=p)  RandGaussianSmooth(prob=p)""",
        "Compose([*steps, EnsureType(track_meta=False)]).set_random_state(seed)",
    ),
    "timm.data": (
        """{"color_jitter": None}  {"vflip": p, "hflip": 0.0, "color_jitter": 0.4, "color_jitter_prob": p}
        {"auto_augment": "rand-m7-mstd0.5-inc1"}  {"re_prob": p, "hflip": 0.0, "color_jitter": None}
        {"grayscale_prob": p, "gaussian_blur_prob": p}""",
        "create_transform(16, is_training=True, no_aug=False, **{'hflip': p} | steps[0])",
    ),
    "kornia.augmentation": (
        """ColorJiggle(0.2, 0.2, p=p)  RandomRotation(20.0, p=p)  RandomHorizontalFlip(p=p)  RandomVerticalFlip(p=p)
        RandomGaussianNoise(p=p)  RandomErasing(p=p)  RandomGrayscale(p=p)  RandomInvert(p=p)""",
        "Sequential(*steps)",
    ),
}
"""By library: its random steps, and how one or two of them become a transform."""


def make_setup(library: str, seed: int) -> Any:
    """The set-up of a seed: images whose transform is an attribute of that name, or of another."""
    dice = random.Random(seed)
    seed_everything(seed, verbose=False)
    names = {"Sequential": torch.nn.Sequential, **vars(pytest.importorskip(library))}
    names |= {"p": dice.choice([0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0]), "seed": seed}
    steps, whole = LIBRARIES[library]
    chosen = dice.sample(re.split(r"\s{2,}", steps.strip()), dice.randint(1, 2))
    names["steps"] = [eval(step, names) for step in chosen]
    augment = eval(whole, names)
    name = "transform" if dice.random() < 0.7 else "augment"

    def load(self: Any, index: int) -> Any:
        transform, pixels = getattr(self, name), pictures()[index]
        if library == "albumentations":
            return transform(image=pixels)["image"], index
        if library == "timm.data":
            return transform(Image.fromarray(pixels)), index
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        return transform(image if "torchvision" in library else image.float() / 255), index

    seed_everything(seed, verbose=False)
    return held(load, 12, **{name: augment})


def read_twice(dataset: Any) -> list[Any]:
    return [fingerprint(dataset[index]) for _ in range(2) for index in range(len(dataset))]


@pytest.mark.parametrize(("count", "apart"), [(6, False), THOUSAND])
@pytest.mark.parametrize("library", LIBRARIES)
def test_draws_are_those_of_the_source(library, count, apart, monkeypatch):
    """Two epochs through the cache hold the draws of two epochs without, over many set-ups of a library."""
    if not apart:
        monkeypatch.setattr(find, "start_method", lambda chosen: None)
    for seed in range(count):
        expected = read_twice(make_setup(library, seed))
        with closing(CachedDataset(make_setup(library, seed))) as dataset:
            assert read_twice(dataset) == expected, seed
