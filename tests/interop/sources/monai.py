"""Volumes as MONAI's users hold them: dictionary transforms, with and without its MetaTensor."""

from typing import Any

import numpy as np
import pytest

from tests.interop.setting import Setting, held

monai = pytest.importorskip("monai.data")
transforms = pytest.importorskip("monai.transforms")

KEYS = ["image", "label"]
VOLUMES = 8  # MONAI takes its time for each


def _volumes(setting: Setting, *, of_one_size: bool = True) -> list[dict[str, str]]:
    """Volumes and their labels, each in a file."""
    root = setting.folder / ("volumes" if of_one_size else "varying_volumes")
    rows = [{key: str(root / f"{key}{number}.npy") for key in KEYS} for number in range(VOLUMES)]
    if not root.exists():
        root.mkdir()
        for number, row in enumerate(rows):
            shape = (8, 8, 8) if of_one_size else (8 + number % 3, 9, 8 + number % 2)
            volume = np.random.default_rng(number).random(shape, dtype=np.float32)
            np.save(row["image"], volume)
            np.save(row["label"], (volume > 0.5).astype(np.float32))
    return rows


def _steps(*more: Any, track_meta: bool = True) -> Any:
    load = [transforms.LoadImaged(KEYS), transforms.EnsureChannelFirstd(KEYS, channel_dim="no_channel")]
    load += [transforms.ScaleIntensityd("image"), transforms.EnsureTyped(KEYS, track_meta=track_meta)]
    load += [] if track_meta else [transforms.SelectItemsd(KEYS)]
    return transforms.Compose([*load, *more])


def _flip_and_shift(*, track_meta: bool = True) -> Any:
    flip = transforms.RandFlipd(KEYS, prob=0.5, spatial_axis=0)
    return _steps(flip, transforms.RandShiftIntensityd("image", 0.1, prob=1), track_meta=track_meta)


def _crops() -> Any:
    return _steps(transforms.RandCropByPosNegLabeld(KEYS, "label", spatial_size=(4, 4, 4), num_samples=2))


def _loader(setting: Setting, steps: Any, *, of_one_size: bool = True) -> Any:
    return setting.loader(monai.Dataset(_volumes(setting, of_one_size=of_one_size), steps), monai.DataLoader)


def _plain_loader(setting: Setting) -> Any:
    return setting.loader(monai.Dataset(_volumes(setting), _steps()), collate_fn=monai.list_data_collate)


def _arrays(setting: Setting) -> Any:
    """A dataset of one's own that calls array transforms."""

    def load(self: Any, index: int) -> Any:
        return self.transform(np.load(self.rows[index]["image"])[None])

    transform = transforms.Compose([transforms.ScaleIntensity(), transforms.RandGaussianNoise(prob=0.5)])
    return setting.loader(held(load, VOLUMES, rows=_volumes(setting), transform=transform), monai.DataLoader)


def _cache_dataset(setting: Setting) -> Any:
    dataset = monai.CacheDataset(_volumes(setting), _flip_and_shift(), progress=False)
    return setting.loader(dataset, monai.DataLoader)


MONAI = {
    "deterministic": lambda setting: _loader(setting, _steps()),
    "deterministic_in_a_plain_loader": _plain_loader,
    "deterministic_without_meta": lambda setting: _loader(setting, _steps(track_meta=False)),
    "random_flip_and_shift": lambda setting: _loader(setting, _flip_and_shift()),
    "random_flip_and_shift_without_meta": lambda setting: _loader(setting, _flip_and_shift(track_meta=False)),
    "random_crops": lambda setting: _loader(setting, _crops()),
    "random_crops_of_varying_volumes": lambda setting: _loader(setting, _crops(), of_one_size=False),
    "array_transforms_in_a_dataset_of_ones_own": _arrays,
    "monai_cache_dataset": _cache_dataset,
}
