"""Samples of any kind, which are cached as records: photographs of many sizes, text, molecules.

    python examples/benchmarks/records.py                      # about 15 minutes on 2 cores
    python examples/benchmarks/records.py --only imagenet --photographs 2000

imagenet  samples/s of warm epochs over JPEG files around 500x375, with RandomResizedCrop(224) and flip in the workers:
          on images of PIL with ToTensor and Normalize after it (the usual recipe, v1), or on tensors of bytes (v2). The
          list holds the decoded photographs in memory, with the same steps in a plain DataLoader: the best that a cache
          behind a DataLoader can give (its workers take fresh memory for each batch; a CachedLoader's do not). MONAI is
          its `CacheDataset`; DataLoader is the recipe without a cache
small     1000 samples/s of warm epochs over reviews (a string, 5 to 200 tokens as a list, a label) and molecules (four
          tensors and a string), collated by padding or to one graph. The lists copy each sample that is read, as a
          cache must: by `copy.deepcopy`, or key by key. MONAI's hands out its own samples, not copies

There is no gain where random steps on the CPU take all the time: compare the two recipes. What is cached of the usual
one is decoding, less than half of it. Nor is there any where samples are made in no time, as these reviews are.
"""

import copy
import importlib.util
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import Report, Spread, cell, fresh, listed, parser, thousands, warm_epochs
from sources import Then, make_loader, monai_dataset
from torch.utils.data import Dataset

from imagenet import TRANSFORMS, make, photographs_of
from lightning_stocache import CachedDataset
from text import Reviews, padded

BATCH, WORKERS = 64, 2
RECIPES = {"PIL, v1": ("recipe", 0), "tensors, v2": ("tensors", 1)}  # of the example; the steps before a random one
BOUND, NONE = "list", "DataLoader"
MONAI = ["MONAI"] if importlib.util.find_spec("monai") else []
SYMBOLS = ("", "H", "He", "Li", "Be", "B", "C", "N", "O", "F")


# ---- photographs ----


def warm_photographs(way: str, recipe: str, samples: int) -> dict[str, float]:
    """Warm epochs of photographs of both classes: the first one fills, the second is left out."""
    name, first = RECIPES[recipe]
    whole: Any = TRANSFORMS[name]
    before, random = whole.transforms[:first], type(whole)(whole.transforms[first:])
    if way not in ("DataLoader", "CachedLoader"):
        whole = type(whole)(before) if before else None
    photographs: Any = photographs_of(samples, whole)

    def on_image(sample: Any) -> Any:
        return random(sample[0]), sample[1]

    if way == "CachedLoader":
        photographs = CachedDataset(photographs)
    elif way == "list":
        photographs = Then([photographs[index] for index in range(samples)], on_image)
    elif way == "MONAI":
        photographs = monai_dataset(photographs, on_image)
    return warm_epochs(make_loader(way, photographs, BATCH, WORKERS), samples, 1 if way == NONE else 2, 3)


def measure_photographs(report: Report, samples: int) -> dict[str, Any]:
    ways = ["DataLoader", "CachedLoader", "list", *MONAI]
    fresh(make, samples)
    arms = {
        (recipe, way): partial(fresh, warm_photographs, way, recipe, samples)
        for recipe, way in itertools.product(RECIPES, ways)
    }
    found = report.measure(arms)
    rows = []
    for recipe, way in arms:
        rates, bound, none = ([run["rate"] for run in found[recipe, other]] for other in (way, BOUND, NONE))
        ratios = [f"{Spread.ratio(rates, others):.2f}" for others in (bound, none)]
        runs = found[recipe, way]
        rows.append([f"{recipe}: {way}", cell(runs, "rate", ".0f"), cell(runs, "cpu", ".0f"), *ratios])
    columns = ("", "samples/s", "CPU us/sample", "of the list", "times uncached")
    report.table(f"{samples} photographs around 500x375, RandomResizedCrop(224), {WORKERS} workers", columns, rows)
    return {"runs": listed(found, "recipe", "way")}


# ---- text and molecules, of a few hundred bytes ----


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


def warm_small(way: str, name: str, samples: int, workers: int) -> dict[str, float]:
    read: Any = Reviews(samples) if name == "text" else Molecules(samples)
    if way == "CachedLoader":
        read = CachedDataset(read)
    elif way == "MONAI":
        read = monai_dataset(read)
    else:
        read = Then([read[index] for index in range(samples)], COPIES[way])
    return warm_epochs(make_loader(way, read, BATCH, workers, collate_fn=COLLATE[name]), samples, 2, 5)


def measure_small(report: Report, samples: int) -> dict[str, Any]:
    arms = {
        (name, workers, way): partial(fresh, warm_small, way, name, samples, workers)
        for name, workers, way in itertools.product(COLLATE, (0, WORKERS), ["CachedLoader", *MONAI, *COPIES])
    }
    found = report.measure(arms)
    rows = []
    for (name, workers, way), runs in found.items():
        rates = [run["rate"] for run in runs]
        others = [found.get((name, workers, other)) for other in ("MONAI", *COPIES)]
        ratios = [f"{Spread.ratio(rates, (run['rate'] for run in other)):.2f}" if other else "" for other in others]
        rows.append([f"{name}: {way}", workers, thousands(rates), cell(runs, "cpu", ".1f"), *ratios])
    columns = ("", "workers", "1000 samples/s", "CPU us/sample", "of MONAI", *(f"of the {way}" for way in COPIES))
    report.table(f"{samples} small samples, batches of {BATCH}, warm", columns, rows)
    return {"runs": listed(found, "name", "workers", "way")}


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--only", nargs="+", choices=("imagenet", "small"), default=("imagenet", "small"))
    options.add_argument("--photographs", type=int, help="JPEG files (600; quick: 48)")
    options.add_argument("--small", type=int, help="reviews, and molecules (8000; quick: 256)")
    chosen = options.parse_args()
    report = Report("records", chosen)
    parts = {
        "imagenet": (measure_photographs, chosen.photographs or (48 if report.quick else 600)),
        "small": (measure_small, chosen.small or (256 if report.quick else 8000)),
    }
    report.save(**{part: measure(report, samples) for part, (measure, samples) in parts.items() if part in chosen.only})


if __name__ == "__main__":
    main()
