"""Images as timm's users hold them: ImageDataset, create_transform and create_loader."""

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from tests.interop.setting import Setting, images

timm = pytest.importorskip("timm.data")
AUGMENT = "rand-m9-mstd0.5-inc1"


def _dataset(setting: Setting, **options: Any) -> Any:
    transform = timm.create_transform(16, **options) if options else None
    return timm.ImageDataset(str(images(setting.folder)), transform=transform)


def _made_by_timm(setting: Setting, **options: Any) -> Any:
    options |= {"num_workers": setting.workers, "persistent_workers": False, "pin_memory": False}
    return timm.create_loader(setting.counted(_dataset(setting)), 16, 4, device=torch.device("cpu"), **options)


def _mixup_in_collate(setting: Setting) -> Any:
    mixup = timm.Mixup(mixup_alpha=0.8, num_classes=2)
    dataset = _dataset(setting, is_training=False)
    return setting.loader(dataset, collate_fn=lambda samples: mixup(*default_collate(samples)))


TIMM = {
    "train": lambda setting: setting.loader(_dataset(setting, is_training=True, auto_augment=AUGMENT, re_prob=0.2)),
    "eval_": lambda setting: setting.loader(_dataset(setting, is_training=False)),
    "loader_that_prefetches": lambda setting: _made_by_timm(setting, is_training=True),
    "loader_without_prefetching": lambda setting: _made_by_timm(setting, is_training=False, use_prefetcher=False),
    "mixup_in_collate": _mixup_in_collate,
}
