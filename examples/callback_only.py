"""The callback: model and loaders as they are.

python examples/callback_only.py
"""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

import photos
from lightning_stocache import StochasticCache
from model import ConvNet


class Net(ConvNet):
    """Normalises in the model, as a project does that knows nothing of the cache."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.float() / 127.5 - 1)


def main() -> None:
    torch.set_num_threads(1)  # see train.py
    photos.make()
    train = DataLoader(photos.images("train"), batch_size=64, shuffle=True, num_workers=2)
    val = DataLoader(photos.images("val"), batch_size=64, num_workers=2)
    trainer = pl.Trainer(
        max_epochs=4,
        callbacks=[StochasticCache(budget="auto")],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Net(num_classes=2), train, val)


if __name__ == "__main__":
    main()
