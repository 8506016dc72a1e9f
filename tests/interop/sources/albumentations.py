"""Images augmented by albumentations, which draws from a generator of its own and is called by keyword."""

import os
from typing import Any

import pytest
from torch.utils.data import Dataset

from tests.interop.sources.files import SAMPLES, pictures
from tests.interop.training import Setting

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it asks the network for a later version when it is imported
A = pytest.importorskip("albumentations")
ToTensorV2 = pytest.importorskip("albumentations.pytorch").ToTensorV2


class _Images(Dataset[Any]):
    def __init__(self, transform: Any, *, of_one_size: bool = True) -> None:
        self.transform, self.of_one_size = transform, of_one_size

    def __len__(self) -> int:
        return SAMPLES

    def load(self, index: int) -> Any:
        return pictures()[index, : 16 if self.of_one_size else 12 + index % 5]

    def __getitem__(self, index: int) -> Any:
        return self.transform(image=self.load(index))["image"], index


class _Masks(_Images):
    def __getitem__(self, index: int) -> Any:
        image = self.load(index)
        both = self.transform(image=image, mask=image[..., 0])
        return both["image"], both["mask"]


class _Boxes(_Images):
    def __getitem__(self, index: int) -> Any:
        boxes = [[1, 1, 6, 7], [2, 3, 9, 9], [0, 0, 5, 5]][: 1 + index % 3]
        done = self.transform(image=self.load(index), bboxes=boxes, labels=list(range(len(boxes))))
        return done["image"], done["bboxes"], done["labels"]


def _pipeline(*steps: Any, **options: Any) -> Any:
    return A.Compose([*steps, A.Normalize(), ToTensorV2()], seed=137, **options)


def flip(setting: Setting) -> Any:
    return setting.loader(_Images(_pipeline(A.HorizontalFlip(p=0.5))))


def crop_and_flip(setting: Setting) -> Any:
    return setting.loader(_Images(_pipeline(A.RandomCrop(12, 12), A.HorizontalFlip(p=0.5))))


def rare_brightness(setting: Setting) -> Any:
    return setting.loader(_Images(_pipeline(A.RandomBrightnessContrast(p=0.1))))


def image_and_mask(setting: Setting) -> Any:
    return setting.loader(_Masks(_pipeline(A.HorizontalFlip(p=0.5), A.RandomRotate90(p=0.5))))


def eval_(setting: Setting) -> Any:
    return setting.loader(_Images(_pipeline(A.CenterCrop(12, 12))))


def many_sizes(setting: Setting) -> Any:
    return setting.loader(_Images(_pipeline(A.RandomCrop(10, 10)), of_one_size=False))


def boxes(setting: Setting) -> Any:
    parameters = A.BboxParams("pascal_voc", label_fields=["labels"])
    return setting.loader(_Boxes(_pipeline(A.HorizontalFlip(p=0.5), bbox_params=parameters)), collate_fn=list)
