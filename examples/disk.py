"""A cache on a disk, from job to job: one that is killed, one that goes on, one that starts warm, and a flipped bit.

    python examples/disk.py            # a few seconds; the cache lies in a folder that is removed at the end

Each job is a process of its own, and reads all samples for two epochs. What is printed are loads of the source, counted
by itself: a sample that the cache has is not loaded.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_stocache import CachedDataset, CachedLoader

SAMPLES = 400


class Slow(Dataset[Any]):
    """Images that take two milliseconds each; every load is counted."""

    def __init__(self, log: str) -> None:
        self.log = log

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < SAMPLES:
            raise IndexError(index)
        with open(self.log, "ab") as log:
            log.write(b".")
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=generator), index


def job(folder: str) -> None:
    """Two epochs; each sample is compared with what the source would have given."""
    dataset = CachedDataset(Slow(f"{folder}/loads"), budget="1GiB", dir=folder, name="example")
    for _ in range(2):
        for images, labels in CachedLoader(dataset, batch_size=50, shuffle=True, num_workers=2):
            generator = torch.Generator().manual_seed(int(labels[0]))
            expected = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=generator)
            assert torch.equal(images[0], expected), "a wrong sample"
    dataset.close()


def run(title: str, folder: str, killed_after: int | None = None) -> None:
    """Run a job, and say what it has loaded."""
    loads = Path(folder, "loads")
    before = loads.stat().st_size if loads.exists() else 0
    process = multiprocessing.Process(target=job, args=(folder,))
    process.start()
    if killed_after is not None:
        while not loads.exists() or loads.stat().st_size - before < killed_after:
            time.sleep(0.005)
        os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    print(f"{title:<40} loads {loads.stat().st_size - before:>4} of {2 * SAMPLES}", flush=True)


def flip_a_bit(folder: str) -> None:
    """Change one bit in the middle of the cache's file."""
    [path] = [path for path in Path(folder).glob("lsc-*-example") if not path.name.endswith(".locks")]
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 8]))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="stocache-disk-") as folder:
        run("a job that is killed in its first epoch", folder, killed_after=200)
        run("the next one loads the rest", folder)
        run("and the next one starts warm", folder)
        flip_a_bit(folder)
        run("a bit of the file has flipped", folder)


if __name__ == "__main__":
    main()
