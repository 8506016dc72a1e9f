"""What set-up has read lies in the cache when the first epoch begins, and is not read again."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.setup import find
from lightning_stocache.source.random_split import spread
from tests.sources import CountedSource

pytestmark = pytest.mark.processes

LENGTH = 60  # a process reads some samples again once it has loaded 64, to see whether they are random
READ = 32  # samples of a quick source that set-up reads, each twice


def made(index: int) -> Any:
    return torch.full((5,), float(index)), index


class Source(Dataset[Any]):
    """Samples that are made of their index and noted in a file; those of `read` and `decode` may be kept as files."""

    seen = frozenset(spread(LENGTH, 4)).union(spread(LENGTH, READ - 2)[1:-1])
    """The indices that set-up reads: four, and 28 more, each evenly from the first to the last."""

    def __init__(self, log: Path, make: Callable[[int], Any] = made) -> None:
        self.log, self.make = log, make

    def __len__(self) -> int:
        return LENGTH

    def note(self, index: int) -> None:
        with self.log.open("a") as file:
            file.write(f"{index}\n")

    @property
    def read_indices(self) -> list[int]:
        """What has been read since this was asked last."""
        indices = list(map(int, self.log.read_text().split())) if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return indices

    def __getitem__(self, index: int) -> Any:
        self.note(index)
        return self.make(index)


class Files(Source):
    def read(self, index: int) -> bytes:
        self.note(index)
        return bytes([index] * 9)

    def decode(self, content: bytes, index: int) -> torch.Tensor:
        return torch.tensor(list(content))

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.decode(self.read(index), index)


class Augmented(Source):
    """Its transform is split before its random step."""

    seen = frozenset(spread(LENGTH, 4)).union(spread(LENGTH, READ - 2)[1:2])  # no more of a source that is random

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.transform = torch.nn.Sequential(torch.nn.Flatten(0), torch.nn.Dropout(0.5))

    def __getitem__(self, index: int) -> Any:
        self.note(index)
        return self.transform(torch.full((3, 3), index + 1.0)), index


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Source, {}),
        (lambda log: Source(log, lambda index: "a" * index), {}),
        (Files, {"store": "encoded"}),
        (Augmented, {}),
        (Source, {"dir": "disk"}),
    ],
    ids=["rows", "records", "files", "split", "disk"],
)
def test_what_was_read_is_hit_in_the_first_epoch(make, options, tmp_path) -> None:
    """Each sample is loaded once after set-up, or was stored there; both are counted, each in its column."""
    source = make(tmp_path / "log")
    if "dir" in options:
        options = {"dir": str(tmp_path)}
    with closing(CachedDataset(source, **options)) as dataset:
        cache, counters = dataset.cache, dataset.counters
        assert set(source.read_indices) >= source.seen
        assert cache.filled == counters.totals().setup_fills == len(source.seen)
        assert (counters.totals().fills, counters.totals().served) == (0, 0)
        assert sum(1 for _ in DataLoader(dataset, 8)) == 8
        counts = counters.totals()
        assert sorted(source.read_indices) == sorted(set(range(LENGTH)) - source.seen)
        assert (counts.hits, counts.misses, counts.fills) == (
            len(source.seen),
            LENGTH - len(source.seen),
            LENGTH - len(source.seen),
        )
        assert cache.filled == counts.fills + counts.setup_fills


def test_what_has_no_slot_is_not_stored(tmp_path) -> None:
    """A budget for fewer samples than set-up reads is not exceeded."""
    with closing(CachedDataset(Source(tmp_path / "log"), budget="10%")) as dataset:
        held = [index for index in range(LENGTH) if dataset.cache.has_place(index)]
        assert len(held) == LENGTH // 10
        assert dataset.cache.filled == dataset.counters.totals().setup_fills == len(Source.seen.intersection(held))


def test_what_is_too_large_is_read_again(tmp_path, monkeypatch) -> None:
    """As many samples are kept as fit in 64 MiB, here in less; the others are loaded in the first epoch."""
    monkeypatch.setattr(find, "MOST_BYTES", 5 * SampleSpec.infer(made(0)).nbytes)
    source = Source(tmp_path / "log")
    with closing(CachedDataset(source)) as dataset:
        assert dataset.cache.filled == 5
        assert len(source.read_indices) == 2 * len(source.seen)
        assert [dataset[index][1] for index in range(LENGTH)] == list(range(LENGTH))
        assert len(source.read_indices) == LENGTH - 5


def test_random_samples_are_not_stored() -> None:
    """A source that is cached as it is has the draws of the training, not those of set-up."""
    with closing(CachedDataset(CountedSource(LENGTH), allow_random=True)) as dataset:
        assert dataset.cache.filled == 0


@pytest.mark.named
@pytest.mark.parametrize("kind", [Source, Files, Augmented])
@pytest.mark.parametrize("served", [0, LENGTH])
def test_a_job_over_a_named_cache_reads_four_samples(kind, served, name, tmp_path) -> None:
    """They show that the data is that which lies there; of the first job's samples, nothing else is read again."""
    options: dict[str, Any] = {"name": name} | ({"store": "encoded"} if kind is Files else {})
    with closing(CachedDataset(kind(tmp_path / "first"), **options)) as first:
        for index in range(served):
            first[index]
        source = kind(tmp_path / "second")
        with closing(CachedDataset(source, strict=True, **options)) as second:
            assert second.cache.filled == max(served, len(source.seen))
            assert set(source.read_indices) == set(spread(LENGTH, 4))


@pytest.mark.named
def test_what_four_samples_do_not_show_is_looked_for_again(name, tmp_path) -> None:
    """Records, of which the first four look like rows, are found to be records."""
    four = spread(LENGTH, 4)
    sources = [Source(tmp_path / job, lambda index: torch.zeros(2 + (index not in four))) for job in "ab"]
    with (
        closing(CachedDataset(sources[0], name=name)) as first,
        closing(CachedDataset(sources[1], name=name)) as second,
    ):
        assert first.cache is not None
        assert second.cache is not None
        assert set(sources[1].read_indices) == Source.seen
