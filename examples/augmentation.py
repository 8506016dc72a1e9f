"""Random augmentation after the cache, in the two places where it can be.

    python examples/augmentation.py device     # per batch, on the device: every sample draws parameters of its own
    python examples/augmentation.py workers    # per sample, on the CPU, in worker processes

What is cached is the decoded uint8 image. On the device nothing but that is copied there, a quarter of the bytes of a
float image, and a fully cached epoch needs no worker. In workers any transform of torchvision will do, and whole
batches come back through shared memory.
"""

import sys

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torchvision.transforms import v2

import photos
from lightning_stocache import CacheMonitor, StocacheDataModule
from model import ConvNet

Batch = tuple[torch.Tensor, torch.Tensor]


class FlipAndShift(nn.Module):
    """Flips and shifts the images of a batch, each in its own way, in one go.

    Args:
        most: pixels by which an image is shifted at most, in each direction; its edge is repeated.
    """

    def __init__(self, most: int = 8) -> None:
        super().__init__()
        self.most = most

    def forward(self, batch: Batch) -> Batch:
        """The batch with other images, `[samples, 3, height, width]` of the same dtype."""
        pictures, labels = batch
        samples, _, height, width = pictures.shape
        device = pictures.device
        drawn = torch.randint(-self.most, self.most + 1, (2, samples), device=device)
        rows = (torch.arange(height, device=device) + drawn[0, :, None]).clamp(0, height - 1)
        columns = (torch.arange(width, device=device) + drawn[1, :, None]).clamp(0, width - 1)
        flipped = torch.rand(samples, device=device) < 0.5
        columns = torch.where(flipped[:, None], columns.flip(1), columns)
        sample = torch.arange(samples, device=device)
        # Three index tensors with a slice between them: the channels come last, and are put back.
        shifted = pictures[sample[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return shifted.contiguous(), labels


class Normalise(nn.Module):
    """What every image gets, random or not."""

    def forward(self, batch: Batch) -> Batch:
        return photos.normalise(batch)


class CropAndFlip:
    """The same idea per sample: any transform of torchvision, on the image of an (image, label) pair."""

    def __init__(self, size: int = 96) -> None:
        self.steps = v2.Compose(
            [v2.RandomResizedCrop(size, scale=(0.7, 1.0), antialias=True), v2.RandomHorizontalFlip()]
        )

    def __call__(self, sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
        image, label = sample
        return self.steps(image), label


def main(where: str) -> None:
    torch.set_num_threads(1)  # see train.py
    seed_everything(0, workers=True, verbose=False)
    photos.make()
    on_device = {"batch_transform": nn.Sequential(FlipAndShift(), Normalise()), "num_workers": 0}
    in_workers = {"transform": CropAndFlip(), "batch_transform": photos.normalise, "num_workers": 2}
    datamodule = StocacheDataModule(
        train=photos.images("train"),
        val=photos.images("val"),
        batch_size=64,
        eval_transform=None,
        eval_batch_transform=photos.normalise,
        **(on_device if where == "device" else in_workers),
    )
    trainer = Trainer(
        max_epochs=3,
        callbacks=[CacheMonitor()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(ConvNet(num_classes=2), datamodule)


if __name__ == "__main__":
    if sys.argv[1:] not in (["device"], ["workers"]):
        raise SystemExit(__doc__)
    main(sys.argv[1])
