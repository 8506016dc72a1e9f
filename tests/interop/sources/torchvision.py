"""Images as torchvision's users hold them: folders, its own datasets, masks and boxes; transforms v1 and v2."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, default_collate, random_split
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import CIFAR10, FakeData, ImageFolder
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification

from tests.interop.sources.files import SAMPLES, images, pictures
from tests.interop.training import Setting

MEAN, STD = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)


def _of_many_sizes(setting: Setting, transform: Any) -> Any:
    return setting.loader(ImageFolder(images(setting.folder), transform))


def many_sizes_v1(setting: Setting) -> Any:
    steps = [v1.RandomResizedCrop(12), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    return _of_many_sizes(setting, v1.Compose(steps))


def many_sizes_v2(setting: Setting) -> Any:
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return _of_many_sizes(setting, v2.Compose([v2.RandomResizedCrop(12), v2.RandomHorizontalFlip(), *to_tensor]))


def many_sizes_to_tensor_first(setting: Setting) -> Any:
    return _of_many_sizes(setting, v2.Compose([v2.PILToTensor(), v2.RandomResizedCrop(12), v2.RandomHorizontalFlip()]))


def one_edge_resized_to_tensor_first(setting: Setting) -> Any:
    return _of_many_sizes(setting, v2.Compose([v2.Resize(16), v2.PILToTensor(), v2.RandomCrop(12)]))


def eval_v1(setting: Setting) -> Any:
    steps = [v1.Resize(16), v1.CenterCrop(12), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    return _of_many_sizes(setting, v1.Compose(steps))


def eval_v2(setting: Setting) -> Any:
    steps = [v2.Resize(16), v2.CenterCrop(12), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    return _of_many_sizes(setting, v2.Compose([*steps, v2.Normalize(MEAN, STD)]))


def eval_of_weights(setting: Setting) -> Any:
    return _of_many_sizes(setting, ImageClassification(crop_size=12, resize_size=16))


def resized_then_random(setting: Setting) -> Any:
    steps = [v2.Resize((16, 16)), v2.PILToTensor(), v2.RandomCrop(16, padding=2), v2.RandomHorizontalFlip()]
    return _of_many_sizes(setting, v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True)]))


def centre_cropped_then_random(setting: Setting) -> Any:
    steps = [v1.Resize(16), v1.CenterCrop(12), v1.ToTensor(), v1.RandomHorizontalFlip(), v1.Normalize(MEAN, STD)]
    return _of_many_sizes(setting, v1.Compose(steps))


def resized_then_trivial_augment(setting: Setting) -> Any:
    steps = [v2.Resize((16, 16)), v2.PILToTensor(), v2.TrivialAugmentWide(), v2.RandomHorizontalFlip()]
    return _of_many_sizes(setting, v2.Compose(steps))


def resized_then_random_erasing(setting: Setting) -> Any:
    return _of_many_sizes(setting, v1.Compose([v1.Resize((16, 16)), v1.ToTensor(), v1.RandomErasing(p=0.5)]))


class _SmallCIFAR10(CIFAR10):
    """CIFAR10 with a file of 24 images, which has another checksum."""

    train_list = [("data_batch_1", None)]  # noqa: RUF012
    test_list = []  # noqa: RUF012
    meta = {"filename": "batches.meta", "key": "label_names", "md5": None}  # noqa: RUF012

    @classmethod
    def of(cls, folder: Path, transform: Any) -> CIFAR10:
        base = folder / cls.base_folder
        base.mkdir(exist_ok=True)
        data = pictures(SAMPLES, 32, 32).transpose(0, 3, 1, 2).reshape(SAMPLES, -1)
        (base / "data_batch_1").write_bytes(pickle.dumps({"data": data, "labels": list(range(SAMPLES))}))
        (base / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(label) for label in range(SAMPLES)]}))
        return cls(folder, transform=transform)


def cifar_train(setting: Setting) -> Any:
    steps = [v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    return setting.loader(_SmallCIFAR10.of(setting.folder, v1.Compose(steps)))


def cifar_eval(setting: Setting) -> Any:
    return setting.loader(_SmallCIFAR10.of(setting.folder, v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD)])))


def fake_data(setting: Setting) -> Any:
    return setting.loader(FakeData(SAMPLES, (3, 8, 8), transform=v1.ToTensor()))


def random_split_of_a_random_dataset(setting: Setting) -> Any:
    steps = [v2.Resize((16, 16)), v2.PILToTensor(), v2.RandomHorizontalFlip()]
    folder = ImageFolder(images(setting.folder), v2.Compose(steps))
    part, _ = random_split(setting.counted(folder), [20, 4])
    return torch.utils.data.DataLoader(part, **setting.options)


def concatenated(setting: Setting) -> Any:
    transform = v1.Compose([v1.Resize((12, 12)), v1.ToTensor()])
    parts = [ImageFolder(images(setting.folder, of_one_size=of_one_size), transform) for of_one_size in (False, True)]
    return setting.loader(ConcatDataset(parts))


def concatenated_random(setting: Setting) -> Any:
    cropped = v1.Compose([v1.Resize((16, 16)), v1.ToTensor(), v1.RandomCrop(12)])
    erased = v2.Compose([v2.Resize((12, 12)), v2.PILToTensor(), v2.ToDtype(torch.float32), v2.RandomErasing(p=0.5)])
    folders = [
        ImageFolder(images(setting.folder), cropped),
        ImageFolder(images(setting.folder, of_one_size=True), erased),
    ]
    parts = ConcatDataset([setting.counted(folder) for folder in folders])
    return torch.utils.data.DataLoader(parts, **setting.options)


def cutmix_in_collate(setting: Setting) -> Any:
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
    def __init__(self, transforms: Any) -> None:
        super().__init__()
        self.transforms = transforms

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


def masks_untransformed(setting: Setting) -> Any:
    return setting.loader(_Masks())


def masks_with_joint_transforms(setting: Setting) -> Any:
    return setting.loader(_JointMasks(v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(12)])))


def masks_with_transform_called_on_both(setting: Setting) -> Any:
    return setting.loader(_TransformedMasks(v2.Compose([v2.RandomCrop(12), v2.RandomVerticalFlip()])))


def transform_of_another_name(setting: Setting) -> Any:
    to_float = v2.ToDtype(torch.float32, scale=True)
    return setting.loader(_Augmented(v2.Compose([v2.Resize(14), v2.RandomCrop(12), v2.ColorJitter(0.3)]), to_float))


def masks_flipped_by_hand(setting: Setting) -> Any:
    return setting.loader(_FlippedMasks())


class _Boxes(_Masks):
    """Images with boxes and labels, of which each has another number."""

    def __getitem__(self, index: int) -> Any:
        image, _ = self.load(index)
        count = 1 + index % 3
        corners = torch.tensor([[1.0, 1.0, 4.0 + index % 5, 6.0]]).expand(count, 4)
        boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(16, 16))
        return self.transform(image, {"boxes": boxes, "labels": torch.arange(count)})


def detection(setting: Setting) -> Any:
    return setting.loader(
        _Boxes(v2.RandomHorizontalFlip()), collate_fn=lambda samples: tuple(zip(*samples, strict=True))
    )
