"""RF-DETR as `model.train(...)`; with `--replacement` its loader draws with replacement, as for few images."""

import json
import sys
from pathlib import Path

from images import write_images
from pytorch_lightning import seed_everything
from record import count, note_losses
from rfdetr import RFDETRNano
from rfdetr.datasets.coco import CocoDetection
from seeds import seed_albumentations

SAMPLES = 12


def write_split(split: str, samples: int) -> None:
    """Images with one box each, in COCO's format."""
    names = [path.name for path in write_images(Path("data") / split, samples, size=96, name="{:02}.jpg")]
    images = [{"id": number, "file_name": name, "width": 96, "height": 96} for number, name in enumerate(names)]
    box = {"category_id": 1, "bbox": [8, 8, 40, 40], "area": 1600, "iscrowd": 0}
    boxes = [box | {"id": number, "image_id": number} for number in range(samples)]
    kind = {"id": 1, "name": "box", "supercategory": "none"}
    content = {"images": images, "annotations": boxes, "categories": [kind]}
    (Path("data") / split / "_annotations.coco.json").write_text(json.dumps(content))


for split, samples in (("train", SAMPLES), ("valid", 4), ("test", 3)):
    write_split(split, samples)
seed_albumentations()
note_losses()
count(CocoDetection, SAMPLES)
seed_everything(1)
sizes = {"resolution": 64, "num_queries": 20, "num_select": 20, "group_detr": 1, "dec_layers": 1}
model = RFDETRNano(pretrain_weights=None, device="cpu", num_classes=1, **sizes)
model.train(
    dataset_dir="data",
    output_dir="out",
    epochs=4,
    batch_size=2,
    grad_accum_steps=4 if "--replacement" in sys.argv else 1,
    num_workers=0,
    use_ema=False,
    multi_scale=False,
    tensorboard=False,
    device="cpu",
    seed=1,
)
