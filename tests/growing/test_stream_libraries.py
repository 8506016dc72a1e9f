"""Cached streams of libraries: tar shards of WebDataset, and iterable datasets of Hugging Face."""

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_stocache import CachedStream

datasets = pytest.importorskip("datasets")
webdataset = pytest.importorskip("webdataset")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four shards of 25 samples."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(4):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in range(shard * 25, shard * 25 + 25):
                writer.write({"__key__": f"{number:05}", "npy": np.full((2, 3), number, np.float32), "cls": number})
    return sorted(map(str, Path(folder).glob("*.tar")))


@pytest.mark.processes
def test_webdataset_is_cached(shards: list[str]) -> None:
    """Tar shards with WebDataset's own shuffling."""
    pipeline = webdataset.WebDataset(shards, shardshuffle=4).shuffle(10).decode().to_tuple("npy", "cls")
    with closing(CachedStream(pipeline, "16MiB")) as stream:
        loader = DataLoader(stream, batch_size=8, num_workers=2)
        epochs = [[number for _, numbers in loader for number in numbers.tolist()] for _ in range(3)]
        counts = stream.counters.totals()
        values = {int(n): float(x[0, 0]) for xs, ns in loader for x, n in zip(xs, ns, strict=True)}
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert counts.hits == 200
    assert counts.misses == 100
    assert values == {number: float(number) for number in range(100)}


@pytest.mark.processes
def test_streams_of_hugging_face_are_cached() -> None:
    """A shuffled `datasets.IterableDataset` is stored, and receives the calls of `set_epoch`."""
    samples = [{"text": "x" * (number % 5), "number": number} for number in range(60)]
    table = datasets.Dataset.from_list(samples).to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=8)
    with closing(CachedStream(table, "16MiB")) as stream:
        loader = DataLoader(stream, batch_size=5, num_workers=2)
        epochs = []
        for epoch in range(3):
            loader.dataset.set_epoch(epoch)
            epochs.append([n for batch in loader for n in batch["number"].tolist()])
        assert table.epoch == 2
        assert stream.counters.totals().hits == 120
    assert all(sorted(epoch) == list(range(60)) for epoch in epochs)


@pytest.mark.parametrize(
    ("make", "length", "words"),
    [
        (lambda shards: webdataset.WebDataset(shards, shardshuffle=4).shuffle(50), 10, "make them in the loader"),
        (lambda shards: webdataset.WebDataset(shards, shardshuffle=False, resampled=True), 30, "resampled"),
    ],
    ids=["batches of shuffled samples", "resampled shards"],
)
def test_what_is_drawn_anew_is_not_frozen(shards: list[str], caplog: Any, make: Any, length: int, words: str) -> None:
    """Batches that the stream makes of shuffled samples, and shards that it draws anew for ever, pass through, with
    one warning."""
    pipeline = make(shards).decode().to_tuple("npy", "cls").batched(10).with_epoch(length)
    with caplog.at_level(logging.WARNING), closing(CachedStream(pipeline, "16MiB")) as stream:
        epochs = [[int(number) for _, numbers in stream for number in numbers] for _ in range(3)]
        assert (stream.counters.totals().hits, stream.counters.totals().served) == (0, 3 * length)
    assert [len(epoch) for epoch in epochs] == [10 * length] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    [record] = caplog.records
    assert words in record.getMessage()
