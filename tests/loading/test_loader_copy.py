"""cache_loader: a finished loader keeps its batches, draws and attributes, and loads each sample once."""

import gc
import logging
import os
import re
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_stocache import (
    CachedDataset,
    CachedLoader,
    CachedStream,
    CacheMeter,
    RollingCache,
    cache_loader,
)
from lightning_stocache.loading.loader_tree import cached_in_leaves
from tests.cache.leaves import same
from tests.jobs import warnings
from tests.loading.twins import epochs_of, looked, seed_all
from tests.processes import memory_files, run_ranks
from tests.sources import CountedSource, CountedStream, Made

SAMPLES = 24


class Padding(DataLoader[Any]):
    """A user's own class, with an argument and a `collate_fn` of its own, which removes what it is given."""

    def __init__(self, dataset: Any, width: int, **options: Any) -> None:
        options.pop("tag", None)
        self.width = width
        super().__init__(dataset, collate_fn=self.pad, **options)

    def pad(self, samples: list[Any]) -> Any:
        images = torch.stack([image for image, _ in samples])
        return torch.nn.functional.pad(images, (self.width, 0)), [label for _, label in samples]


class Weighted(torch.utils.data.Sampler[int]):
    """A user's own, which draws some samples twice."""

    def __iter__(self) -> Any:
        return iter(torch.randint(0, SAMPLES, (20,)).tolist())

    def __len__(self) -> int:
        return 20


def in_pairs(samples: list[Any]) -> Any:
    """A `collate_fn` of the user's."""
    return [label for _, label in samples], torch.stack([image for image, _ in samples])


def set_up(worker: int) -> None:
    """A `worker_init_fn` that needs the user's own dataset."""
    assert isinstance(torch.utils.data.get_worker_info().dataset, CountedSource)


def loader_of(source: Any, options: dict[str, Any]) -> Any:
    """A loader with these options, some of which are functions that make one."""
    options = {name: value() if name in ("generator", "sampler") else value for name, value in options.items()}
    return options.pop("kind", DataLoader)(source, **options)


LOADERS: dict[str, dict[str, Any]] = {
    "in_order": {"batch_size": 5},
    "shuffled": {"batch_size": 5, "shuffle": True, "drop_last": True},
    "workers": {"batch_size": 4, "shuffle": True, "num_workers": 2, "worker_init_fn": set_up, "timeout": 300},
    "persistent": {
        **{"batch_size": 4, "num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
        **{"generator": lambda: torch.Generator().manual_seed(5), "shuffle": True},
    },
    "spawned": {"batch_size": 8, "num_workers": 1, "multiprocessing_context": "forkserver", "collate_fn": in_pairs},
    "sampler": {"batch_size": 6, "sampler": Weighted, "collate_fn": in_pairs},
    "batch_sampler": {"batch_sampler": [[3, 1], [7], [20, 21, 22]]},
    "without_batches": {"batch_size": None, "shuffle": True},
    "another_class": {"kind": Padding, "width": 2, "tag": "blue", "batch_size": 5, "shuffle": True},
    "another_class_with_workers": {"kind": Padding, "width": 1, "batch_size": 5, "num_workers": 2},
    "cached_loader": {"kind": CachedLoader, "batch_size": 5, "num_workers": 1, "gather": "worker"},
}


@pytest.mark.processes
@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_batches_draws_and_attributes_are_those_of_the_loader(options, tmp_path):
    """Three epochs, the second broken off, give the same batches and random states, and load each sample once."""
    expected = epochs_of(loader_of(CountedSource(SAMPLES), options))
    source = CountedSource(SAMPLES, log_path=tmp_path / "loads")
    plain = loader_of(source, options)
    loader = cache_loader(plain, "1MiB")
    at_set_up = source.loads
    [dataset] = cached_in_leaves(loader)
    assert type(loader) is (CachedLoader if type(plain) is DataLoader else type(plain))
    assert isinstance(loader.dataset, CountedSource)
    assert (loader.dataset.shape, loader.dataset.loads) == (source.shape, source.loads)
    names = vars(plain).keys() - {"dataset", "_iterator", "worker_init_fn", "position", "collate_fn"}
    # Lightning's notes of the arguments, which it makes for all loaders once a hook has raised, are no attributes.
    names = {name for name in names if not name.startswith("__")}
    assert all(getattr(loader, name) is value for name, value in vars(plain).items() if name in names)
    assert loader.num_workers == 0 or loader.multiprocessing_context is plain.multiprocessing_context
    assert same(epochs_of(loader), expected)
    assert source.loads - at_set_up - looked(dataset) <= SAMPLES
    assert plain.dataset is source


class Adapter(DataLoader[Any]):
    """Reads a loader inside, as Accelerate's and Ray's do."""

    def __init__(self, inside: DataLoader[Any]) -> None:
        super().__init__(inside.dataset, batch_size=inside.batch_size)
        self.inside = inside

    def __iter__(self) -> Any:
        return (batch + 1 for batch in self.inside)


def test_a_loader_that_reads_another_is_cached():
    """The loader inside reads the cache, too, and the given one stays as it is."""
    adapter = Adapter(DataLoader(Made(torch.tensor, SAMPLES), 6))
    inside = adapter.inside
    loader = cache_loader(adapter, "1MiB")
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == list(range(1, SAMPLES + 1))
    [dataset] = cached_in_leaves(loader)
    assert dataset.counters.totals().hits >= SAMPLES
    assert adapter.inside is inside
    assert isinstance(loader.inside, CachedLoader)
    assert loader.inside.dataset is loader.dataset


def test_the_memory_is_freed_with_the_last_reference():
    """It needs no garbage collection; batches and the loader that was given stay usable."""
    source = Made(lambda index: torch.full((300,), index), SAMPLES)
    plain = DataLoader(source, 6)
    before = memory_files({os.getpid()})
    gc.disable()
    try:
        loader = cache_loader(plain, "1MiB")
        batch, *_ = [list(loader)[1] for _ in range(3)]
        assert memory_files({os.getpid()}) > before
        del loader
        assert memory_files({os.getpid()}) == before
    finally:
        gc.enable()
    assert batch[:, 0].tolist() == list(range(6, 12))
    assert len(list(plain)) == 4


def test_a_meter_measures_a_loader():
    """The hit rate of the second epoch is one; a sampler's indices alone have a slot."""
    loader = cache_loader(DataLoader(Made(torch.tensor, SAMPLES), 2, sampler=[1, 4, 4, 9, 20, 1]), "1MiB")
    meter = CacheMeter(loader)
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == [1, 4, 4, 9, 20, 1]
        metrics = meter.epoch()
    assert metrics["stocache/hit_rate"] == 1
    [dataset] = cached_in_leaves(loader)
    assert len(dataset.cache) == 4


@pytest.mark.named
def test_a_name_outlives_the_loader(name, tmp_path):
    """The next loader of that name loads nothing but what is compared, whatever its sampler draws."""
    source = CountedSource(SAMPLES, log_path=tmp_path / "loads")
    loader = cache_loader(DataLoader(source, 4, sampler=[2, 3]), "1MiB", name=name)
    list(loader)
    [dataset] = cached_in_leaves(loader)
    assert len(dataset.cache) == SAMPLES
    del loader, dataset
    loader = cache_loader(DataLoader(source, 4), "1MiB", name=name)
    [dataset] = cached_in_leaves(loader)
    assert dataset.counters.totals().fills == 0
    assert dataset.cache.filled >= 2


class Endless(Dataset[Any]):
    """A dataset without a length."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Iterating(DataLoader[Any]):
    """Begins to read in its constructor, as Ultralytics' InfiniteDataLoader does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.iterator = super().__iter__()


class Wrapper:
    """A user's own, around a loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader


def noise(index: int) -> torch.Tensor:
    """It is random in itself, and cannot be split."""
    return torch.rand(3) + index


UNCACHED = {
    "CountedStream passes through uncached: it is iterable-style.*CachedStream": lambda: DataLoader(CountedStream(4)),
    "list passes through uncached: it is empty": lambda: DataLoader([]),
    "Endless passes through uncached: it has no length": lambda: DataLoader(Endless(), sampler=[1, 2]),
    "list passes through uncached: Iterating reads it already": lambda: Iterating([1, 2, 3]),
    "Made .* passes through uncached:.*random": lambda: DataLoader(Made(noise, SAMPLES), 4),
}


@pytest.mark.parametrize(("words", "make"), UNCACHED.items(), ids=range(len(UNCACHED)))
def test_what_cannot_be_cached_is_returned_with_one_warning(words, make, caplog):
    """The loader itself; strict=True raises the reason."""
    loader = make()
    assert cache_loader(loader, "1MiB") is loader
    [warning] = warnings(caplog)
    assert re.search(words, warning)
    with pytest.raises((TypeError, ValueError), match="cannot be cached"):
        cache_loader(loader, "1MiB", strict=True)


@pytest.mark.processes
def test_what_is_cached_already_is_returned(caplog):
    """So is any loader with a budget of 0, without a word."""
    caplog.set_level(logging.WARNING)
    cached = cache_loader(DataLoader(Made(torch.tensor, 6)), "1MiB")
    by_hand = DataLoader(CachedDataset(Made(torch.tensor, 6), "1MiB"))
    stream = DataLoader(CachedStream(CountedStream(4), 0))
    off = DataLoader(Made(torch.tensor, 6))
    for loader in (cached, by_hand, stream):
        assert cache_loader(loader) is loader
    assert cache_loader(off, 0) is off
    by_hand.dataset.close()
    with closing(RollingCache(Made(torch.tensor, 6), "1MiB")) as pool:
        rolling = CachedLoader(pool, 2)
        assert cache_loader(rolling) is rolling
    assert not warnings(caplog)


@pytest.mark.parametrize("given", [None, [1, 2], "train", Made(torch.tensor, 4), Wrapper(DataLoader([1]))])
def test_anything_but_a_loader_is_refused(given):
    """The TypeError names what was given."""
    with pytest.raises(TypeError, match=f"loader must be a torch.utils.data.DataLoader, got {type(given).__name__}"):
        cache_loader(given)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ValueError, {"budget": "much"}),
        (ValueError, {"store": "raw"}),
        (ValueError, {"strict": "no"}),
        (ValueError, {"share": "no"}),
        (ValueError, {"name": "a/b"}),
        (TypeError, {"dir": 5}),
        (TypeError, {"fingerprint": 5}),
    ],
)
def test_a_wrong_option_is_refused(error, options):
    """Before anything is read."""
    [option] = options
    with pytest.raises(error, match=option):
        cache_loader(DataLoader([1, 2]), **options)


def train(rank: int, path: str) -> tuple[list[int], int]:
    """Three epochs of the samples that a DistributedSampler deals to a rank, and a loader of rank 0 alone."""
    source = CountedSource(SAMPLES, log_path=path)
    sampler = DistributedSampler(source, seed=3)
    loader = cache_loader(DataLoader(source, 4, sampler=sampler), "1MiB")
    if rank == 0:
        alone = cache_loader(DataLoader(CountedSource(SAMPLES), 4), "1MiB", share=False)
        assert len(list(alone)) == 6
    seed_all()
    drawn = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        drawn += [label for _, labels in loader for label in labels.tolist()]
    [dataset] = cached_in_leaves(loader)
    return drawn, looked(dataset)


@pytest.mark.processes
def test_the_ranks_of_a_node_share_a_cache(tmp_path):
    """Each sample is loaded once, by one of the ranks; share=False caches the loader of one rank."""
    ranks = run_ranks(train, 2, str(tmp_path / "loads"))
    for rank, (drawn, _) in enumerate(ranks):
        source = CountedSource(SAMPLES)
        sampler = DistributedSampler(source, 2, rank, seed=3)
        expected = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            expected += [index % source.classes for index in sampler]
        assert drawn == expected
    looks = max(looks for _, looks in ranks)
    assert CountedSource(SAMPLES, log_path=tmp_path / "loads").loads - looks <= 3 * SAMPLES  # set-up reads each twice


class Slotted(DataLoader[Any]):
    """Keeps an attribute outside of its `__dict__`."""

    __slots__ = ("extra",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "extra", 3)


def test_attributes_in_slots_are_copied() -> None:
    """As all others are."""
    copied: Any = cache_loader(Slotted(Made(torch.tensor, 8), 4), budget="1MiB")
    assert cached_in_leaves(copied)
    assert copied.extra == 3


@pytest.mark.processes
def test_a_loader_whose_workers_have_begun_passes_through(caplog: pytest.LogCaptureFixture) -> None:
    """Its next epoch is not the first: the copy would have another order."""
    plain = DataLoader(Made(torch.tensor, 8), 4, num_workers=1, persistent_workers=True)
    list(plain)
    assert cache_loader(plain, budget="1MiB") is plain
    assert "reads it already" in caplog.text
