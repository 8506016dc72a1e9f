"""A stream that is kept, beside a map-style cache of the same samples, and beside libraries that stream from disk.

    pip install webdataset
    pip install --no-deps litdata mosaicml-streaming           # optional, with what they import
    python examples/benchmarks/streams.py                      # about 5 minutes on 2 cores

The same images, uint8 of 3x160x160 with a label, lie in shards on the local disk, uncompressed: as tar files
(WebDataset), and in the formats of litData and of mosaicml-streaming. Every arm reads them shuffled, in batches, by the
loader that its library has for that; the files are in the page cache. Each arm runs without workers and with two, and
its faster way is shown.

1000/s     samples of an epoch per second: the first one ("one"), and the median of later ones ("later")
of a map   later epochs over those of a map-style CachedDataset of the same samples, in the same round
over it    later epochs of the CachedStream over those of the arm, in the same round

There is no gain where training waits for compute, where the stream is read once, and where it does not fit.
"""

import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Report, Spread, epoch_seconds, fresh, listed, parser, thousands
from sources import Pool
from torch.utils.data import DataLoader

from lightning_stocache import CachedDataset, CachedLoader, CachedStream

SHAPE, BATCH = (3, 160, 160), 64
WORKERS = (0, 2)
SHARDS, LATER, LATER_SECONDS = 8, 5, 1.0


# ---- writing ----


def write_tar(folder: Path, samples: int) -> None:
    import webdataset

    source = Pool(samples, SHAPE)
    (folder / "tar").mkdir()
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(folder / "tar" / f"{shard}.tar")) as writer:
            for number in range(shard, samples, SHARDS):
                writer.write({"__key__": f"{number:07}", "bytes": source[number][0].numpy().tobytes(), "cls": number})


def lit_sample(source: Pool, number: int) -> Any:
    return {"image": source[number][0], "label": number}


def write_lit(folder: Path, samples: int) -> None:
    import litdata

    settings: dict[str, Any] = {"chunk_bytes": "16MB", "num_workers": 1, "start_method": "fork", "verbose": False}
    sample = partial(lit_sample, Pool(samples, SHAPE))
    litdata.optimize(sample, list(range(samples)), output_dir=str(folder / "lit"), **settings)


def write_mosaic(folder: Path, samples: int) -> None:
    import streaming

    source = Pool(samples, SHAPE)
    columns = {"image": "ndarray:uint8", "label": "int"}
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns, size_limit="16MB") as writer:
        for number in range(samples):
            writer.write({"image": source[number][0].numpy(), "label": number})


# ---- reading ----


def decoded(sample: Any) -> Any:
    return torch.frombuffer(bytearray(sample[0]), dtype=torch.uint8).reshape(SHAPE), int(sample[1])


def tar_stream(folder: Path) -> Any:
    import webdataset

    files = sorted(map(str, (folder / "tar").glob("*.tar")))
    return webdataset.WebDataset(files, shardshuffle=SHARDS).shuffle(256).to_tuple("bytes", "cls").map(decoded)


def loader_of(arm: str, folder: Path, samples: int, workers: int) -> Any:
    """The loader of an arm, as its library has it."""
    settings: dict[str, Any] = {"batch_size": BATCH, "num_workers": workers, "persistent_workers": workers > 0}
    if arm == "CachedStream":
        return CachedLoader(CachedStream(tar_stream(folder), "1GiB"), **settings)
    if arm == "CachedDataset":
        return CachedLoader(CachedDataset(Pool(samples, SHAPE)), shuffle=True, **settings)
    if arm == "WebDataset":
        return DataLoader(tar_stream(folder), **settings)
    if arm == "litData":
        import litdata

        dataset = litdata.StreamingDataset(str(folder / "lit"), shuffle=True, drop_last=False)
        return litdata.StreamingDataLoader(dataset, **settings)
    import streaming

    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(local=str(folder / "mds"), batch_size=BATCH, shuffle=True)
    return DataLoader(dataset, **settings)


def measure(arm: str, folder: Path, samples: int, workers: int) -> dict[str, float]:
    """Samples per second of the first epoch, and of later ones."""
    loader = loader_of(arm, folder, samples, workers)
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
    "WebDataset": ("webdataset", None),
    "litData": ("litdata", write_lit),
    "mosaicml-streaming": ("streaming", write_mosaic),
}


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--samples", type=int, help="images (2048; quick: 64)")
    chosen = options.parse_args()
    report = Report("streams", chosen)
    samples = chosen.samples or (64 if report.quick else 2048)
    names = [arm for arm, (package, _) in ARMS.items() if importlib.util.find_spec(package)]
    if missing := [arm for arm in ARMS if arm not in names]:
        report.say(f"Not installed, and left out: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for arm in names:
            if write := ARMS[arm][1]:
                fresh(write, folder, samples)
        arms = {
            (arm, workers): partial(fresh, measure, arm, folder, samples, workers)
            for arm in names
            for workers in WORKERS
        }
        runs = report.measure(arms)
    best, later = {}, {}
    for arm in names:
        ways = {workers: [run["later"] for run in runs[arm, workers]] for workers in WORKERS}
        best[arm] = max(WORKERS, key=lambda workers: Spread.of(ways[workers]).median)
        later[arm] = ways[best[arm]]
    rows = []
    for arm in names:
        of_map = f"{Spread.ratio(later[arm], later['CachedDataset']):.2f}"
        over = f"{Spread.ratio(later['CachedStream'], later[arm]):.2f}" if "CachedStream" in later else ""
        one = thousands(run["one"] for run in runs[arm, best[arm]])
        rows.append([arm, best[arm], one, thousands(later[arm]), of_map, over])
    columns = ("", "workers", "one, 1000/s", "later, 1000/s", "of a map", "CachedStream over it")
    report.table(f"{samples} samples of 3x160x160, batches of {BATCH}", columns, rows)
    report.save(runs=listed(runs, "arm", "workers"))


if __name__ == "__main__":
    main()
