"""A stream of tar files: epoch one reads them, later epochs come from memory.

    python examples/stream.py                    # all of it fits
    python examples/stream.py --budget 3MiB      # it does not fit: it passes through, and says how large it is
    python examples/stream.py --lightning        # the same by one callback: StochasticCache(streams=True)

Each line tells what was read from the files in an epoch.
"""

import argparse
import io
import logging
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lightning_stocache import CachedLoader, CachedStream

SHARDS, SIDE = 8, 64


class Shards(IterableDataset[Any]):
    """Images of tar files, one after the other; every worker reads files of its own."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.tar"))
        self.reads: Any = torch.zeros(1, dtype=torch.int64).share_memory_()  # counted by all workers

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        info: Any = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for file in self.files[first::step]:
            with tarfile.open(file) as tar:
                for member in tar:
                    content: Any = tar.extractfile(member)
                    time.sleep(0.0005)  # a drive far away
                    self.reads += 1
                    pixels = torch.frombuffer(bytearray(content.read()), dtype=torch.uint8)
                    yield pixels.reshape(3, SIDE, SIDE), int(Path(member.name).stem)


def write(folder: Path, samples: int) -> None:
    """Shards of random images, named by their number."""
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, samples, SHARDS):
                content = torch.randint(0, 256, (3, SIDE, SIDE), dtype=torch.uint8).numpy().tobytes()
                entry = tarfile.TarInfo(f"{number}.bin")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def by_hand(source: Shards, options: argparse.Namespace) -> None:
    """A loop of one's own."""
    stream = CachedStream(source, budget=options.budget)
    loader = CachedLoader(stream, batch_size=64, num_workers=options.workers)
    for epoch in range(options.epochs):
        start, before = time.perf_counter(), int(source.reads)
        numbers = sorted(number for _, labels in loader for number in labels.tolist())
        seconds, reads = time.perf_counter() - start, int(source.reads) - before
        assert numbers == list(range(options.samples)), "every sample comes once in every epoch"
        print(f"epoch {epoch}: {len(numbers)} samples in {seconds:.2f} s, {reads} read from the files")
    print(stream.describe())
    loader.close()
    stream.close()


def by_callback(source: Shards, options: argparse.Namespace) -> None:
    """Lightning, with a loader that knows nothing of a cache."""
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from lightning_stocache import StochasticCache

    class Mean(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)
            self.before = 0

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            images, _ = batch
            loss: torch.Tensor = self.layer(images.float().mean((2, 3)) / 255).square().mean()
            return loss

        def on_train_epoch_end(self) -> None:
            reads = int(source.reads)
            print(f"epoch {self.current_epoch}: {reads - self.before} read from the files")
            self.before = reads

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=options.epochs,
        callbacks=[StochasticCache(budget=options.budget, streams=True)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Mean(), DataLoader(source, batch_size=64, num_workers=options.workers))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="64MiB", help="memory for what is kept (64MiB)")
    parser.add_argument("--samples", type=int, default=512, help="images of 12 KiB (512)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (2)")
    parser.add_argument("--epochs", type=int, default=4, help="how often all of it is read (4)")
    parser.add_argument("--lightning", action="store_true", help="train with Lightning")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.samples)
        (by_callback if options.lightning else by_hand)(Shards(Path(folder)), options)


if __name__ == "__main__":  # spawned workers import this file
    main()
