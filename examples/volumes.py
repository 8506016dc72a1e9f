"""Volumes: MONAI's dictionary transforms, with its MetaTensor, from files to random crops.

    pip install monai                                      # once
    python examples/volumes.py                             # epoch one loads files, later epochs read from memory
    python examples/volumes.py --devices 2 --strategy ddp  # two ranks, one cache

The transforms are split at the first random one, as MONAI's own CacheDataset does it: volumes of varying size are
cached as they come out of the deterministic ones; crops and flips run after the cache, in the workers.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from lightning_stocache import StochasticCache
from training import Loads, end, fit, parser

KEYS = ["image", "label"]


class Noted:
    """Lets a row of file names through, and counts it."""

    def __init__(self, loads: Loads) -> None:
        self.loads = loads

    def __call__(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        self.loads.note()
        return row


def make(samples: int) -> list[dict[str, str]]:
    """Volumes of many sizes with a bright ball, and where the ball is; those that are missing are made."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_stocache" / "volumes"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{key: str(folder / f"{key}{number:04}.npy") for key in KEYS} for number in range(samples)]
    for number, row in enumerate(rows):
        if os.path.exists(row["label"]):
            continue
        chance = np.random.default_rng(number)
        shape = chance.integers(40, 64, 3)
        centre = shape * chance.uniform(0.3, 0.7, 3)
        away = np.indices(tuple(shape)) - centre[:, None, None, None]
        inside = (away**2).sum(0) < 100
        image = (300 * inside + chance.normal(500, 100, shape)).astype(np.int16)
        for key, volume in (("image", image), ("label", inside.astype(np.uint8))):
            # Written beside its place and moved there: whoever looks finds a whole file or none.
            draft = f"{row[key]}.{os.getpid()}.part.npy"
            np.save(draft, volume)
            os.replace(draft, row[key])
    return rows


def steps(loads: Loads) -> Any:
    """Cached up to the crop, random from there on."""
    import monai.transforms

    transforms: Any = monai.transforms  # to type checkers it exports no name
    return transforms.Compose(
        [
            Noted(loads),
            transforms.LoadImaged(KEYS),
            transforms.EnsureChannelFirstd(KEYS, channel_dim="no_channel"),
            transforms.ScaleIntensityd("image"),
            transforms.RandCropByPosNegLabeld(KEYS, "label", spatial_size=(24, 24, 24), num_samples=2),
            transforms.RandFlipd(KEYS, prob=0.5, spatial_axis=0),
        ]
    )


class Segmenter(LightningModule):
    """Two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 1, 1))

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        image, label = (torch.as_tensor(batch[key]).as_subclass(Tensor) for key in KEYS)
        return binary_cross_entropy_with_logits(self.net(image), label.float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    chosen, loads = parser(__doc__, samples=120, batch_size=4).parse_args(), Loads()
    if importlib.util.find_spec("monai") is None:
        raise SystemExit("This example needs MONAI: pip install monai")
    import monai.data

    data: Any = monai.data
    volumes = data.Dataset(make(chosen.samples), steps(loads))
    loader = data.DataLoader(volumes, batch_size=chosen.batch_size, shuffle=True, num_workers=chosen.workers)
    fit(Segmenter(), loader, chosen, loads, [StochasticCache(budget=chosen.budget)])
    end()


if __name__ == "__main__":
    main()
