"""Seconds per 100 batches over num_workers, batch size and augmentation, cold and warm; and where a step's time goes.

    python examples/benchmarks/workers.py                      # about 7 minutes on 2 cores
    python examples/benchmarks/workers.py --workers 0 2 4 8 --batch-sizes 32 128

The data are JPEG files (320x320, decoded and resized to 96x96); the augmentation runs per sample on the CPU, after the
cache: none, light (flip and padded crop), heavy (`RandomAffine(5, (0.1, 0.1), (0.5, 2.0))`, flip and colour jitter).
Cold is the first epoch of a CachedLoader: it loads every sample and fills. Warm is a later one. Workers do not persist,
which is DataLoader's default, so their start counts.

workers_none.png, workers_light.png, workers_heavy.png   seconds per 100 batches of the loader alone: mean and standard
              deviation of 5 runs, each in a process of its own
workers_step.png    a training step of the example's network, split into waiting for data, transfer to the device,
              forward, and backward with update; with and without pin_memory where there is a CUDA device
workers_batch.png   what a batch looks like under each augmentation

Warm and without augmentation there is nothing left for workers to do: the number of workers should not matter. Under
heavy augmentation the workers have as much to do as before, and a cache gains only what reading and decoding took.
Waiting that is hidden behind a longer step is no gain either: compare the bars as a whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import figure
import torch
from measure import Report, Spread, epoch_seconds, fresh, parser, rounds
from sources import jpegs
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from lightning_stocache import CachedDataset, CachedLoader

AUGMENTATIONS: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "light": v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(96, padding=8)]),
    "heavy": v2.Compose(
        [v2.RandomAffine(5, (0.1, 0.1), (0.5, 2.0)), v2.RandomHorizontalFlip(), v2.ColorJitter(0.3, 0.3, 0.3, 0.1)]
    ),
}
PARTS = ("waiting for data", "transfer", "forward", "backward and update")


def augment(name: str, sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    image, label = sample
    transform = AUGMENTATIONS[name]
    return (image if transform is None else transform(image)), label


def make_loader(name: str, workers: int, batch_size: int, samples: int, pin: bool = False) -> CachedLoader:
    transform = None if AUGMENTATIONS[name] is None else partial(augment, name)
    dataset = CachedDataset(jpegs(samples), transform=transform)
    # Whole batches only: they are what is counted.
    return CachedLoader(dataset, batch_size, shuffle=True, num_workers=workers, drop_last=True, pin_memory=pin)


def load(name: str, workers: int, batch_size: int, samples: int) -> dict[str, float]:
    """Seconds per 100 batches, cold and warm."""
    loader = make_loader(name, workers, batch_size, samples)
    share = 100 / len(loader)
    cold = epoch_seconds(loader) * share
    epoch_seconds(loader)  # what happens once: cold pages
    return {"cold": cold, "warm": epoch_seconds(loader) * share}


def step(workers: int, batch_size: int, samples: int, pin: bool) -> dict[str, dict[str, float]]:
    """Milliseconds per step in each of its parts, cold and warm."""
    from model import ConvNet

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ConvNet(num_classes=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = torch.zeros(batch_size, 3, 96, 96, device=device), torch.zeros(batch_size, dtype=torch.long)
    for _ in range(3):  # what happens once: kernels are chosen, the optimizer makes its state
        cross_entropy(model(images), labels.to(device)).backward()
        optimizer.step()
    loader = make_loader("none", workers, batch_size, samples, pin)
    found = {"cold": one_epoch(loader, model, optimizer, device)}
    one_epoch(loader, model, optimizer, device)
    return found | {"warm": one_epoch(loader, model, optimizer, device)}


def one_epoch(loader: Any, model: Any, optimizer: Any, device: torch.device) -> dict[str, float]:
    seconds = dict.fromkeys(PARTS, 0.0)
    batches, moment = iter(loader), time.perf_counter()

    def lap(part: str) -> None:
        nonlocal moment
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds[part] += now - moment
        moment = now

    for images, labels in batches:
        lap("waiting for data")
        images = images.to(device, non_blocking=True).float().div(127.5).sub(1)
        labels = labels.to(device, non_blocking=True)
        lap("transfer")
        loss = cross_entropy(model(images), labels)
        lap("forward")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lap("backward and update")
    return {part: 1000 * one / len(loader) for part, one in seconds.items()}


def measure_loader(report: Report, workers: list[int], sizes: list[int], samples: int) -> dict[Any, Any]:
    arms = {
        (name, size, number): partial(fresh, load, name, number, size, max(samples, 2 * size))
        for name in AUGMENTATIONS
        for size in sizes
        for number in workers
    }
    found = rounds(arms, report.rounds)
    rows = []
    for (name, size, number), runs in found.items():
        cold, warm = (Spread.of(run[key] for run in runs) for key in ("cold", "warm"))
        cells = [f"{one.mean:.3f} +- {one.deviation:.3f}" for one in (cold, warm)]
        gain = f"{Spread.ratio(cold.values, warm.values):.1f}"
        rows.append([f"{name}, batch {size}, {number} workers", *cells, gain])
    columns = ("augmentation, batch size, workers", "cold, s", "warm, s", "cold / warm")
    report.table("Seconds per 100 batches, mean and standard deviation", columns, rows)
    for name in AUGMENTATIONS:
        draw_loader(report, name, found, workers, sizes)
    return found


def draw_loader(report: Report, name: str, found: Any, workers: list[int], sizes: list[int]) -> None:
    made, axes = figure.new(1, 2, width=4.4, height=3.7, sharey=True)
    for axis, key in zip(axes[0], ("cold", "warm"), strict=True):
        for place, size in enumerate(sizes):
            spreads = [Spread.of(run[key] for run in found[name, size, number]) for number in workers]
            means = [spread.mean for spread in spreads]
            # The axis is logarithmic, and a bar that ends below zero could not be drawn.
            lower = [min(spread.deviation, 0.9 * spread.mean) for spread in spreads]
            axis.errorbar(
                [at + 0.04 * (place - (len(sizes) - 1) / 2) for at in range(len(workers))],
                means,
                yerr=[lower, [spread.deviation for spread in spreads]],
                fmt=figure.MARKS[place] + "-",
                color=figure.COLOURS[place],
                linewidth=1.2,
                label=f"batches of {size}",
            )
        figure.logarithmic(axis)
        axis.set_xticks(range(len(workers)), workers)
        axis.set_xlabel("num_workers")
        axis.set_title({"cold": "cold: epoch one loads and fills", "warm": "warm: fully cached"}[key], loc="left")
    axes[0, 0].set_ylabel("seconds per 100 batches (log)")
    figure.legend(made, axes[0, 0], len(sizes))
    words = {"none": "No augmentation", "light": "Light augmentation", "heavy": "Heavy augmentation"}[name]
    title = f"{words} (mean of {report.rounds} runs, bars: standard deviation)"
    figure.save(made, report.folder / f"workers_{name}.png", title, report.machine)


def measure_step(report: Report, workers: list[int], sizes: list[int], samples: int) -> dict[Any, Any]:
    pins = (False, True) if torch.cuda.is_available() else (False,)
    if len(pins) == 1:
        report.say("There is no CUDA device: pin_memory is left out, and transfer is the conversion to floats alone.")
    numbers, sizes = sorted({workers[0], workers[-1]}), sizes[:: max(len(sizes) - 1, 1)] if report.quick else sizes
    arms = {
        (size, number, pin): partial(fresh, step, number, size, max(samples, 2 * size), pin)
        for size in sizes
        for number in numbers
        for pin in pins
    }
    found = rounds(arms, report.rounds)
    bars, rows = [], []
    for (size, number, pin), runs in found.items():
        for key in ("cold", "warm"):
            parts = {part: Spread.of(run[key][part] for run in runs) for part in PARTS}
            total = Spread.of(sum(run[key].values()) for run in runs)
            bars.append((size, number, pin, key, parts, total))
            name = f"batch {size}, {number} workers{', pinned' * pin}, {key}"
            cells = [f"{one.mean:.1f}" for one in parts.values()]
            rows.append([name, *cells, f"{total.mean:.1f} +- {total.deviation:.1f}"])
    report.table("Milliseconds per step, mean (and standard deviation)", ("", *PARTS, "step"), rows)
    draw_step(report, bars, sizes)
    return found


def draw_step(report: Report, bars: list[Any], sizes: list[int]) -> None:
    made, axes = figure.new(1, len(sizes), width=max(2.6, 9 / len(sizes)), height=3.7)
    for axis, size in zip(axes[0], sizes, strict=True):
        shown = [bar for bar in bars if bar[0] == size]
        bottoms = [0.0] * len(shown)
        for part, colour in zip(PARTS, (1, 4, 5, 0), strict=True):
            heights = [bar[4][part].mean for bar in shown]
            axis.bar(range(len(shown)), heights, 0.7, bottoms, color=figure.COLOURS[colour], label=part)
            bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
        ends = [bar[5].deviation for bar in shown]
        axis.errorbar(range(len(shown)), bottoms, yerr=ends, fmt="none", color="black", linewidth=1)
        names = [f"{number} workers\n{'pinned ' * pin}{key}" for _, number, pin, key, *_ in shown]
        axis.set_xticks(range(len(shown)), names, fontsize=8, rotation=60 if len(sizes) > 2 else 0)
        axis.set_title(f"batches of {size}", loc="left")
        axis.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel("milliseconds per step")
    figure.legend(made, axes[0, 0], len(PARTS))
    title = f"Where a step's time goes (mean of {report.rounds} runs, bars: standard deviation of the whole)"
    figure.save(made, report.folder / "workers_step.png", title, report.machine)


def draw_batch(report: Report) -> None:
    """A batch of eight, under each augmentation."""
    torch.manual_seed(3)
    made, axes = figure.new(len(AUGMENTATIONS), 8, width=1.15, height=1.05)
    source = jpegs(64)
    chosen = torch.randperm(64)[:8].tolist()
    for row, name in zip(axes, AUGMENTATIONS, strict=True):
        for index, axis in zip(chosen, row, strict=True):
            image, label = augment(name, source[index])
            axis.imshow(image.movedim(0, -1).numpy())
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
            if name == "none":
                axis.set_title(f"class {label}", fontsize=8)
        row[0].set_ylabel(name)
    figure.save(made, report.folder / "workers_batch.png", "A batch under each augmentation", "")


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, rounds=5)
    usual = [number for number in (0, 1, 2, 4, 8) if number <= (os.cpu_count() or 1)]
    options.add_argument("--workers", type=int, nargs="+", default=usual, help="num_workers (up to the cores)")
    options.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 64, 256], help="8 64 256")
    options.add_argument("--samples", type=int, help="JPEG files (768, two batches at least; quick: 64)")
    chosen = options.parse_args(arguments)
    report = Report("workers", chosen)
    samples = chosen.samples or (64 if report.quick else 768)
    workers, sizes = sorted(chosen.workers), sorted(chosen.batch_sizes)
    if report.quick:
        sizes = [size for size in sizes if size <= 32] or sizes[:1]
    epoch_seconds(DataLoader(jpegs(max(samples, 2 * sizes[-1])), batch_size=64))  # into the page cache, for all runs
    draw_batch(report)
    found = {"loader": measure_loader(report, workers, sizes, samples)}
    found["step"] = measure_step(report, workers, sizes, samples)
    names = {"loader": ("augmentation", "batch_size", "workers"), "step": ("batch_size", "workers", "pin_memory")}
    report.save(
        **{
            part: [dict(zip(names[part], key, strict=True)) | {"rounds": runs} for key, runs in its.items()]
            for part, its in found.items()
        }
    )


if __name__ == "__main__":
    main()
