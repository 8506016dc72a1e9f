"""The part of peers.py that has a transform per sample on the CPU, after the cache, in two workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from footprint import cpu_seconds
from measure import Report, Spread, epoch_seconds, fresh, rounds, thousands
from rivals import OTHERS, import_peer, make_dataset, make_loader
from sources import Pool
from torchvision.transforms import v2

from lightning_stocache import CachedDataset

__all__ = ["measure_transforms"]


def normalise(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    """Bytes to floats around zero; of a batch just as well as of a sample."""
    image, label = sample
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return image.float().div_(255).sub_(mean).div_(std), label


_CROP = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])


def crop(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    return _CROP(sample[0]), sample[1]


def run_transform(peer: str, name: str, samples: int) -> dict[str, float]:
    """Samples/s and CPU seconds per sample of warm epochs with a transform, in two workers."""
    import_peer(peer)
    transform = {"normalise": normalise, "crop": crop}[name]
    loader = make_loader(peer, make_dataset(peer, Pool(samples, (3, 224, 224)), 2, transform), 64, 2)
    for _ in range(2):
        epoch_seconds(loader)
    cpu, seconds = cpu_seconds(), [epoch_seconds(loader) for _ in range(3 if name == "normalise" else 2)]
    used = (cpu_seconds() - cpu) / (len(seconds) * samples)
    return {"rate": samples / Spread.of(seconds).median, "cpu": used}


def run_batch_transform(samples: int) -> dict[str, float]:
    """The same for normalising whole batches in the main process, behind a CachedLoader."""
    loader = make_loader("CachedLoader", CachedDataset(Pool(samples, (3, 224, 224))), 64, 2)
    epoch_seconds(loader)
    seconds = [epoch_seconds(map(normalise, loader)) for _ in range(4)]
    return {"rate": samples / Spread.of(seconds).median}


def transform_alone(samples: int) -> float:
    """CPU seconds per sample of RandomResizedCrop and flip, on samples that lie in memory."""
    images = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8)
    for number in range(samples + 64):
        if number == 64:  # the first ones load code
            start = time.process_time()
        crop((images[number % 64], 0))
    return (time.process_time() - start) / samples


def measure_transforms(report: Report, peers: list[str], quick: bool) -> dict[str, Any]:
    samples = 192 if quick else 1024
    arms: dict[Any, Callable[[], Any]] = {
        (name, peer): partial(fresh, run_transform, peer, name, samples)
        for name in ("normalise", "crop")
        for peer in peers
    }
    arms["batch"] = partial(fresh, run_batch_transform, samples)
    arms["alone"] = partial(fresh, transform_alone, samples)
    found = rounds(arms, report.rounds)
    rates = {peer: [run["rate"] for run in found["normalise", peer]] for peer in peers}
    best = [max(values) for values in zip(*(rates[peer] for peer in peers if peer in OTHERS), strict=True)]
    rates["CachedLoader, whole batches"] = [run["rate"] for run in found["batch"]]
    rows = [[peer, thousands(values), f"{Spread.ratio(values, best):.1f}"] for peer, values in rates.items()]
    columns = ("", "1000 samples/s", "times the best other")
    report.table("uint8 to normalised float32 of 3x224x224, per sample in 2 workers", columns, rows)
    rows = [["the transform alone", f"{Spread.of(1e6 * one for one in found['alone']):.0f}", "1", ""]]
    for peer in peers:
        runs = found["crop", peer]
        cpu = [run["cpu"] for run in runs]
        own = f"{Spread.ratio(cpu, found['alone']):.2f}"
        rows.append([peer, f"{Spread.of(1e6 * one for one in cpu):.0f}", own, thousands(run["rate"] for run in runs)])
    columns = ("", "CPU us/sample", "over the transform's own", "1000 samples/s")
    report.table("RandomResizedCrop(224) and flip, per sample in 2 workers", columns, rows)
    return {"runs": [{"arm": str(key), "rounds": runs} for key, runs in found.items()]}
