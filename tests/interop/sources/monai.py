"""Volumes as MONAI's users hold them: dictionary transforms, with and without its MetaTensor."""

from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.interop.setting import Setting, held

monai_data = pytest.importorskip("monai.data")
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
    load = [
        transforms.LoadImaged(KEYS),
        transforms.EnsureChannelFirstd(KEYS, channel_dim="no_channel"),
        transforms.ScaleIntensityd("image"),
        transforms.EnsureTyped(KEYS, track_meta=track_meta),
    ]
    if not track_meta:
        load.append(transforms.SelectItemsd(KEYS))
    return transforms.Compose([*load, *more])


def _flip_and_shift(*, track_meta: bool = True) -> Any:
    flip = transforms.RandFlipd(KEYS, prob=0.5, spatial_axis=0)
    return _steps(flip, transforms.RandShiftIntensityd("image", 0.1, prob=1), track_meta=track_meta)


def _crops() -> Any:
    return _steps(transforms.RandCropByPosNegLabeld(KEYS, "label", spatial_size=(4, 4, 4), num_samples=2))


def _loader(setting: Setting, steps: Any, kind: Any = monai_data.DataLoader, **options: Any) -> Any:
    return setting.loader(monai_data.Dataset(_volumes(setting), steps), kind, **options)


def _arrays(setting: Setting) -> Any:
    """A dataset of one's own that calls array transforms."""
    return held(
        lambda self, index: self.transform(np.load(self.rows[index]["image"])[None]),
        VOLUMES,
        rows=_volumes(setting),
        transform=transforms.Compose([transforms.ScaleIntensity(), transforms.RandGaussianNoise(prob=0.5)]),
    )


MONAI = {
    "deterministic": lambda setting: _loader(setting, _steps()),
    "deterministic_in_a_plain_loader": lambda setting: _loader(
        setting, _steps(), DataLoader, collate_fn=monai_data.list_data_collate
    ),
    "deterministic_without_meta": lambda setting: _loader(setting, _steps(track_meta=False)),
    "random_flip_and_shift": lambda setting: _loader(setting, _flip_and_shift()),
    "random_flip_and_shift_without_meta": lambda setting: _loader(setting, _flip_and_shift(track_meta=False)),
    "random_crops": lambda setting: _loader(setting, _crops()),
    "random_crops_of_varying_volumes": lambda setting: setting.loader(
        monai_data.Dataset(_volumes(setting, of_one_size=False), _crops()), monai_data.DataLoader
    ),
    "array_transforms_in_a_dataset_of_ones_own": lambda setting: setting.loader(
        _arrays(setting), monai_data.DataLoader
    ),
    "monai_cache_dataset": lambda setting: setting.loader(
        monai_data.CacheDataset(_volumes(setting), _flip_and_shift(), progress=False), monai_data.DataLoader
    ),
}
