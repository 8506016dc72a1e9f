"""The recipe of Ultralytics: equal losses, and each image is read once; with mosaic it passes through, as plain."""

import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image

os.environ |= {"YOLO_CONFIG_DIR": str(Path.cwd()), "YOLO_OFFLINE": "true"}
from ultralytics.data.base import BaseDataset
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.utils import SETTINGS

from tests.apps.recipes.guide import run
from tests.jobs import Log

SETTINGS.update({name: False for name, value in SETTINGS.items() if value is True})  # loggers that are installed
IMAGES = 40
READS = Path("reads").absolute()
DATA = Path("data").absolute()
load_image, run_callbacks = BaseDataset.load_image, BaseTrainer.run_callbacks


def counted(self: Any, index: int, *args: Any, **options: Any) -> Any:
    """Note each read of a training image."""
    if len(self.labels) == IMAGES:
        with open(READS, "ab", buffering=0) as file:
            file.write(b"1")
    return load_image(self, index, *args, **options)


def write_data() -> None:
    """Images of noise in several sizes, with a box each."""
    random = np.random.default_rng(0)
    for split, count in {"train": IMAGES, "val": 8}.items():
        for kind in ("images", "labels"):
            (DATA / kind / split).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 256, (64 + number % 5, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(DATA / f"images/{split}/{number:03}.jpg")
            box = f"{number % 2} 0.5 0.5 {0.2 + 0.01 * number} 0.3\n"
            (DATA / f"labels/{split}/{number:03}.txt").write_text(box)
    Path("data.yaml").write_text(f"path: {DATA}\ntrain: images/train\nval: images/val\nnames: [a, b]\n")


def train(cached: bool, workers: int, **options: Any) -> tuple[list[float], list[int], list[str]]:
    """The loss of each batch, the reads of training images before training and in each epoch, and the warnings."""
    losses, reads = list[float](), list[int]()
    READS.write_bytes(b"")

    def noting(self: Any, event: str) -> None:
        if event == "on_train_batch_end":
            losses.append(float(self.loss))
        elif event in ("on_train_start", "on_train_epoch_end"):
            reads.append(READS.stat().st_size - sum(reads))
        run_callbacks(self, event)

    settings = {
        "model": "yolo11n.yaml",
        "data": "data.yaml",
        "epochs": 4,
        "imgsz": 64,
        "batch": 8,
        "workers": workers,
        "device": "cpu",
        "seed": 1,
        "project": str(Path.cwd()),
        "exist_ok": True,
        **dict.fromkeys(["plots", "amp", "verbose", "save"], False),
        **options,
    }
    with patch.object(BaseTrainer, "run_callbacks", noting), Log(logging.WARNING) as log:
        run("Ultralytics", cached=cached, settings=settings)
    return losses, reads, log.lines


write_data()
BaseDataset.load_image = counted
for number in (0, 2):
    losses, reads, _ = train(False, number)
    losses_cached, reads_cached, warnings = train(True, number)
    assert losses == losses_cached
    assert reads == [0, IMAGES, IMAGES, IMAGES, IMAGES]
    assert reads_cached[0] <= IMAGES + 32
    assert sum(reads_cached) <= 2 * IMAGES + 16, reads_cached  # with set-up, and with looks
    assert not warnings
losses, reads, _ = train(False, 0, mosaic=1.0)
losses_cached, reads_cached, warnings = train(True, 0, mosaic=1.0)
assert losses == losses_cached
assert reads[1:] == reads_cached[1:]
assert len(warnings) == 1, warnings
assert "passes through uncached" in warnings[0]
print("equal")
