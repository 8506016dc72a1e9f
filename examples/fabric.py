"""CachedDataset and CachedLoader with Fabric: your own loop on several ranks, which share one cache.

    python examples/fabric.py                  # one rank
    python examples/fabric.py --devices 2      # two ranks: each sample is loaded once, whichever rank asks for it

`defer=True` opens nothing before the ranks have found each other. Then every rank calls `share`.
"""

import argparse
import time

import torch
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy

import photos
from lightning_stocache import CachedDataset, CachedLoader
from model import ConvNet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="ranks (1)")
    parser.add_argument("--epochs", type=int, default=3, help="(3)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # see train.py
    photos.make()
    fabric = Fabric(accelerator="cpu", devices=chosen.devices, strategy="ddp" if chosen.devices > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    dataset = CachedDataset(photos.images("train"), budget="auto", defer=True)
    dataset.share()
    loader = CachedLoader(dataset, batch_size=64, shuffle=True, num_workers=2, locality=True)
    loader = fabric.setup_dataloaders(loader)
    module = ConvNet(num_classes=2)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=3e-3))

    before = dataset.counters.totals()
    for epoch in range(chosen.epochs):
        start = time.perf_counter()
        for batch in loader:
            images, labels = photos.normalise(batch)
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        fabric.barrier()  # the counters are those of all ranks: wait until each has ended its epoch
        counts, before = dataset.counters.totals() - before, dataset.counters.totals()
        hit_rate, seconds = counts.hits / counts.served, time.perf_counter() - start
        fabric.print(f"epoch {epoch}: hit rate {hit_rate:.1%}, {counts.fills:,} fills, {seconds:.1f} s")
        fabric.barrier()
    dataset.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
