"""Images augmented by albumentations, which draws from a generator of its own and is called by keyword."""

import os
from typing import Any

import pytest
from torch.utils.data import Dataset

from tests.interop.sources.files import SAMPLES, pictures

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it asks the network for a later version when it is imported
A = pytest.importorskip("albumentations")
ToTensorV2 = pytest.importorskip("albumentations.pytorch").ToTensorV2


class _Images(Dataset[Any]):
    """Images of one size, augmented by these steps."""

    def __init__(self, *steps: Any, **options: Any) -> None:
        self.transform = A.Compose([*steps, A.Normalize(), ToTensorV2()], seed=137, **options)

    def __len__(self) -> int:
        return SAMPLES

    def load(self, index: int) -> Any:
        return pictures()[index]

    def __getitem__(self, index: int) -> Any:
        return self.transform(image=self.load(index))["image"], index


class _OfManySizes(_Images):
    def load(self, index: int) -> Any:
        return pictures()[index, : 12 + index % 5]


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


WAYS = {
    "flip": lambda setting: setting.loader(_Images(A.HorizontalFlip(p=0.5))),
    "crop_and_flip": lambda setting: setting.loader(_Images(A.RandomCrop(12, 12), A.HorizontalFlip(p=0.5))),
    "rare_brightness": lambda setting: setting.loader(_Images(A.RandomBrightnessContrast(p=0.1))),
    "image_and_mask": lambda setting: setting.loader(_Masks(A.HorizontalFlip(p=0.5), A.RandomRotate90(p=0.5))),
    "eval_": lambda setting: setting.loader(_Images(A.CenterCrop(12, 12))),
    "many_sizes": lambda setting: setting.loader(_OfManySizes(A.RandomCrop(10, 10))),
    "boxes": lambda setting: setting.loader(
        _Boxes(A.HorizontalFlip(p=0.5), bbox_params=A.BboxParams("pascal_voc", label_fields=["labels"])),
        collate_fn=list,
    ),
}
