"""What set-up costs where reading is slow and the transform is random: it has to prove where the transform can be cut.

    python examples/benchmarks/setup.py                            # 3 minutes with samples of 0.2 s

A source that sleeps for `--seconds` at each read, and one of three kinds of code around its transform:

crop     `return self.transform(image), label`: RandomResizedCrop, the code behind it looks at nothing
looking  the same, but the code behind the transform asks for the result's shape
plain    no random step: there is nothing to cut

reads    reads of the source until the cache is open
seconds  the time of that, and as a multiple of one read

On two busy cores, with reads of one second: crop 30 reads and 30.8 s, looking 33 reads and 34.3 s, plain 8 reads and
8.5 s. Before cuts were proved by blind reads: crop 24 reads and 24.5 s, looking 24 reads and 24.5 s, plain 8.

There is no gain to be seen here: a proof costs reads, and a wrong cut costs wrong samples.
"""

import time
from contextlib import closing
from functools import partial
from typing import Any

import torch
from measure import Report, cell, fresh, parser
from torch.utils.data import Dataset
from torchvision.transforms import v2

from lightning_stocache import CachedDataset

LENGTH = 400


class Slow(Dataset[Any]):
    """Images that take their time."""

    def __init__(self, kind: str, seconds: float) -> None:
        steps = [v2.ToDtype(torch.float32, scale=True)]
        if kind != "plain":
            steps.append(v2.RandomResizedCrop(24, antialias=True))
        self.transform, self.is_looking, self.seconds = v2.Compose(steps), kind == "looking", seconds
        self.reads = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        time.sleep(self.seconds)
        image = torch.full((3, 32, 32), index % 251, dtype=torch.uint8)
        image = self.transform(image)
        if self.is_looking and image.shape[0] != 3:
            raise ValueError("no image")
        return image, index


KEYS = ("reads", "seconds", "samples")


def measured(kind: str, seconds: float) -> dict[str, float]:
    """The reads and the seconds of a set-up, also as a multiple of a read; 0 if the source is not cached."""
    source = Slow(kind, seconds)
    begin = time.perf_counter()
    with closing(CachedDataset(source, "64MiB")) as dataset:
        took = time.perf_counter() - begin
        if dataset.cache is None:
            took = 0.0
    return {"reads": int(source.reads), "seconds": took, "samples": took / seconds}


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--seconds", type=float, default=0.2, help="time of one read")
    report = Report("setup", arguments := options.parse_args())
    seconds = arguments.seconds / 20 if report.quick else arguments.seconds
    runs = report.measure({kind: partial(fresh, measured, kind, seconds) for kind in ("crop", "looking", "plain")})
    rows = [[kind, *(cell(found, key, ".3g") for key in KEYS)] for kind, found in runs.items()]
    report.table("Set-up of a slow source", ["source", "reads", "seconds", "times a read"], rows)
    report.save(results=runs)


if __name__ == "__main__":
    main()
