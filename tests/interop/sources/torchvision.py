"""Images as torchvision's users hold them: folders, its own datasets, masks and boxes; transforms v1 and v2."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, default_collate, random_split
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import CIFAR10, FakeData, ImageFolder
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification

from tests.interop.sources.files import SAMPLES, images, pictures
from tests.interop.training import Setting

MEAN_STD = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
V1_TENSOR = [v1.ToTensor(), v1.Normalize(*MEAN_STD)]
FLOATS = v2.ToDtype(torch.float32, scale=True)
V2_TENSOR = [v2.ToImage(), FLOATS, v2.Normalize(*MEAN_STD)]


def _images(setting: Setting, transform: Any) -> Any:
    return setting.loader(ImageFolder(images(setting.folder), transform))


def _v1(setting: Setting, *steps: Any) -> Any:
    return _images(setting, v1.Compose([*steps]))


def _v2(setting: Setting, *steps: Any) -> Any:
    return _images(setting, v2.Compose([*steps]))


class _SmallCIFAR10(CIFAR10):
    """CIFAR10 with a file of 24 images, which has another checksum."""

    train_list = [("data_batch_1", None)]  # noqa: RUF012
    test_list = []  # noqa: RUF012
    meta = {"filename": "batches.meta", "key": "label_names", "md5": None}  # noqa: RUF012

    @classmethod
    def of(cls, folder: Path, *steps: Any) -> CIFAR10:
        base = folder / cls.base_folder
        base.mkdir(exist_ok=True)
        data = pictures(SAMPLES, 32, 32).transpose(0, 3, 1, 2).reshape(SAMPLES, -1)
        (base / "data_batch_1").write_bytes(pickle.dumps({"data": data, "labels": list(range(SAMPLES))}))
        (base / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(label) for label in range(SAMPLES)]}))
        return cls(folder, transform=v1.Compose([*steps, *V1_TENSOR]))


def _random_split_of_a_random_dataset(setting: Setting) -> Any:
    steps = [v2.Resize((16, 16)), v2.PILToTensor(), v2.RandomHorizontalFlip()]
    folder = ImageFolder(images(setting.folder), v2.Compose(steps))
    part, _ = random_split(setting.counted(folder), [20, 4])
    return DataLoader(part, **setting.options)


def _folders(setting: Setting, of_many_sizes: Any, of_one_size: Any) -> list[ImageFolder]:
    many, one = images(setting.folder), images(setting.folder, of_one_size=True)
    return [ImageFolder(many, of_many_sizes), ImageFolder(one, of_one_size)]


def _concatenated(setting: Setting) -> Any:
    transform = v1.Compose([v1.Resize((12, 12)), v1.ToTensor()])
    return setting.loader(ConcatDataset(_folders(setting, transform, transform)))


def _concatenated_random(setting: Setting) -> Any:
    cropped = v1.Compose([v1.Resize((16, 16)), v1.ToTensor(), v1.RandomCrop(12)])
    erased = v2.Compose([v2.Resize((12, 12)), v2.PILToTensor(), v2.ToDtype(torch.float32), v2.RandomErasing(p=0.5)])
    parts = ConcatDataset([setting.counted(folder) for folder in _folders(setting, cropped, erased)])
    return DataLoader(parts, **setting.options)


def _cutmix_in_collate(setting: Setting) -> Any:
    cutmix = v2.CutMix(num_classes=2)
    folder = ImageFolder(images(setting.folder), v1.Compose([v1.Resize((12, 12)), v1.ToTensor()]))
    return setting.loader(folder, collate_fn=lambda samples: cutmix(*default_collate(samples)))


class _Masks(Dataset[Any]):
    """Images and masks; a subclass says how they are transformed."""

    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.load(index)

    def load(self, index: int) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
        pixels = torch.from_numpy(pictures()[index]).permute(2, 0, 1)
        return tv_tensors.Image(pixels), tv_tensors.Mask(pixels[:1] > 128)


class _JointMasks(_Masks):
    def __init__(self, *steps: Any) -> None:
        super().__init__()
        self.transforms = v2.Compose([*steps])

    def __getitem__(self, index: int) -> Any:
        return self.transforms(*self.load(index))


class _TransformedMasks(_Masks):
    def __getitem__(self, index: int) -> Any:
        image, mask = self.load(index)
        return self.transform(image, mask)


class _Augmented(_Masks):
    """Images whose transform has another name, and is followed by a second one."""

    def __init__(self, aug: Any, convert: Any) -> None:
        super().__init__()
        self.aug, self.convert = aug, convert

    def __getitem__(self, index: int) -> Any:
        return {"image": self.convert(self.aug(self.load(index)[0])), "label": index}


class _FlippedMasks(_Masks):
    def __getitem__(self, index: int) -> Any:
        image, mask = self.load(index)
        return (image.flip(-1), mask.flip(-1)) if torch.rand(()) < 0.5 else (image, mask)


class _Boxes(_Masks):
    """Images with boxes and labels, of which each has another number."""

    def __getitem__(self, index: int) -> Any:
        image, _ = self.load(index)
        count = 1 + index % 3
        corners = torch.tensor([[1.0, 1.0, 4.0 + index % 5, 6.0]]).expand(count, 4)
        boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(16, 16))
        return self.transform(image, {"boxes": boxes, "labels": torch.arange(count)})


WAYS = {
    "many_sizes_v1": lambda setting: _v1(setting, v1.RandomResizedCrop(12), v1.RandomHorizontalFlip(), *V1_TENSOR),
    "many_sizes_v2": lambda setting: _v2(setting, v2.RandomResizedCrop(12), v2.RandomHorizontalFlip(), *V2_TENSOR),
    "many_sizes_to_tensor_first": lambda setting: _v2(
        setting, v2.PILToTensor(), v2.RandomResizedCrop(12), v2.RandomHorizontalFlip()
    ),
    "one_edge_resized_to_tensor_first": lambda setting: _v2(
        setting, v2.Resize(16), v2.PILToTensor(), v2.RandomCrop(12)
    ),
    "eval_v1": lambda setting: _v1(setting, v1.Resize(16), v1.CenterCrop(12), *V1_TENSOR),
    "eval_v2": lambda setting: _v2(setting, v2.Resize(16), v2.CenterCrop(12), *V2_TENSOR),
    "eval_of_weights": lambda setting: _images(setting, ImageClassification(crop_size=12, resize_size=16)),
    "resized_then_random": lambda setting: _v2(
        setting, v2.Resize((16, 16)), v2.PILToTensor(), v2.RandomCrop(16, padding=2), v2.RandomHorizontalFlip(), FLOATS
    ),
    "centre_cropped_then_random": lambda setting: _v1(
        setting, v1.Resize(16), v1.CenterCrop(12), v1.ToTensor(), v1.RandomHorizontalFlip(), v1.Normalize(*MEAN_STD)
    ),
    "resized_then_trivial_augment": lambda setting: _v2(
        setting, v2.Resize((16, 16)), v2.PILToTensor(), v2.TrivialAugmentWide(), v2.RandomHorizontalFlip()
    ),
    "resized_then_random_erasing": lambda setting: _v1(
        setting, v1.Resize((16, 16)), v1.ToTensor(), v1.RandomErasing(p=0.5)
    ),
    "cifar_train": lambda setting: setting.loader(
        _SmallCIFAR10.of(setting.folder, v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip())
    ),
    "cifar_eval": lambda setting: setting.loader(_SmallCIFAR10.of(setting.folder)),
    "fake_data": lambda setting: setting.loader(FakeData(SAMPLES, (3, 8, 8), transform=v1.ToTensor())),
    "random_split_of_a_random_dataset": _random_split_of_a_random_dataset,
    "concatenated": _concatenated,
    "concatenated_random": _concatenated_random,
    "cutmix_in_collate": _cutmix_in_collate,
    "masks_untransformed": lambda setting: setting.loader(_Masks()),
    "masks_with_joint_transforms": lambda setting: setting.loader(
        _JointMasks(v2.RandomHorizontalFlip(), v2.RandomCrop(12))
    ),
    "masks_with_transform_called_on_both": lambda setting: setting.loader(
        _TransformedMasks(v2.Compose([v2.RandomCrop(12), v2.RandomVerticalFlip()]))
    ),
    "transform_of_another_name": lambda setting: setting.loader(
        _Augmented(v2.Compose([v2.Resize(14), v2.RandomCrop(12), v2.ColorJitter(0.3)]), FLOATS)
    ),
    "masks_flipped_by_hand": lambda setting: setting.loader(_FlippedMasks()),
    "detection": lambda setting: setting.loader(
        _Boxes(v2.RandomHorizontalFlip()), collate_fn=lambda samples: tuple(zip(*samples, strict=True))
    ),
}
