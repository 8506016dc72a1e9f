"""YOLO of Ultralytics with its mosaic, which has no Trainer of Lightning: `build_dataset` is the place for a cache."""

import os
from pathlib import Path
from typing import Any

from images import write_images
from record import count, note
from ultralytics.data.dataset import YOLODataset
from ultralytics.models.yolo.detect import DetectionTrainer

from lightning_stocache import CachedDataset

SAMPLES = 24


class Trainer(DetectionTrainer):
    """Caches the training set if the switch is on."""

    def build_dataset(self, img_path: str, mode: str = "train", batch: int | None = None) -> Any:
        dataset = super().build_dataset(img_path, mode, batch)
        budget = os.environ.get("STOCACHE")
        return CachedDataset(dataset, budget=budget) if budget and mode == "train" else dataset


for split, samples in (("train", SAMPLES), ("val", 4)):
    labels = Path("data/labels") / split
    labels.mkdir(parents=True)
    for image in write_images(Path("data/images") / split, samples):
        (labels / f"{image.stem}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
Path("data.yaml").write_text(f"path: {Path('data').absolute()}\ntrain: images/train\nval: images/val\nnames: [box]\n")
count(YOLODataset, SAMPLES)
options = {"data": "data.yaml", "model": "yolov8n.yaml", "imgsz": 64, "epochs": 4, "batch": 8, "workers": 0}
offline = {"amp": False, "plots": False, "val": False, "pretrained": False, "device": "cpu", "project": "out"}
trainer = Trainer(overrides=options | offline)
trainer.add_callback("on_train_batch_end", lambda trainer: note([loss.item() for loss in trainer.loss_items.values()]))
trainer.train()
