"""The third door: a plain PyTorch loop over a cached dataset, without Lightning's Trainer.

python examples/plain_pytorch.py
"""

import time

import torch
from torch.nn.functional import cross_entropy

import photos
from lightning_stocache import CachedDataset, CachedLoader, CacheMeter
from model import ConvNet


def main() -> None:
    torch.set_num_threads(1)  # see train.py
    photos.make()
    dataset = CachedDataset(photos.images("train"), budget="auto")
    loader = CacheMeter(CachedLoader(dataset, batch_size=64, shuffle=True, num_workers=2))
    model = ConvNet(num_classes=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(4):
        start = time.perf_counter()
        losses = []
        for batch in loader:
            images, labels = photos.normalise(batch)
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        seconds, metrics = time.perf_counter() - start, loader.epoch()
        hit_rate = 100 * metrics["stocache/hit_rate"]
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.3f}, hit rate {hit_rate:.0f} %, {seconds:.1f} s")


if __name__ == "__main__":  # spawned workers import this file
    main()
