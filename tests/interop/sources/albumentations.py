"""Images augmented by albumentations, which draws from a generator of its own and is called by keyword."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.setting import Setting, held, pictures

A = pytest.importorskip("albumentations")
ToTensorV2 = pytest.importorskip("albumentations.pytorch").ToTensorV2
BOXES = A.BboxParams("pascal_voc", label_fields=["labels"])


def _image(self: Any, index: int) -> Any:
    return self.transform(image=pictures()[index])["image"], index


def _image_of_many_sizes(self: Any, index: int) -> Any:
    return self.transform(image=pictures()[index, : 12 + index % 5])["image"], index


def _image_and_mask(self: Any, index: int) -> Any:
    image = pictures()[index]
    both = self.transform(image=image, mask=image[..., 0])
    return both["image"], both["mask"]


def _image_and_boxes(self: Any, index: int) -> Any:
    boxes = [[1, 1, 6, 7], [2, 3, 9, 9], [0, 0, 5, 5]][: 1 + index % 3]
    done = self.transform(image=pictures()[index], bboxes=boxes, labels=list(range(len(boxes))))
    return done["image"], done["bboxes"], done["labels"]


def _loader(setting: Setting, *steps: Any, load: Callable[[Any, int], Any] = _image, boxes: Any = None) -> Any:
    transform = A.Compose([*steps, A.Normalize(), ToTensorV2()], seed=137, bbox_params=boxes)
    return setting.loader(held(load, transform=transform), collate_fn=list if boxes else None)


ALBUMENTATIONS = {
    "flip": lambda setting: _loader(setting, A.HorizontalFlip(p=0.5)),
    "crop_and_flip": lambda setting: _loader(setting, A.RandomCrop(12, 12), A.HorizontalFlip(p=0.5)),
    "rare_brightness": lambda setting: _loader(setting, A.RandomBrightnessContrast(p=0.1)),
    "image_and_mask": lambda setting: _loader(setting, A.HorizontalFlip(), A.RandomRotate90(), load=_image_and_mask),
    "eval_": lambda setting: _loader(setting, A.CenterCrop(12, 12)),
    "many_sizes": lambda setting: _loader(setting, A.RandomCrop(10, 10), load=_image_of_many_sizes),
    "boxes": lambda setting: _loader(setting, A.HorizontalFlip(p=0.5), load=_image_and_boxes, boxes=BOXES),
}
