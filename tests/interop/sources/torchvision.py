"""Images as torchvision's users hold them: folders, its own datasets, masks and boxes; transforms v1 and v2."""

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, default_collate, random_split
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import CIFAR10, FakeData, ImageFolder
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification

from tests.interop.setting import SAMPLES, Setting, Way, held, images, made, pictures

MEAN_STD = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
V1_TENSOR = [v1.ToTensor(), v1.Normalize(*MEAN_STD)]
FLOATS = v2.ToDtype(torch.float32, scale=True)
V2_TENSOR = [v2.ToImage(), FLOATS, v2.Normalize(*MEAN_STD)]
_RESIZED = v1.Compose([v1.Resize((12, 12)), v1.ToTensor()])
_CUTMIX = v2.CutMix(num_classes=2)


def _folder(transform: Any, **options: Any) -> Way:
    return lambda setting: setting.loader(ImageFolder(images(setting.folder), transform), **options)


def _v1(*steps: Any) -> Way:
    return _folder(v1.Compose([*steps]))


def _v2(*steps: Any) -> Way:
    return _folder(v2.Compose([*steps]))


class _SmallCIFAR10(CIFAR10):
    """CIFAR10 with a file of 24 images, which has another checksum."""

    train_list = [("data_batch_1", None)]  # noqa: RUF012
    test_list = []  # noqa: RUF012
    meta = {"filename": "batches.meta", "key": "label_names", "md5": None}  # noqa: RUF012


def _cifar(*steps: Any) -> Way:
    def way(setting: Setting) -> Any:
        base = setting.folder / CIFAR10.base_folder
        base.mkdir(exist_ok=True)
        data = pictures(SAMPLES, 32, 32).transpose(0, 3, 1, 2).reshape(SAMPLES, -1)
        (base / "data_batch_1").write_bytes(pickle.dumps({"data": data, "labels": list(range(SAMPLES))}))
        (base / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(label) for label in range(SAMPLES)]}))
        return setting.loader(_SmallCIFAR10(setting.folder, transform=v1.Compose([*steps, *V1_TENSOR])))

    return way


def _random_split_of_a_random_dataset(setting: Setting) -> Any:
    steps = [v2.Resize((16, 16)), v2.PILToTensor(), v2.RandomHorizontalFlip()]
    folder = ImageFolder(images(setting.folder), v2.Compose(steps))
    part, _ = random_split(setting.counted(folder), [20, 4])
    return DataLoader(part, **setting.options)


def _folders(setting: Setting, of_many_sizes: Any, of_one_size: Any) -> list[ImageFolder]:
    many, one = images(setting.folder), images(setting.folder, of_one_size=True)
    return [ImageFolder(many, of_many_sizes), ImageFolder(one, of_one_size)]


def _concatenated(setting: Setting) -> Any:
    return setting.loader(ConcatDataset(_folders(setting, _RESIZED, _RESIZED)))


def _concatenated_random(setting: Setting) -> Any:
    cropped = v1.Compose([v1.Resize((16, 16)), v1.ToTensor(), v1.RandomCrop(12)])
    erased = v2.Compose([v2.Resize((12, 12)), v2.PILToTensor(), v2.ToDtype(torch.float32), v2.RandomErasing(p=0.5)])
    parts = ConcatDataset([setting.counted(folder) for folder in _folders(setting, cropped, erased)])
    return DataLoader(parts, **setting.options)


def _pair(index: int) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
    """An image and its mask."""
    pixels = torch.from_numpy(pictures()[index]).permute(2, 0, 1)
    return tv_tensors.Image(pixels), tv_tensors.Mask(pixels[:1] > 128)


def _flipped_by_hand(_: Any, index: int) -> Any:
    image, mask = _pair(index)
    return (image.flip(-1), mask.flip(-1)) if torch.rand(()) < 0.5 else (image, mask)


def _boxes(self: Any, index: int) -> Any:
    """An image with boxes and labels, of which each has another number."""
    count = 1 + index % 3
    corners = torch.tensor([[1.0, 1.0, 4.0 + index % 5, 6.0]]).expand(count, 4)
    boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(16, 16))
    return self.transform(_pair(index)[0], {"boxes": boxes, "labels": torch.arange(count)})


def _held(load: Callable[[Any, int], Any], *, collate_fn: Any = None, **attributes: Any) -> Way:
    return lambda setting: setting.loader(held(load, **attributes), collate_fn=collate_fn)


TORCHVISION = {
    "many_sizes_v1": _v1(v1.RandomResizedCrop(12), v1.RandomHorizontalFlip(), *V1_TENSOR),
    "many_sizes_v2": _v2(v2.RandomResizedCrop(12), v2.RandomHorizontalFlip(), *V2_TENSOR),
    "many_sizes_to_tensor_first": _v2(v2.PILToTensor(), v2.RandomResizedCrop(12), v2.RandomHorizontalFlip()),
    "one_edge_resized_to_tensor_first": _v2(v2.Resize(16), v2.PILToTensor(), v2.RandomCrop(12)),
    "eval_v1": _v1(v1.Resize(16), v1.CenterCrop(12), *V1_TENSOR),
    "eval_v2": _v2(v2.Resize(16), v2.CenterCrop(12), *V2_TENSOR),
    "eval_of_weights": _folder(ImageClassification(crop_size=12, resize_size=16)),
    "resized_then_random": _v2(
        v2.Resize((16, 16)), v2.PILToTensor(), v2.RandomCrop(16, padding=2), v2.RandomHorizontalFlip(), FLOATS
    ),
    "centre_cropped_then_random": _v1(
        v1.Resize(16), v1.CenterCrop(12), v1.ToTensor(), v1.RandomHorizontalFlip(), v1.Normalize(*MEAN_STD)
    ),
    "resized_then_trivial_augment": _v2(
        v2.Resize((16, 16)), v2.PILToTensor(), v2.TrivialAugmentWide(), v2.RandomHorizontalFlip()
    ),
    "resized_then_random_erasing": _v1(v1.Resize((16, 16)), v1.ToTensor(), v1.RandomErasing(p=0.5)),
    "cifar_train": _cifar(v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip()),
    "cifar_eval": _cifar(),
    "fake_data": lambda setting: setting.loader(FakeData(SAMPLES, (3, 8, 8), transform=v1.ToTensor())),
    "random_split_of_a_random_dataset": _random_split_of_a_random_dataset,
    "concatenated": _concatenated,
    "concatenated_random": _concatenated_random,
    "cutmix_in_collate": _folder(_RESIZED, collate_fn=lambda samples: _CUTMIX(*default_collate(samples))),
    "masks_untransformed": made(_pair),
    "masks_with_joint_transforms": _held(
        lambda self, index: self.transforms(*_pair(index)),
        transforms=v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(12)]),
    ),
    "masks_with_transform_called_on_both": _held(
        lambda self, index: self.transform(*_pair(index)),
        transform=v2.Compose([v2.RandomCrop(12), v2.RandomVerticalFlip()]),
    ),
    "transform_of_another_name": _held(
        lambda self, index: {"image": self.convert(self.aug(_pair(index)[0])), "label": index},
        aug=v2.Compose([v2.Resize(14), v2.RandomCrop(12), v2.ColorJitter(0.3)]),
        convert=FLOATS,
    ),
    "masks_flipped_by_hand": _held(_flipped_by_hand),
    "detection": _held(
        _boxes, transform=v2.RandomHorizontalFlip(), collate_fn=lambda samples: tuple(zip(*samples, strict=True))
    ),
}
