"""Samples of any kind, which are cached as records: photographs of many sizes, text, molecules.

    python examples/benchmarks/records.py                      # about 15 minutes on 2 cores
    python examples/benchmarks/records.py --only imagenet --photographs 2000

imagenet  samples/s of warm epochs over JPEG files around 500x375, with RandomResizedCrop(224) and flip in the workers:
          on images of PIL with ToTensor and Normalize after it (the usual recipe, v1), or on tensors of bytes (v2). The
          list holds the decoded photographs in memory, with the same steps in a plain DataLoader: the best that a cache
          behind a DataLoader can give (its workers take fresh memory for each batch; a CachedLoader's do not). MONAI is
          its `CacheDataset`; DataLoader is the recipe without a cache; the last row is what the random steps take
small     1000 samples/s of warm epochs over reviews (a string, 5 to 200 tokens as a list, a label) and molecules (four
          tensors and a string), collated by padding or to one graph, or not at all. The lists copy each sample that is
          read, as a cache must: by `copy.deepcopy`, or key by key. MONAI's hands out its own samples, not copies

There is no gain where random steps on the CPU take all the time: compare the two recipes. What is cached of the usual
one is decoding, less than half of it. Nor is there any where samples are made in no time, as these reviews are.
"""

import argparse
import copy
import importlib.util
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import sources  # noqa: F401  lets the examples be found
import torch
from measure import Report, Spread, cell, fresh, listed, parser, rounds, thousands, warm_epochs
from sources import Then, make_loader, monai_dataset
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from imagenet import MEAN, STD, make
from lightning_stocache import CachedDataset
from text import Reviews, padded

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
BOUND, NONE, ALONE = "list", "DataLoader", "the steps alone, no worker"
SYMBOLS = ("", "H", "He", "Li", "Be", "B", "C", "N", "O", "F")


# ---- photographs ----


def photographs_loader(way: str, recipe: str, samples: int, batch: int, workers: int) -> DataLoader[Any]:
    """A loader of photographs of both classes."""
    before, after = RECIPES[recipe]
    compose = v2.Compose if recipe.endswith("v2") else v1.Compose
    whole, random = compose([*before, *after]), compose(after)
    folder = ImageFolder(str(make(samples)), whole if way in ("DataLoader", "CachedLoader") else compose(before))
    step = len(folder) / samples
    photographs: Any = Subset(folder, [int(number * step) for number in range(samples)])

    def on_image(sample: Any) -> Any:
        return random(sample[0]), sample[1]

    if way == "CachedLoader":
        photographs = CachedDataset(photographs)
    elif way == "list":
        photographs = Then([photographs[index] for index in range(samples)], on_image)
    elif way == "MONAI":
        photographs = monai_dataset(photographs, on_image)
    return make_loader(way, photographs, batch, workers)


def warm_photographs(way: str, recipe: str, samples: int, batch: int, workers: int) -> dict[str, float]:
    """Warm epochs: the first one fills, the second is left out."""
    loader = photographs_loader(way, recipe, samples, batch, workers)
    return warm_epochs(loader, samples, 1 if way == NONE else 2, 3)


def steps_alone(recipe: str, samples: int) -> dict[str, float]:
    """The random steps alone, on decoded photographs, in one process."""
    listed: Any = photographs_loader("list", recipe, samples, 1, 0).dataset
    listed[0]  # the first one loads code
    start = time.process_time()
    for index in range(samples):
        listed[index]
    used = (time.process_time() - start) / samples
    return {"rate": 1 / used, "cpu": 1e6 * used}


def measure_photographs(report: Report, chosen: argparse.Namespace) -> dict[str, Any]:
    samples, batch, workers = chosen.photographs or (48 if report.quick else 600), min(chosen.batch, 64), chosen.workers
    ways = ["DataLoader", "CachedLoader", "list", *(["MONAI"] if importlib.util.find_spec("monai") else [])]
    fresh(make, samples)
    arms = {
        (recipe, way): partial(fresh, warm_photographs, way, recipe, samples, batch, workers)
        for recipe in RECIPES
        for way in ways
    }
    arms |= {(recipe, ALONE): partial(fresh, steps_alone, recipe, samples) for recipe in RECIPES}
    found = rounds(arms, report.rounds)
    rows = []
    for recipe, way in itertools.product(RECIPES, [*ways, ALONE]):
        rates, bound, none = ([run["rate"] for run in found[recipe, other]] for other in (way, BOUND, NONE))
        ratios = [f"{Spread.ratio(rates, others):.2f}" for others in (bound, none)]
        runs = found[recipe, way]
        rows.append([f"{recipe}: {way}", cell(runs, "rate", ".0f"), cell(runs, "cpu", ".0f"), *ratios])
    columns = ("", "samples/s", "CPU us/sample", "of the list", "times uncached")
    report.table(f"{samples} photographs around 500x375, RandomResizedCrop(224), {workers} workers", columns, rows)
    return {"runs": listed(found, "recipe", "way")}


# ---- text and molecules, of a few hundred bytes ----


class Uncounted:
    """In the place of the examples' count of loads."""

    def note(self) -> None:
        pass


class Molecules(Dataset[dict[str, Any]]):
    """Atoms along a chain with some rings, and bonds between those that are near: four tensors and a string."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        chance = torch.Generator().manual_seed(index)
        atoms = 5 + index % 30
        z = torch.randint(1, 10, (atoms,), generator=chance)
        pos = torch.randn(atoms, 3, generator=chance).cumsum(0)
        near = torch.cdist(pos, pos) < 2
        edge_index = near.fill_diagonal_(False).nonzero().T.contiguous()
        formula = "".join(SYMBOLS[number] for number in z.tolist())
        return {"z": z, "pos": pos, "edge_index": edge_index, "y": z.float().mean()[None], "formula": formula}


def one_graph(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """All atoms and bonds of a batch; `batch` has the number of each atom's molecule."""
    sizes = torch.tensor([len(sample["z"]) for sample in samples])
    starts = (sizes.cumsum(0) - sizes).tolist()
    edges = [sample["edge_index"] + start for sample, start in zip(samples, starts, strict=True)]
    together = {key: torch.cat([sample[key] for sample in samples]) for key in ("z", "pos", "y")}
    batch = torch.arange(len(samples)).repeat_interleave(sizes)
    formulas = [sample["formula"] for sample in samples]
    return together | {"edge_index": torch.cat(edges, dim=1), "batch": batch, "formula": formulas}


def by_hand(sample: dict[str, Any]) -> dict[str, Any]:
    """The copy that somebody writes who knows the samples."""
    made = dict(sample)
    for key, value in sample.items():
        if isinstance(value, torch.Tensor):
            made[key] = value.clone()
        elif isinstance(value, list):
            made[key] = value.copy()
    return made


COLLATE: dict[str, Callable[[list[Any]], Any]] = {"text": padded, "molecules": one_graph}
COPIES: dict[str, Callable[[Any], Any]] = {"list, deepcopy": copy.deepcopy, "list, by hand": by_hand}


def warm_small(way: str, name: str, collated: bool, samples: int, batch: int, workers: int) -> dict[str, float]:
    uncounted: Any = Uncounted()
    read: Any = Reviews(samples, uncounted) if name == "text" else Molecules(samples)
    if way == "CachedLoader":
        read = CachedDataset(read)
    elif way == "MONAI":
        read = monai_dataset(read)
    else:
        read = Then([read[index] for index in range(samples)], COPIES[way])
    loader = make_loader(way, read, batch, workers, collate_fn=COLLATE[name] if collated else list)
    return warm_epochs(loader, samples, 2, 5)


def measure_small(report: Report, chosen: argparse.Namespace) -> dict[str, Any]:
    samples = chosen.small or (256 if report.quick else 8000)
    ways = ["CachedLoader", *(["MONAI"] if importlib.util.find_spec("monai") else []), *COPIES]
    # Not collated with workers, all others send every tensor by a descriptor of its own: a thousand samples/s.
    cases = [(name, *how) for name in COLLATE for how in ((True, 0), (True, chosen.workers), (False, 0))]
    arms = {
        (*case, way): partial(fresh, warm_small, way, *case[:2], samples, chosen.batch, case[2])
        for case in cases
        for way in ways
    }
    found = rounds(arms, report.rounds)
    rows = []
    for (name, collated, workers, way), runs in found.items():
        rates = [run["rate"] for run in runs]
        others = [found.get((name, collated, workers, other)) for other in ("MONAI", *COPIES)]
        ratios = [f"{Spread.ratio(rates, (run['rate'] for run in other)):.2f}" if other else "" for other in others]
        what = name if collated else f"{name}, not collated"
        rows.append([f"{what}: {way}", workers, thousands(rates), cell(runs, "cpu", ".1f"), *ratios])
    columns = ("", "workers", "1000 samples/s", "CPU us/sample", "of MONAI", *(f"of the {way}" for way in COPIES))
    report.table(f"{samples} small samples, batches of {chosen.batch}, warm", columns, rows)
    return {"runs": [{"arm": list(map(str, arm)), "rounds": runs} for arm, runs in found.items()]}


PARTS = {"imagenet": measure_photographs, "small": measure_small}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="some of the parts")
    options.add_argument("--workers", type=int, default=2, help="of the loaders (2)")
    options.add_argument("--batch", type=int, default=64, help="samples of a batch (64)")
    options.add_argument("--photographs", type=int, help="JPEG files (600; quick: 48)")
    options.add_argument("--small", type=int, help="reviews, and molecules (8000; quick: 256)")
    chosen = options.parse_args(arguments)
    report = Report("records", chosen)
    report.save(**{part: PARTS[part](report, chosen) for part in chosen.only})


if __name__ == "__main__":
    main()
