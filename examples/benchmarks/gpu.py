"""What feeds a GPU, and what a training on it gets: batches that go to the device, and the ImageNet recipe.

    python examples/benchmarks/gpu.py                          # under ten minutes on one GPU with 16 cores
    python examples/benchmarks/gpu.py --only feed
    python examples/benchmarks/gpu.py --only train --photographs 4096

feed    Warm caches of uint8 images: each batch is sent to the device and summed there. With and without `pin_memory`,
        beside a list of tensors, MONAI's CacheDataset and stocaching, if they are installed. The limits are the bus (a
        copy of a page-locked batch to the device) and the gather (`index_select` of a batch's rows out of shared memory
        into page-locked memory, by one thread and by eight). `of the bus` is the rate as a share of the first limit.
train   ResNet-50 in bf16, channels last, by Lightning, on JPEG files around 500x375, with the usual recipe:
        PIL     RandomResizedCrop, flip, ToTensor, Normalize on images of PIL
        v2      the same by torchvision.transforms.v2 on tensors
        device  256x256 bytes from the loader; RandomResizedCrop (by one bilinear interpolation), flip and normalising
                of the whole batch on the device
        plain, with half of the photographs cached, with all of them, and with all of them cached as files
        (`store="encoded"`). images/s is the batch size over the mean step. The parts of a step are seconds of the
        device, by CUDA events (StepTimer): `device` is the share of the wall time that forward, backward and the
        optimiser's step take; while it waits, the device is idle. The first epoch, which fills the cache, is left out.

Without a CUDA device both run small on the CPU: few and small images, a ResNet-18, and the wall clock instead of
events. That shows that they work; only a device shows what it gets.

There is no gain where the step takes longer than the loader: if the plain training has a `device` share near 100 %,
nothing is waited for, and a cache only frees the cores. Nor where random transforms on the CPU take the time: they come
after the cache, and are the same work with and without it. Then the device is the place for them.
"""

import importlib.util
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from measure import Report, Spread, cell, fresh, listed, parser, thousands, warm_epochs
from sources import OTHERS, Pool, import_peer, make_dataset, make_loader
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightning_stocache import StepTimer, StochasticCache

# Samples of each shape, and the batch size: on a device, and on the CPU.
SHAPES = {(3, 224, 224): (4096, 256), (3, 64, 64): (32768, 512), (3, 32, 32): (65536, 512)}
SMALL_SHAPES = {(3, 224, 224): (512, 64), (3, 64, 64): (4096, 256), (3, 32, 32): (16384, 256)}
COLD_EPOCHS, WARM_EPOCHS = 2, 3

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STORES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "50 % cached": {"budget": "50%"},
    "100 % cached": {"budget": "auto"},
    "encoded": {"budget": "auto", "store": "encoded"},
}
WAYS = [(recipe, store) for recipe in ("PIL", "v2") for store in STORES]
WAYS += [("device", "plain"), ("device", "100 % cached")]
WORK = ("forward", "backward", "optimizer")
EPOCHS = 3


def on_device() -> bool:
    return torch.cuda.is_available()


def cores() -> int:
    return len(os.sched_getaffinity(0))


def use_cores() -> None:
    """Beside a device, torch has as many threads as in a user's program; on the CPU the one of all benchmarks."""
    if on_device():
        torch.set_num_threads(cores())


# ---- what feeds a device ----


class Sent:
    """A loader whose batches are sent to the device, and summed there. An epoch ends when the device has ended.

    Without a device the batches stay as they come: a sum on the CPU would take longer than all else.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Tensor]:
        for images, _ in self.loader:
            yield images.to("cuda", non_blocking=True).sum() if on_device() else images
        if on_device():
            torch.cuda.synchronize()


def feed(
    peer: str, shape: tuple[int, ...], workers: int, pinned: bool, samples: int, batch_size: int
) -> dict[str, float]:
    """Samples/s and CPU microseconds per sample of warm epochs."""
    use_cores()
    import_peer(peer)
    dataset = make_dataset(peer, Pool(samples, shape), workers)
    loader = make_loader(peer, dataset, batch_size, workers, pin_memory=pinned)
    return warm_epochs(Sent(loader), samples, COLD_EPOCHS, WARM_EPOCHS)


def limits(shape: tuple[int, ...], samples: int, batch_size: int, threads: int) -> dict[str, float]:
    """Samples/s of a gather by one thread and by several, and of the bus, if there is a device."""
    images = torch.ones(samples, math.prod(shape), dtype=torch.uint8).share_memory_()
    batches = torch.randperm(samples).split(batch_size)[: samples // batch_size]
    buffer = torch.empty(batch_size, images.shape[1], dtype=torch.uint8, pin_memory=on_device())

    def gather() -> None:
        for indices in batches:
            torch.index_select(images, 0, indices, out=buffer)

    def send() -> None:
        for _ in batches:
            buffer.to("cuda", non_blocking=True)
        torch.cuda.synchronize()

    found = {}
    for number in (1, threads):
        torch.set_num_threads(number)
        found[f"gather, threads: {number}"] = len(batches) * batch_size / median_seconds(gather)
    if on_device():
        found["bus"] = len(batches) * batch_size / median_seconds(send)
    return found


def median_seconds(call: Callable[[], None]) -> float:
    """The median of three calls, after one that touches cold pages."""
    call()
    found = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return Spread.of(found).median


def measure_feed(report: Report, workers: int) -> dict[str, Any]:
    shapes = SHAPES if on_device() else SMALL_SHAPES
    if report.quick:
        shapes = {(3, 32, 32): (512, 64)}
    ways = [("CachedLoader", 0), ("CachedLoader", workers), ("list", 0), ("list", workers)]
    for peer in ("MONAI", "stocaching"):
        if importlib.util.find_spec(OTHERS[peer]) is None:
            report.say(f"{peer} is left out, because it is not installed: pip install --no-deps {OTHERS[peer]}")
        else:
            ways.append((peer, workers))
    threads, pinning = min(cores(), 8), (True, False) if on_device() else (False,)
    arms: dict[Any, Any] = {}
    for shape, sizes in shapes.items():
        arms["limits", shape, 0, False] = partial(fresh, limits, shape, *sizes, threads)
        for peer, number in ways:
            for pinned in pinning:
                arms[peer, shape, number, pinned] = partial(fresh, feed, peer, shape, number, pinned, *sizes)
    found = report.measure(arms)
    for shape, (samples, batch_size) in shapes.items():
        runs = found["limits", shape, 0, False]
        bus = [run["bus"] for run in runs] if on_device() else None
        rows = []
        for limit in runs[0]:
            rates = [run[limit] for run in runs]
            rows.append([f"limit: {limit}", "", "", thousands(rates), share_of(rates, bus), ""])
        for peer, number in ways:
            for pinned in pinning:
                runs = found[peer, shape, number, pinned]
                rates = [run["rate"] for run in runs]
                cells = [thousands(rates), share_of(rates, bus), cell(runs, "cpu", ".1f")]
                rows.append([peer, number, "yes" if pinned else "no", *cells])
        title = f"{'x'.join(map(str, shape))}, {samples:,} samples in batches of {batch_size}, fully cached"
        report.table(title, ("", "workers", "pinned", "1000 samples/s", "of the bus", "CPU us/sample"), rows)
    return {"feed": listed(found, "loader", "shape", "workers", "pinned")}


def share_of(rates: list[float], bus: list[float] | None) -> str:
    return "" if bus is None else f"{Spread.ratio(rates, bus):.2f}"


# ---- what a training gets ----


def transform_of(recipe: str, size: int) -> Any:
    """The transform of a sample on the CPU."""
    if recipe == "PIL":
        return v1.Compose(
            [v1.RandomResizedCrop(size), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
        )
    if recipe == "v2":
        crop = [v2.PILToTensor(), v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
        return v2.Compose([*crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    side = size * 256 // 224
    return v2.Compose([v2.PILToTensor(), v2.Resize(side, antialias=True), v2.CenterCrop(side)])


def augmented(images: Tensor, size: int) -> Tensor:
    """RandomResizedCrop, flip and normalising of a batch of bytes, another crop for each image.

    An output pixel is interpolated at its place in the crop. The places, from -1 to 1 over the image, are the scale of
    the crop times the place in the output, plus the centre of the crop; a negative scale flips.
    """
    count, device = len(images), images.device
    area = torch.empty(count, device=device).uniform_(0.08, 1)
    ratio = torch.empty(count, device=device).uniform_(math.log(3 / 4), math.log(4 / 3)).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    flip = torch.randint(0, 2, (count,), device=device) * 2 - 1
    places = torch.zeros(count, 2, 3, device=device)
    places[:, 0, 0], places[:, 1, 1] = flip * width, height
    places[:, 0, 2] = (1 - width) * torch.empty(count, device=device).uniform_(-1, 1)
    places[:, 1, 2] = (1 - height) * torch.empty(count, device=device).uniform_(-1, 1)
    mean, std = (255 * torch.tensor(values, device=device)[:, None, None] for values in (MEAN, STD))
    grid = F.affine_grid(places, [count, 3, size, size], align_corners=False)
    return F.grid_sample(images.float().sub_(mean).div_(std), grid, padding_mode="border", align_corners=False)


class Network(pl.LightningModule):
    """A ResNet of torchvision, in channels-last memory."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        from torchvision import models

        self.net = getattr(models, name)(num_classes=2).to(memory_format=torch.channels_last)
        self.size = size

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        if images.dtype == torch.uint8:
            images = augmented(images, self.size)
        return F.cross_entropy(self.net(images.contiguous(memory_format=torch.channels_last)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def train(recipe: str, store: str, samples: int, batch_size: int, workers: int, size: int) -> dict[str, float]:
    """Mean seconds of the parts of a step, in all epochs but the first, and images/s ("rate")."""
    from imagenet import photographs_of

    use_cores()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # advice on loggers and workers, once per run
    pl.seed_everything(0, verbose=False)
    options, timer = STORES[store], StepTimer()
    loader = DataLoader(
        photographs_of(samples, transform_of(recipe, size)),
        batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=on_device(),
        drop_last=True,
    )
    trainer = pl.Trainer(
        accelerator="gpu" if on_device() else "cpu",
        devices=1,
        precision="bf16-mixed" if on_device() else "32-true",
        benchmark=True,
        max_epochs=EPOCHS,
        callbacks=[timer] if options is None else [timer, StochasticCache(**options, verbose=False)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Network("resnet50" if on_device() else "resnet18", size), loader)
    parts = {part: Spread.of(epoch[part] for epoch in timer.epochs[1:]).median for part in timer.epochs[0]}
    step = sum(parts.values())
    return parts | {"rate": batch_size / step, "device": sum(parts[part] for part in WORK) / step}


def measure_training(report: Report, workers: int, photographs: int | None) -> dict[str, Any]:
    samples, batch_size, size = (8192, 256, 224) if on_device() else (128, 16, 64)
    if report.quick:
        samples, batch_size, size = 32, 8, 32
    samples = photographs or samples
    from imagenet import make

    make(samples)
    arms = {way: partial(fresh, train, *way, samples, batch_size, workers, size) for way in WAYS}
    found = report.measure(arms)
    rows = []
    for (recipe, store), runs in found.items():
        rates = [run["rate"] for run in runs]
        times = Spread.ratio(rates, [run["rate"] for run in found[recipe, "plain"]])
        parts = [cell(runs, part, ".1f", 1000) for part in ("wait", "transfer", *WORK, "rest")]
        values = [f"{Spread.of(rates):,.0f}", f"{times:.2f}", cell(runs, "device", ".0f", 100)]
        rows.append([f"{recipe}, {store}", *values, *parts])
    parts_in_ms = ("wait, ms", "transfer", "forward", "backward", "step", "rest")
    network = "ResNet-50 in bf16" if on_device() else f"ResNet-18 on {size}x{size}"
    title = f"{network}, {samples:,} photographs in batches of {batch_size}, {workers} workers, epochs after the first"
    report.table(title, ("", "images/s", "times plain", "device, %", *parts_in_ms), rows)
    return {"train": listed(found, "recipe", "store")}


def main() -> None:
    options = parser(__doc__, rounds=1)
    options.add_argument("--only", nargs="+", choices=("feed", "train"), default=["feed", "train"])
    options.add_argument("--workers", type=int, help="num_workers (the cores, less two)")
    options.add_argument("--photographs", type=int, help="JPEG files to train on (8192; without a device 128)")
    chosen = options.parse_args()
    report = Report("gpu", chosen)
    if not on_device():
        report.say("There is no CUDA device: this runs small on the CPU, by the wall clock, to show that it works.")
    workers = max(cores() - 2, 1) if chosen.workers is None else chosen.workers
    values: dict[str, Any] = {}
    if "feed" in chosen.only:
        values |= measure_feed(report, workers)
    if "train" in chosen.only:
        values |= measure_training(report, workers, chosen.photographs)
    report.save(**values)


if __name__ == "__main__":
    main()
