"""A stream that is kept, beside a map-style cache of the same samples, and beside libraries that stream from disk.

    pip install webdataset
    pip install --no-deps litdata mosaicml-streaming           # optional, with what they import
    python examples/benchmarks/streams.py                      # about 5 minutes on 2 cores

The same images, uint8 of 3x160x160 with a label, lie in shards on the local disk, uncompressed: as tar files
(WebDataset), and in the formats of litData and of mosaicml-streaming. Every arm reads them shuffled, in batches, by the
loader that its library has for that; the files are in the page cache. Each arm runs without workers and with some, and
its faster way is shown.

1000/s     samples of an epoch per second: the first one ("one"), and the median of later ones ("later")
of a map   later epochs over those of a map-style CachedDataset of the same samples, in the same round
over it    later epochs of the CachedStream over those of the arm, in the same round

The texts are records: dicts of a string and a list of numbers, of many lengths.

There is no gain where training waits for compute, where the stream is read once, and where it does not fit.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Report, Spread, epoch_seconds, fresh, listed, parser, rounds, thousands
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import CachedDataset, CachedLoader, CachedStream

SHARDS, LATER, LATER_SECONDS = 8, 5, 1.0


class Images(Dataset[Any]):
    """The images by their number, out of one file."""

    def __init__(self, folder: Path) -> None:
        self.pixels = np.load(folder / "images.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.pixels[index].copy()), index


def texts(samples: int) -> Iterator[Any]:
    for number in range(samples):
        yield {"text": f"word{number} " * (number % 50 + 5), "ids": list(range(number % 40 + 1))}


# ---- writing ----


def write_files(folder: Path, samples: int, side: int) -> None:
    chance = np.random.default_rng(0)  # bytes that no compression makes smaller
    np.save(folder / "images.npy", chance.integers(0, 256, (samples, 3, side, side), np.uint8))


def write_tar(folder: Path, samples: int) -> None:
    import webdataset

    pixels = np.load(folder / "images.npy", mmap_mode="r")
    (folder / "tar").mkdir()
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(folder / "tar" / f"{shard}.tar")) as writer:
            for number in range(shard, samples, SHARDS):
                writer.write({"__key__": f"{number:07}", "bytes": pixels[number].tobytes(), "cls": number})


def lit_sample(folder: str, number: int) -> Any:
    return {"image": torch.from_numpy(np.load(f"{folder}/images.npy", mmap_mode="r")[number].copy()), "label": number}


def write_lit(folder: Path, samples: int) -> None:
    import litdata

    settings: dict[str, Any] = {"chunk_bytes": "16MB", "num_workers": 1, "start_method": "fork", "verbose": False}
    litdata.optimize(partial(lit_sample, str(folder)), list(range(samples)), output_dir=str(folder / "lit"), **settings)


def write_mosaic(folder: Path, samples: int) -> None:
    import streaming

    pixels = np.load(folder / "images.npy", mmap_mode="r")
    columns = {"image": "ndarray:uint8", "label": "int"}
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns, size_limit="16MB") as writer:
        for number in range(samples):
            writer.write({"image": np.array(pixels[number]), "label": number})


# ---- reading ----


def decoded(side: int, sample: Any) -> Any:
    return torch.frombuffer(bytearray(sample[0]), dtype=torch.uint8).reshape(3, side, side), int(sample[1])


def tar_stream(folder: Path, side: int) -> Any:
    import webdataset

    files = sorted(map(str, (folder / "tar").glob("*.tar")))
    pipeline = webdataset.WebDataset(files, shardshuffle=SHARDS).shuffle(256).to_tuple("bytes", "cls")
    return pipeline.map(partial(decoded, side))


def loader_of(arm: str, folder: Path, samples: int, side: int, batch: int, workers: int) -> Any:
    """The loader of an arm, as its library has it."""
    settings: dict[str, Any] = {"batch_size": batch, "num_workers": workers, "persistent_workers": workers > 0}
    if arm == "CachedStream":
        return CachedLoader(CachedStream(tar_stream(folder, side), "1GiB"), **settings)
    if arm == "CachedStream, DataLoader":
        return DataLoader(CachedStream(tar_stream(folder, side), "1GiB"), **settings)
    if arm == "CachedDataset":
        return CachedLoader(CachedDataset(Images(folder)), shuffle=True, **settings)
    if arm == "WebDataset":
        return DataLoader(tar_stream(folder, side), **settings)
    if arm == "litData":
        import litdata

        dataset = litdata.StreamingDataset(str(folder / "lit"), shuffle=True, drop_last=False)
        return litdata.StreamingDataLoader(dataset, **settings)
    if arm == "mosaicml-streaming":
        import streaming

        streaming.base.util.clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(local=str(folder / "mds"), batch_size=batch, shuffle=True)
        return DataLoader(dataset, **settings)
    if arm == "texts, CachedStream":
        return CachedLoader(CachedStream(partial(texts, samples), "1GiB"), collate_fn=list, **settings)
    return CachedLoader(CachedDataset(list(texts(samples))), shuffle=True, collate_fn=list, **settings)


def measure(arm: str, folder: Path, samples: int, side: int, batch: int, workers: int) -> dict[str, float]:
    """Samples per second of the first epoch, and of later ones."""
    loader = loader_of(arm, folder, samples, side, batch, workers)
    one = epoch_seconds(loader)
    epoch_seconds(loader)
    later: list[float] = []
    while len(later) < LATER or sum(later) < LATER_SECONDS:
        later.append(epoch_seconds(loader))
    return {"one": samples / one, "later": samples / Spread.of(later).median}


# ---- the report ----

ARMS: dict[str, tuple[str, Callable[[Path, int], None] | None]] = {
    "CachedDataset": ("torch", None),
    "CachedStream": ("webdataset", write_tar),
    "CachedStream, DataLoader": ("webdataset", None),
    "WebDataset": ("webdataset", None),
    "litData": ("litdata", write_lit),
    "mosaicml-streaming": ("streaming", write_mosaic),
    "texts, CachedDataset": ("torch", None),
    "texts, CachedStream": ("torch", None),
}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--samples", type=int, help="images, and texts (2048; quick: 64)")
    options.add_argument("--side", type=int, default=160, help="of an image, in pixels (160)")
    options.add_argument("--batch", type=int, default=64, help="samples of a batch (64)")
    options.add_argument("--workers", type=int, default=2, help="of the loaders that have some (2)")
    chosen = options.parse_args(arguments)
    report = Report("streams", chosen)
    samples = chosen.samples or (64 if report.quick else 2048)
    found = {arm for arm, (package, _) in ARMS.items() if importlib.util.find_spec(package)}
    if missing := [arm for arm in ARMS if arm not in found]:
        report.say(f"Not installed, and left out: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, samples, chosen.side)
        for arm, (_, write) in ARMS.items():
            if arm in found and write is not None:
                fresh(write, folder, samples)
        settings = (folder, samples, chosen.side, chosen.batch)
        arms = {
            (arm, workers): partial(fresh, measure, arm, *settings, workers)
            for arm in ARMS
            if arm in found
            for workers in (0, chosen.workers)
        }
        runs = rounds(arms, report.rounds)
    best = {
        arm: max((0, chosen.workers), key=lambda workers: Spread.of(r["later"] for r in runs[arm, workers]).median)
        for arm in ARMS
        if arm in found
    }
    rows = []
    for arm, workers in best.items():
        prefix = "texts, " if arm.startswith("texts") else ""
        later = [run["later"] for run in runs[arm, workers]]
        ratios = []
        for other in ("CachedDataset", "CachedStream"):
            name = prefix + other
            others = [run["later"] for run in runs[name, best[name]]] if name in best else []
            pair = (later, others) if other == "CachedDataset" else (others, later)
            ratios.append(f"{Spread.ratio(*pair):.2f}" if others else "")
        one = thousands(run["one"] for run in runs[arm, workers])
        rows.append([arm, workers, one, thousands(later), *ratios])
    columns = ("", "workers", "one, 1000/s", "later, 1000/s", "of a map", "CachedStream over it")
    report.table(f"{samples} samples of 3x{chosen.side}x{chosen.side}, batches of {chosen.batch}", columns, rows)
    report.save(runs=listed(runs, "arm", "workers"))


if __name__ == "__main__":
    main()
