"""Ganomaly of anomalib, without augmentations, or with them and two workers (`--augmented`)."""

import sys
from pathlib import Path

from anomalib.data import Folder
from anomalib.data.datasets import FolderDataset
from anomalib.engine import Engine
from anomalib.models import Ganomaly
from images import write_images
from lightning.pytorch import seed_everything
from record import count, note_losses
from torchvision.transforms.v2 import Compose, RandomHorizontalFlip, RandomVerticalFlip

SAMPLES = 24

is_augmented = "--augmented" in sys.argv
seed_everything(1, workers=True)
note_losses()
count(FolderDataset, SAMPLES)
write_images(Path("data/good"), SAMPLES)
write_images(Path("data/test"), 4, seed=1)
write_images(Path("data/bad"), 4, seed=2)
data = Folder(
    name="tiny",
    root="data",
    normal_dir="good",
    normal_test_dir="test",
    abnormal_dir="bad",
    train_batch_size=8,
    eval_batch_size=8,
    num_workers=2 if is_augmented else 0,
    train_augmentations=Compose([RandomHorizontalFlip(), RandomVerticalFlip()]) if is_augmented else None,
    seed=1,
)
small = Ganomaly.configure_pre_processor((32, 32))
model = Ganomaly(batch_size=8, n_features=8, latent_vec_size=8, pre_processor=small)
engine = Engine(max_epochs=4, accelerator="cpu", enable_progress_bar=False, logger=False)
engine.fit(model, datamodule=data)
