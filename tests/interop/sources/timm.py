"""Images as timm's users hold them: ImageDataset, create_transform and create_loader."""

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from tests.interop.sources.files import images
from tests.interop.training import Setting

timm = pytest.importorskip("timm.data")


def _dataset(setting: Setting, transform: Any = None) -> Any:
    return timm.ImageDataset(str(images(setting.folder)), transform=transform)


def train(setting: Setting) -> Any:
    transform = timm.create_transform(16, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.2)
    return setting.loader(_dataset(setting, transform))


def eval_(setting: Setting) -> Any:
    return setting.loader(_dataset(setting, timm.create_transform(16, is_training=False)))


def _made_by_timm(setting: Setting, **options: Any) -> Any:
    dataset = setting.counted(_dataset(setting))
    options |= {"num_workers": setting.workers, "persistent_workers": False, "pin_memory": False}
    return timm.create_loader(dataset, 16, 4, device=torch.device("cpu"), **options)


def loader_that_prefetches(setting: Setting) -> Any:
    return _made_by_timm(setting, is_training=True)


def loader_without_prefetching(setting: Setting) -> Any:
    return _made_by_timm(setting, is_training=False, use_prefetcher=False)


def mixup_in_collate(setting: Setting) -> Any:
    mixup = timm.Mixup(mixup_alpha=0.8, num_classes=2)
    dataset = _dataset(setting, timm.create_transform(16, is_training=False))
    return setting.loader(dataset, collate_fn=lambda samples: _mixed(mixup, samples))


def _mixed(mixup: Any, samples: list[Any]) -> Any:
    pixels, labels = default_collate(samples)
    return mixup(pixels, labels)
