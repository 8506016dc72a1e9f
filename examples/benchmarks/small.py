"""The part `small` of records.py: samples of a few hundred bytes, as text and molecules are."""

from __future__ import annotations

import argparse
import copy
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import sources  # noqa: F401  lets the examples be found
import torch
from footprint import cpu_seconds
from measure import Report, Spread, epoch_seconds, fresh, rounds
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import CachedDataset, CachedLoader
from text import Reviews, padded

__all__ = ["measure_small"]

SYMBOLS = ("", "H", "He", "Li", "Be", "B", "C", "N", "O", "F")


class Uncounted:
    """In the place of the examples' count."""

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
    """All atoms and bonds of a batch; `batch` says which molecule an atom belongs to."""
    sizes = torch.tensor([len(sample["z"]) for sample in samples])
    starts = (sizes.cumsum(0) - sizes).tolist()
    edges = [sample["edge_index"] + start for sample, start in zip(samples, starts, strict=True)]
    together = {key: torch.cat([sample[key] for sample in samples]) for key in ("z", "pos", "y")}
    batch = torch.arange(len(samples)).repeat_interleave(sizes)
    formulas = [sample["formula"] for sample in samples]
    return together | {"edge_index": torch.cat(edges, dim=1), "batch": batch, "formula": formulas}


class Copied(Dataset[Any]):
    """A list whose samples are copied when they are read, as a cache must: what is done to one stays with it."""

    def __init__(self, samples: list[Any], copied: Callable[[Any], Any]) -> None:
        self.samples, self.copied = samples, copied

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.copied(self.samples[index])


def by_hand(sample: dict[str, Any]) -> dict[str, Any]:
    """What somebody writes who knows the samples."""
    made = dict(sample)
    for key, value in sample.items():
        if isinstance(value, torch.Tensor):
            made[key] = value.clone()
        elif isinstance(value, list):
            made[key] = value.copy()
    return made


def monai_dataset(source: Any) -> Dataset[Any]:
    from monai.data.dataset import CacheDataset
    from monai.transforms.compose import Compose
    from monai.transforms.transform import Transform

    class Load(Transform):
        def __call__(self, index: int) -> Any:
            return source[index]

    return CacheDataset(range(len(source)), Compose([Load()], map_items=False), progress=False)


def source(name: str, samples: int) -> Dataset[Any]:
    uncounted: Any = Uncounted()
    return Reviews(samples, uncounted) if name == "text" else Molecules(samples)


COLLATE: dict[str, Callable[[list[Any]], Any]] = {"text": padded, "molecules": one_graph}
COPIES: dict[str, Callable[[Any], Any]] = {"list, deepcopy": copy.deepcopy, "list, by hand": by_hand}


def warm(way: str, name: str, collated: bool, samples: int, batch: int, workers: int) -> dict[str, float]:
    """Samples/s and CPU microseconds per sample of warm epochs."""
    read = source(name, samples)
    if way == "CachedLoader":
        read = CachedDataset(read)
    elif way == "MONAI":
        read = monai_dataset(read)
    else:
        read = Copied([read[index] for index in range(samples)], COPIES[way])
    kind: Callable[..., DataLoader[Any]] = CachedLoader if way == "CachedLoader" else DataLoader
    settings: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    batches = kind(read, batch, shuffle=True, collate_fn=COLLATE[name] if collated else list, **settings)
    for _ in range(2):
        epoch_seconds(batches)
    cpu, seconds = cpu_seconds(), [epoch_seconds(batches) for _ in range(5)]
    used = 1e6 * (cpu_seconds() - cpu) / len(seconds) / samples
    return {"rate": samples / Spread.of(seconds).median, "cpu": used}


def measure_small(report: Report, chosen: argparse.Namespace) -> dict[str, Any]:
    samples = chosen.small or (256 if report.quick else 8000)
    ways = [way for way in ("CachedLoader", "MONAI", *COPIES) if way != "MONAI" or importlib.util.find_spec("monai")]
    # Not collated with workers, all others send every tensor by a descriptor of its own: a thousand samples/s.
    cases = [(name, *how) for name in COLLATE for how in ((True, 0), (True, chosen.workers), (False, 0))]
    arms = {
        (*case, way): partial(fresh, warm, way, *case[:2], samples, chosen.batch, case[2])
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
        cpu = f"{Spread.of(run['cpu'] for run in runs):.1f}"
        rows.append([f"{what}: {way}", workers, f"{Spread.of(x / 1000 for x in rates):.1f}", cpu, *ratios])
    columns = ("", "workers", "1000 samples/s", "CPU us/sample", "of MONAI", *(f"of the {way}" for way in COPIES))
    report.table(f"{samples} small samples, batches of {chosen.batch}, warm", columns, rows)
    return {"runs": [{"arm": list(map(str, arm)), "rounds": runs} for arm, runs in found.items()]}
