"""The part `imagenet` of records.py: photographs of many sizes with the usual random crop."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import sources  # noqa: F401  lets `imagenet` be found, the example that makes the files
from footprint import cpu_seconds
from measure import Report, Spread, epoch_seconds, fresh, rounds
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from imagenet import MEAN, STD, make
from lightning_stocache import CachedDataset, CachedLoader

__all__ = ["RECIPES", "measure_photographs"]

Step = Callable[[Any], Any]
RECIPES: dict[str, tuple[list[Step], list[Step]]] = {  # the steps before the first random one, and the others
    "PIL, v1": (
        [],
        [v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)],
    ),
    "tensors, v2": (
        [v2.PILToTensor()],
        [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()],
    ),
}
WAYS = ("DataLoader", "CachedLoader", "list", "MONAI")
BOUND, NONE, ALONE = "list", "DataLoader", "the steps alone, no worker"


class Then(Dataset[Any]):
    """Decoded photographs in a list, and the random steps for each: no cache can be faster than that."""

    def __init__(self, samples: list[Any], random: Step) -> None:
        self.samples, self.random = samples, random

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        image, label = self.samples[index]
        return self.random(image), label


def monai_dataset(photographs: Dataset[Any], samples: int, random: Step) -> Dataset[Any]:
    from monai.data.dataset import CacheDataset
    from monai.transforms.compose import Compose
    from monai.transforms.transform import Randomizable, Transform

    class Load(Transform):
        def __call__(self, index: int) -> Any:
            return photographs[index]

    class Random(Randomizable, Transform):
        def __call__(self, sample: Any) -> Any:
            return random(sample[0]), sample[1]

    return CacheDataset(range(samples), Compose([Load(), Random()], map_items=False), progress=False)


def loader(way: str, recipe: str, samples: int, batch: int, workers: int) -> DataLoader[Any]:
    """Over the first so many photographs of both classes."""
    before, after = RECIPES[recipe]
    compose = v2.Compose if recipe.endswith("v2") else v1.Compose
    whole, random = compose([*before, *after]), compose(after)
    folder = ImageFolder(str(make(samples)), whole if way in ("DataLoader", "CachedLoader") else compose(before))
    step = len(folder) / samples
    photographs: Dataset[Any] = Subset(folder, [int(number * step) for number in range(samples)])
    kind: Callable[..., DataLoader[Any]] = DataLoader
    if way == "CachedLoader":
        photographs, kind = CachedDataset(photographs), CachedLoader
    elif way == "list":
        photographs = Then([photographs[index] for index in range(samples)], random)
    elif way == "MONAI":
        photographs = monai_dataset(photographs, samples, random)
    return kind(photographs, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def warm(way: str, recipe: str, samples: int, batch: int, workers: int) -> dict[str, float]:
    """Samples/s and CPU microseconds per sample of warm epochs: the first one fills, the second is left out."""
    batches = loader(way, recipe, samples, batch, workers)
    for _ in range(1 if way == NONE else 2):
        epoch_seconds(batches)
    cpu, seconds = cpu_seconds(), [epoch_seconds(batches) for _ in range(3)]
    used = 1e6 * (cpu_seconds() - cpu) / len(seconds) / samples
    return {"rate": samples / Spread.of(seconds).median, "cpu": used}


def alone(recipe: str, samples: int) -> dict[str, float]:
    """CPU microseconds per sample of the random steps alone, on decoded photographs, in one process."""
    listed: Any = loader("list", recipe, samples, 1, 0).dataset
    listed[0]  # the first one loads code
    start = time.process_time()
    for index in range(samples):
        listed[index]
    used = (time.process_time() - start) / samples
    return {"rate": 1 / used, "cpu": 1e6 * used}


def measure_photographs(report: Report, chosen: argparse.Namespace) -> dict[str, Any]:
    samples, batch, workers = chosen.photographs or (48 if report.quick else 600), min(chosen.batch, 64), chosen.workers
    ways = [way for way in WAYS if way != "MONAI" or importlib.util.find_spec("monai")]
    fresh(make, samples)
    arms = {
        (recipe, way): partial(fresh, warm, way, recipe, samples, batch, workers) for recipe in RECIPES for way in ways
    }
    arms |= {(recipe, ALONE): partial(fresh, alone, recipe, samples) for recipe in RECIPES}
    found = rounds(arms, report.rounds)
    rows = []
    for recipe, way in itertools.product(RECIPES, [*ways, ALONE]):
        runs = found[recipe, way]
        rates, bound, none = ([run["rate"] for run in found[recipe, other]] for other in (way, BOUND, NONE))
        cells = [f"{spread:.2f}" for spread in (Spread.ratio(rates, bound), Spread.ratio(rates, none))]
        rows.append([f"{recipe}: {way}", f"{Spread.of(rates):.0f}", f"{Spread.of(r['cpu'] for r in runs):.0f}", *cells])
    columns = ("", "samples/s", "CPU us/sample", "of the list", "times uncached")
    report.table(f"{samples} photographs around 500x375, RandomResizedCrop(224), {workers} workers", columns, rows)
    return {"runs": [{"recipe": recipe, "way": way, "rounds": runs} for (recipe, way), runs in found.items()]}
