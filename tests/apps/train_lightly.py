"""SimCLR of lightly-train on a ResNet-18 of torchvision."""

from pathlib import Path

import lightly_train
from images import write_images
from lightly_train._data.image_dataset import ImageDataset  # noqa: PLC2701
from record import count, note_losses
from seeds import seed_albumentations

SAMPLES = 32

seed_albumentations()
note_losses()
count(ImageDataset, SAMPLES)
write_images(Path("images"), SAMPLES)
lightly_train.pretrain(
    out="out",
    data="images",
    model="torchvision/resnet18",
    method="simclr",
    epochs=4,
    batch_size=8,
    num_workers=0,
    accelerator="cpu",
    transform_args={"image_size": (32, 32)},
    seed=1,
)
