"""Boxes: images of many sizes, each with as many boxes and labels as there are objects in it.

    python examples/detection.py                               # epoch one draws the images, later epochs read memory
    python examples/detection.py --devices 2 --strategy ddp    # two ranks, one cache

A sample is `(image, {"boxes", "labels"})`, as detectors of torchvision take it; the collate_fn makes tuples. The cache
comes by a StocacheDataModule here; a callback would do as well, as in the other examples.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from torchvision.ops import roi_align

from lightning_stocache import CacheMonitor, StocacheDataModule
from training import Loads, end, fit, parser

Target = dict[str, Tensor]
COLOURS = torch.tensor([[230, 40, 40], [40, 200, 60], [50, 80, 240]], dtype=torch.uint8)


class Shapes(Dataset[tuple[Tensor, Target]]):
    """Grey noise of many sizes, with one to nine coloured rectangles."""

    def __init__(self, samples: int, loads: Loads) -> None:
        self.samples, self.loads = samples, loads

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        self.loads.note()
        chance = torch.Generator().manual_seed(index)
        height, width = torch.randint(160, 320, (2,), generator=chance).tolist()
        image = torch.randint(90, 160, (3, height, width), dtype=torch.uint8, generator=chance)
        count = 1 + index % 9
        labels = torch.randint(0, len(COLOURS), (count,), generator=chance)
        corners = (torch.rand(count, 2, generator=chance) * torch.tensor([width - 48, height - 48])).long()
        boxes = torch.cat([corners, corners + torch.randint(16, 48, (count, 2), generator=chance)], dim=1)
        for (left, top, right, bottom), label in zip(boxes.tolist(), labels.tolist(), strict=True):
            image[:, top:bottom, left:right] = COLOURS[label, :, None, None]
        return image, {"boxes": boxes.float(), "labels": labels}


def tuples(samples: list[tuple[Tensor, Target]]) -> tuple[tuple[Any, ...], ...]:
    """Images and targets, as they are."""
    return tuple(zip(*samples, strict=True))


class BoxClassifier(LightningModule):
    """Says what is in each box, by the box's mean colours."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 2 * 2, len(COLOURS))

    def training_step(self, batch: tuple[tuple[Tensor, ...], tuple[Target, ...]]) -> Tensor:
        images, targets = batch
        inside = [
            roi_align(image[None].float() / 255, [target["boxes"]], 2, sampling_ratio=2)
            for image, target in zip(images, targets, strict=True)
        ]
        logits = self.head(torch.cat(inside).flatten(1))
        return cross_entropy(logits, torch.cat([target["labels"] for target in targets]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    chosen, loads = parser(__doc__, samples=1000).parse_args(), Loads()
    datamodule = StocacheDataModule(
        train=Shapes(chosen.samples, loads),
        batch_size=chosen.batch_size,
        num_workers=chosen.workers,
        loader={"collate_fn": tuples},
        budget=chosen.budget,
    )
    fit(BoxClassifier(), datamodule, chosen, loads, [CacheMonitor()])
    end()


if __name__ == "__main__":
    main()
