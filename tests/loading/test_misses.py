"""Samples that draw random numbers while they are loaded are not stored, also where the look has not met them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import Store
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.node.budget import Budget
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.source.access import Odd
from tests.loading.twins import InBatches
from tests.sources import Made

pytestmark = pytest.mark.processes


def rare(index: int) -> torch.Tensor:
    """One class of a sorted folder is augmented."""
    return torch.tensor([index, np.random.rand() if 303 <= index < 312 else 0.0])


def from_the_system(index: int) -> torch.Tensor:
    """It draws from what nobody can watch."""
    return torch.tensor([float(index), *os.urandom(8)])


RARE, SYSTEM = Made(rare, 400), Made(from_the_system, 400)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_random_class_is_not_frozen(num_workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    """It has other draws in every epoch, and is counted as a bypass; the rest is cached."""
    with closing(CachedDataset(RARE)) as dataset:
        loader = CachedLoader(dataset, 8, num_workers=num_workers)
        epochs = [torch.cat(list(loader))[303:312, 1].tolist() for _ in range(3)]
        assert dataset.cache.filled == 400 - 16  # the two batches that hold it
        counts = dataset.counters.totals()  # type: ignore[union-attr]
        assert counts.served == 3 * 400
        assert counts.bypasses == 3 * 16
        assert len({*epochs[0], *epochs[1], *epochs[2]}) == 27


WAYS: dict[str, Callable[[CachedDataset], Any]] = {
    "samples": lambda dataset: [dataset[index] for index in range(400)],
    "batches": lambda dataset: [torch.stack(dataset.__getitems__(list(range(at, at + 8)))) for at in range(0, 400, 8)],
    "a wrapper": lambda dataset: map(ConcatDataset([dataset]).__getitem__, range(400)),
    "a DataLoader": lambda dataset: DataLoader(dataset, 8),
    "a CachedLoader": lambda dataset: CachedLoader(dataset, 8),
}


@pytest.mark.parametrize("source", [RARE, InBatches(RARE)], ids=["one by one", "in batches"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_rare_draw_is_frozen_on_no_way(way: Any, source: Any, caplog: pytest.LogCaptureFixture) -> None:
    """However a sample is asked for; one warning says so."""
    spec = SampleSpec.infer(rare(0))
    with closing(CachedDataset(source, spec=spec)) as dataset:
        epochs = [torch.stack([row for part in way(dataset) for row in part.reshape(-1, 2)]) for _ in range(2)]
        assert (epochs[0] != epochs[1]).any(dim=1).nonzero().flatten().tolist() == list(range(303, 312))
        assert len([text for text in caplog.messages if "draws random numbers for some samples" in text]) == 1


@pytest.mark.parametrize("source", [SYSTEM, InBatches(SYSTEM)], ids=["one by one", "in batches"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_samples_are_read_again_on_every_way(way: Any, source: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What draws from the system cannot be seen to draw; a second read tells."""
    with closing(CachedDataset(source, spec=SampleSpec.infer(from_the_system(0)))) as dataset:
        for _ in way(dataset):
            pass
        assert "is another one when it is read again" in caplog.text


class Mixed(Dataset[Any]):
    """Samples of one shape, but for those at `odd`; `broken` cannot be loaded, `stop` is interrupted."""

    def __init__(self, size: int, odd: tuple[int, ...] = (), broken: int = -1) -> None:
        self.size, self.odd, self.broken = size, odd, broken

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise OSError("broken")
        return torch.full((self.size + (index in self.odd),), index, dtype=torch.uint8), index


@dataclass
class Kept:
    """A store for half of the samples, and what is counted of it."""

    size: int

    def __post_init__(self) -> None:
        self.store = Store.create(SampleSpec.infer(Mixed(self.size)[0]), Arc(40, 20))
        self.counters = Counters.create()

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()
        self.counters.close()

    def load(self, source: Mixed, indices: list[int], **options: Any) -> list[Any]:
        request = CacheRequest(source, "", Budget.parse("auto"))
        served = CachedSource(OpenCache(request, source, cache=self.store, counters=self.counters))
        return served.load(self.store, indices, **options)

    def has_place(self, index: int) -> bool:
        return self.store.has_place(index)

    @property
    def filled(self) -> list[int]:
        """The indices whose slots hold their samples, which are looked at."""
        found = [index for index in range(40) if self.store.get(index) is not None]
        assert all(self.store.get(index)[0].unique().tolist() == [index] for index in found)  # type: ignore[index]
        return found

    @property
    def counted(self) -> tuple[int, int, int, int]:
        counts = self.counters.totals()
        return counts.served, counts.misses, counts.bypasses, counts.fills


@pytest.fixture(params=[50, 400_000], ids=["small", "two to a part"])
def kept(request: pytest.FixtureRequest) -> Iterator[Kept]:
    with Kept(request.param) as made:
        yield made


@pytest.mark.parametrize("in_batch", [False, True])
def test_samples_are_stored_counted_and_put_at_their_places(kept: Kept, in_batch: bool) -> None:
    """All that fit, wherever they lie among those that are odd and those that have no slot."""
    source, indices, places = Mixed(kept.size, (3, 12)), list(range(2, 16)), list(range(1, 29, 2))
    memory = [np.zeros(size, dtype=np.uint8) for size in kept.store.codec.sizes(30)]
    rows = kept.store.codec.rows(memory, 30)
    samples = kept.load(source, indices, **({"batch": rows, "rows": places} if in_batch else {}))
    assert [type(sample) is Odd for sample in samples] == [index in (3, 12) for index in indices]
    fitting = [index for index in indices if index not in (3, 12)]
    stored = [index for index in fitting if kept.has_place(index)]
    assert kept.filled == stored
    assert kept.counted == (14, len(stored), 14 - len(stored), len(stored))
    if in_batch:
        labels = [label for _, label in kept.store.codec.split(memory, 30)]
        expected = dict(zip(places, indices, strict=True))
        assert labels == [index if (index := expected.get(place, 0)) in fitting else 0 for place in range(30)]


def test_what_comes_before_an_error_of_the_source_is_kept(kept: Kept) -> None:
    """And counted."""
    with pytest.raises(OSError, match="broken"):
        kept.load(Mixed(kept.size, broken=9), list(range(20)))
    stored = [index for index in range(9) if kept.has_place(index)]
    assert (kept.filled, kept.counted) == (stored, (9, len(stored), 9 - len(stored), len(stored)))


def test_one_that_cannot_be_read_does_not_turn_a_frozen_cache_off() -> None:
    """It may be one that no sampler asks for; the look passes it over."""

    def gap(index: int) -> torch.Tensor:
        if index == 0:
            raise OSError("no file")
        return rare(index)

    with closing(CachedDataset(Made(gap, 400), allow_random=True)) as dataset:
        assert torch.equal(dataset[305], dataset[305])
