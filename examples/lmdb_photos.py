"""JPEG files packed into one LMDB, and trained on behind a cache: nothing is read twice from thousands of small files.

    python examples/lmdb_photos.py                    # makes 4,000 files once, packs them, trains three epochs
    python examples/lmdb_photos.py --samples 800      # in a few seconds

The first epoch reads the LMDB and fills the cache, later ones read memory. The same command again packs nothing.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import photos
from lightning_stocache import CachedDataset, CachedLoader, LMDBSource
from lightning_stocache.source.pack import pack
from model import ConvNet
from training import Loads

SMALL = v2.Compose([v2.PILToTensor(), v2.Resize(96, antialias=True)])


class Counted:
    """The transform that is cached, counted: once for each sample that is loaded."""

    def __init__(self, loads: Loads) -> None:
        self.loads = loads

    def __call__(self, image: Any) -> Tensor:
        self.loads.note()
        small: Tensor = SMALL(image)
        return small


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=4000, help="of the training set, at most 4000")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--output", type=Path, default=Path("photos.lmdb"), help="the LMDB (default: %(default)s)")
    chosen = options.parse_args()
    torch.set_num_threads(1)  # see train.py
    photos.make(train_files=chosen.samples, val_files=2)
    files = Subset(ImageFolder(str(photos.folder_of(None) / "train")), range(chosen.samples))

    start = time.perf_counter()
    packed = pack(files, chosen.output, encoded=True, workers=2, progress=True)
    seconds, mebibytes = time.perf_counter() - start, chosen.output.stat().st_size / 2**20
    print(f"packed {packed:,} of {chosen.samples:,} files: {chosen.output}, {mebibytes:.1f} MiB, {seconds:.1f} s")

    loads = Loads()
    dataset = CachedDataset(LMDBSource(chosen.output, transform=Counted(loads)), budget="auto")
    loader = CachedLoader(dataset, batch_size=chosen.batch_size, shuffle=True, num_workers=2)
    model = ConvNet(num_classes=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(chosen.epochs):
        before, start, waited = loads.count, time.perf_counter(), 0.0
        batches = iter(loader)
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            waited += time.perf_counter() - asked
            if batch is None:
                break
            images, labels = photos.normalise(batch)
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds = time.perf_counter() - start
        loaded = loads.count - before
        print(
            f"epoch {epoch}: the source loaded {loaded} samples, {seconds:.1f} s, {waited:.2f} of them waiting for data"
        )


if __name__ == "__main__":  # spawned workers import this file
    main()
