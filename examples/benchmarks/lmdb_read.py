"""LMDBs: reading one behind the cache and bare, beside published PyTorch datasets over an LMDB; and packing one.

    python examples/benchmarks/lmdb_read.py                          # about 5 minutes on 2 cores
    python examples/benchmarks/lmdb_read.py --samples 4000 --megabytes 4000

read   samples/s of warm epochs, shuffled, in batches of 64, with two workers and with none, over the same JPEG files of
       320x320 decoded, resized to 96x96 and sent as bytes:

       cached             LMDBSource in a CachedDataset, by a CachedLoader
       LMDBSource         bare, in a DataLoader
       torchvision LSUN   its LSUNClass, on an LMDB of the files
       Efficient-PyTorch  the recipe of Lyken17/Efficient-PyTorch (ImageFolderLMDB): a pickled (file, label) per key
       MONAI LMDBDataset  which keeps the decoded and resized tensors, by torch.save

pack   MB/s of the LMDB's file, from a source that costs nothing (tensors of 150,528 bytes) and from the JPEG files,
       decoded and resized; beside writing as many bytes to a file on the same disk with an fsync at the end, beside
       putting as many into an LMDB, and beside reading that source alone

There is no gain where training computes for longer than a bare LMDB takes to read and decode; and an LMDB alone does
not spare decoding, which is most of what the rows without a cache do.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sources  # noqa: F401  lets `photos` be found, the example that makes the files
import torch
from measure import Report, Spread, epoch_seconds, fresh, parser, rounds
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import photos
from lightning_stocache import CachedDataset, CachedLoader, LMDBSource
from lightning_stocache.source.pack import pack

SMALL = v2.Compose([v2.PILToTensor(), v2.Resize(96, antialias=True)])
CACHED, BARE, LSUN, EFFICIENT, MONAI = (
    "cached",
    "LMDBSource",
    "torchvision LSUN",
    "Efficient-PyTorch",
    "MONAI LMDBDataset",
)
BATCH = 64


class ImageFolderLMDB(Dataset[Any]):
    """As Efficient-PyTorch reads it: a pickle per sample, its file opened by PIL."""

    def __init__(self, path: str, transform: Callable[[Any], Any]) -> None:
        import lmdb

        self.env = lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False, meminit=False)
        with self.env.begin(write=False) as txn:
            self.length = pickle.loads(txn.get(b"__len__"))
            self.keys = pickle.loads(txn.get(b"__keys__"))
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with self.env.begin(write=False) as txn:
            content, target = pickle.loads(txn.get(self.keys[index]))
        return self.transform(Image.open(io.BytesIO(content)).convert("RGB")), target

    def __len__(self) -> int:
        return int(self.length)


class Free(Dataset[Any]):
    """Samples that cost a copy of 150,528 bytes."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.pool = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.pool[index % 64].clone(), index


def decoded(item: Any) -> Any:
    """For MONAI: what it keeps of a file."""
    return SMALL(photos_image(item))


def photos_image(path: str) -> Any:
    from PIL import Image

    return Image.open(path).convert("RGB")


def without_target(sample: Any) -> Any:
    return 0 if sample is None else sample


def write(folder: Path, samples: int) -> list[str]:
    """The LMDBs of all arms, of the same files."""
    import lmdb

    files = Subset(ImageFolder(str(photos.folder_of(None) / "train")), range(samples))
    paths = [files.dataset.samples[index] for index in range(samples)]  # type: ignore[attr-defined]
    pack(files, folder / "packed", encoded=True)
    for name, subdir in (("lsun", True), ("efficient", False)):
        with lmdb.open(str(folder / name), subdir=subdir, map_size=1 << 34) as environment:
            with environment.begin(write=True) as transaction:
                for index, (path, label) in enumerate(paths):
                    content = Path(path).read_bytes()
                    value = content if subdir else pickle.dumps((content, label))
                    transaction.put(b"%08d" % index, value)
                if not subdir:
                    transaction.put(b"__len__", pickle.dumps(samples))
                    transaction.put(b"__keys__", pickle.dumps([b"%08d" % index for index in range(samples)]))
    return [path for path, _ in paths]


def dataset_of(way: str, folder: Path, paths: list[str]) -> Dataset[Any]:
    if way in (CACHED, BARE):
        return LMDBSource(folder / "packed", transform=SMALL)
    if way == LSUN:
        from torchvision.datasets.lsun import LSUNClass

        os.chdir(folder)  # it leaves a pickle of its keys where it stands
        made: Dataset[Any] = LSUNClass(str(folder / "lsun"), SMALL, without_target)
        return made
    if way == EFFICIENT:
        return ImageFolderLMDB(str(folder / "efficient"), SMALL)
    from monai.data.dataset import LMDBDataset

    return LMDBDataset(paths, decoded, cache_dir=folder / "monai", progress=False, lmdb_kwargs={"map_size": 1 << 34})


def rate(way: str, folder: Path, paths: list[str], workers: int) -> float:
    """Samples per second of the second epoch of a way; what a file system keeps is warm by then in all of them."""
    dataset = dataset_of(way, folder, paths)
    if way == CACHED:
        cached = CachedDataset(dataset, budget="auto")
        loader: Any = CachedLoader(cached, batch_size=BATCH, shuffle=True, num_workers=workers)
    else:
        loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    epoch_seconds(loader)
    seconds = min(epoch_seconds(loader) for _ in range(2))
    return len(paths) / seconds


def measure_reading(report: Report, chosen: argparse.Namespace) -> dict[str, Any]:
    samples = chosen.samples or (64 if chosen.quick else 1500)
    photos.make(train_files=samples, val_files=2)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        paths = write(folder, samples)
        ways = [CACHED, BARE, LSUN, EFFICIENT]
        if importlib.util.find_spec("monai") is not None:
            fresh(rate, MONAI, folder, paths, 0)  # fills it
            ways.append(MONAI)
        arms = {
            (way, workers): lambda way=way, workers=workers: fresh(rate, way, folder, paths, workers)
            for way in ways
            for workers in (0, 2)
        }
        found = rounds(arms, report.rounds)
    best = {
        workers: max((way for way in ways[2:]), key=lambda way: Spread.of(found[way, workers]).median)
        for workers in (0, 2)
    }
    rows = [
        (
            way,
            workers,
            f"{Spread.of(found[way, workers]):.0f}",
            f"{Spread.ratio(found[way, workers], found[best[workers], workers]):.2f}",
        )
        for way in ways
        for workers in (0, 2)
    ]
    report.table(
        f"{samples} JPEG files, samples/s of warm epochs; the last column: over the fastest of the published ones",
        ("", "workers", "samples/s", "ratio"),
        rows,
    )
    return {f"{way}, {workers}": values for (way, workers), values in found.items()}


def packing(folder: Path, samples: int, kind: str) -> dict[str, float]:
    """MB/s of writing a file, of the source alone, and of `pack`, one after the other on the same disk."""
    train = str(photos.folder_of(None) / "train")
    source: Dataset[Any] = Free(samples) if kind == "tensors" else Subset(ImageFolder(train, SMALL), range(samples))
    path = folder / "file"
    start = time.perf_counter()
    for index in range(samples):
        source[index]
    source_seconds = time.perf_counter() - start
    start = time.perf_counter()
    pack(source, path)
    pack_seconds, size = time.perf_counter() - start, path.stat().st_size
    path.unlink()
    block = os.urandom(1 << 20)
    start = time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(max(size >> 20, 1)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    file_seconds = time.perf_counter() - start
    path.unlink()
    lmdb_seconds = put_alone(path, size // samples, samples)
    seconds = {"file": file_seconds, "LMDB": lmdb_seconds, "source": source_seconds, "pack": pack_seconds}
    found = {what: size / spent / 1e6 for what, spent in seconds.items()}
    return found | {"ratio": found["pack"] / min(found["file"], found["source"])}


def put_alone(path: Path, size: int, samples: int) -> float:
    """Seconds for as many values of one size into an LMDB, in transactions of 64 MiB: what LMDB itself takes."""
    import lmdb

    value, count = bytes(size), max((64 << 20) // size, 1)
    start = time.perf_counter()
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 36) as environment:
        for begin in range(0, samples, count):
            with environment.begin(write=True) as transaction:
                for index in range(begin, min(begin + count, samples)):
                    transaction.put(b"%012d" % index, value, append=True)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def measure_packing(report: Report, chosen: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    tensors = (chosen.megabytes or (8 if chosen.quick else 1000)) * 1_000_000 // 150_528
    samples = {"tensors": tensors, "photographs": chosen.samples or (64 if chosen.quick else 1500)}
    photos.make(train_files=samples["photographs"], val_files=2)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        arms = {
            kind: lambda kind=kind, count=count: fresh(packing, Path(name), count, kind)
            for kind, count in samples.items()
        }
        found = rounds(arms, report.rounds)
    rows = [
        (kind, *(f"{Spread.of(run[what] for run in runs):.{2 if what == 'ratio' else 0}f}" for what in runs[0]))
        for kind, runs in found.items()
    ]
    columns = ("", "file, MB/s", "LMDB alone", "source", "pack", "over the slower of file and source")
    report.table(f"{tensors:,} tensors, {samples['photographs']:,} photographs, by one process", columns, rows)
    return found


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument(
        "--only", nargs="+", choices=["read", "pack"], default=["read", "pack"], help="one of the parts"
    )
    options.add_argument("--samples", type=int, help="JPEG files, at most 4000 (1500; quick: 64)")
    options.add_argument("--megabytes", type=int, help="that are packed (1000; quick: 8)")
    options.add_argument("--folder", help="where the LMDBs are made: a folder on the disk that is measured")
    chosen = options.parse_args(arguments)
    report = Report("lmdb_read", chosen)
    parts = {"read": measure_reading, "pack": measure_packing}
    report.save(**{part: parts[part](report, chosen) for part in chosen.only})


if __name__ == "__main__":
    main()
