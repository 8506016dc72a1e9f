"""The example's model: a small convolutional network that reports its loss and accuracy."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvNet(pl.LightningModule):
    """Three strided convolutions and a linear layer; GroupNorm, because it does the same on one rank and on many."""

    def __init__(self, num_classes: int, width: int = 8, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            *self._stage(3, width, kernel=5, stride=4),
            *self._stage(width, 2 * width, kernel=3, stride=2),
            *self._stage(2 * width, 4 * width, kernel=3, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, num_classes),
        )

    @staticmethod
    def _stage(inputs: int, outputs: int, kernel: int, stride: int) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        return convolution, nn.GroupNorm(4, outputs), nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._step("train", batch)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self._step("val", batch)

    def _step(self, stage: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        accuracy = (logits.argmax(1) == labels).float().mean()
        values = {f"{stage}/loss": loss, f"{stage}/accuracy": accuracy}
        self.log_dict(values, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=len(labels))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
