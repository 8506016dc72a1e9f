"""A cached stream: epoch one is the stream, later epochs come from memory, every sample once, over all ranks."""

import logging
import multiprocessing
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_stocache import CachedLoader, CachedStream
from lightning_stocache.cache.stream import StreamLedger
from lightning_stocache.sampling.residents import batches_of_rank, permutation
from lightning_stocache.setup import find, reader
from tests.jobs import warnings
from tests.loading.twins import same
from tests.processes import run_ranks, wait_until
from tests.sources import CountedStream

LENGTH = 103
ALL = list(range(LENGTH))


def row(number: int, values: int = 4) -> Any:
    return torch.full((values,), float(number)), number


def text(number: int, length: int = 7) -> Any:
    return "a" * (number * 37 % length), number


def turning(turns_at: int, number: int) -> Any:
    """A row at first, then another shape."""
    return row(number, 4 + (number > turns_at))


def augmented(number: int) -> Any:
    """Draws for every sample."""
    return row(number)[0] + torch.rand(1), number


def secret(number: int) -> Any:
    """Draws from a generator that cannot be watched."""
    return row(number)[0] + random.SystemRandom().random(), number


class Numbers(CountedStream):
    """Rows, or other samples of their numbers, perhaps in another order in every epoch; may raise at a position."""

    fails_at: int | None = None

    def __init__(self, make: Any = row, length: int = LENGTH, *, shuffles: bool = False) -> None:
        super().__init__(length, make)
        self.shuffles = shuffles

    def __iter__(self) -> Iterator[Any]:
        samples = super().__iter__()
        if self.shuffles:
            listed = list(samples)
            random.shuffle(listed)
            samples = iter(listed)
        for position, sample in enumerate(samples):
            if position == self.fails_at:
                raise KeyError(position)
            yield sample


Shuffled = partial(Numbers, shuffles=True)
Texts = partial(Numbers, text)
TurningSoon = partial(Numbers, partial(turning, 5))  # among the sixteen samples that decide


def numbers_of(batches: Any) -> list[int]:
    """The numbers of batches, or of samples."""
    return [number for _, numbers in batches for number in torch.as_tensor(numbers).reshape(-1).tolist()]


def listed(samples: list[Any]) -> Any:
    return [sample for sample, _ in samples], [number for _, number in samples]


def negative(sample: Any) -> Any:
    return -sample[0], sample[1]


# ---- epochs ----


@pytest.mark.parametrize(
    ("kind", "loader_kind", "options"),
    [
        (Numbers, DataLoader, {}),
        (Shuffled, DataLoader, {}),
        (Texts, DataLoader, {"num_workers": 2, "multiprocessing_context": "forkserver", "persistent_workers": True}),
        (Texts, CachedLoader, {}),
        (Numbers, CachedLoader, {"num_workers": 2, "persistent_workers": True}),
        (TurningSoon, CachedLoader, {"num_workers": 2, "batch_size": None}),
    ],
)
def test_epoch_one_is_the_stream_and_later_ones_come_from_memory(kind: Any, loader_kind: Any, options: Any) -> None:
    """Epoch one has the batches of the plain stream, later ones each sample once, shuffled, in such batches."""
    options = {"batch_size": 4} | options
    random.seed(0)
    plain = list(DataLoader(kind(), **options))
    random.seed(0)
    with closing(CachedStream(kind(), "16MiB")) as stream:
        loader = loader_kind(stream, **options)
        epochs = [list(loader) for _ in range(3)]
        reads, counts = stream.source.reads, stream.counters.totals()
        if loader_kind is CachedLoader:
            loader.close()
        del loader
    assert same(epochs[0], plain)
    sizes = sorted(len(numbers_of([batch])) for batch in plain)
    for epoch in epochs[1:]:
        assert sorted(numbers_of(epoch)) == ALL
        assert sorted(len(numbers_of([batch])) for batch in epoch) == sizes
        assert [type(part) for part in epoch[0]] == [type(part) for part in plain[0]]
    assert numbers_of(epochs[1]) != numbers_of(epochs[2])
    assert counts.hits == 2 * LENGTH
    assert counts.misses == counts.fills == LENGTH
    assert counts.bypasses == 0
    assert LENGTH < reads <= (3 * LENGTH if kind is Shuffled else LENGTH + 34)


@pytest.mark.parametrize(
    ("make", "loader_kind", "workers", "transform"),
    [
        (row, CachedLoader, 0, None),
        (row, CachedLoader, 0, negative),
        (row, CachedLoader, 2, negative),
        (text, DataLoader, 2, None),
        (text, CachedLoader, 2, None),
    ],
)
def test_unshuffled_epochs_are_the_first_one(make: Any, loader_kind: Any, workers: int, transform: Any) -> None:
    """With shuffle=False, all epochs have the batches of the plain stream, with all arguments of a loader."""
    collate = None if transform is None else listed
    arguments: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "drop_last": True, "collate_fn": collate}
    expected = make if transform is None else lambda number: transform(make(number))
    plain = list(DataLoader(Numbers(expected), **arguments))
    with closing(CachedStream(Numbers(make), "16MiB", shuffle=False, transform=transform)) as stream:
        loader = loader_kind(stream, **arguments)
        for _ in range(2):
            assert same(list(loader), plain)
        assert stream.counters.totals().hits >= LENGTH - 12
        if loader_kind is CachedLoader:
            loader.close()


@pytest.mark.processes
def test_the_order_follows_from_the_seed() -> None:
    """Two runs with one seed have the same epochs, whichever worker was faster. Another seed gives another order."""
    orders = []
    for seed in (1, 1, 2):
        with closing(CachedStream(Numbers(), "16MiB", seed=seed)) as stream:
            loader = DataLoader(stream, batch_size=4, num_workers=2, persistent_workers=True)
            orders.append([numbers_of(loader) for _ in range(2)])
            del loader
    assert orders[0] == orders[1]
    assert orders[0][1] != orders[2][1]


@pytest.mark.processes
def test_worker_init_fn_finds_the_stream() -> None:
    """worker_init_fn changes the user's own stream, in the first epoch and later."""
    with closing(CachedStream(Texts(), "16MiB")) as stream:
        call = {"worker_init_fn": lambda worker: get_worker_info().dataset.counts[0].add_(1000)}
        loader = CachedLoader(stream, batch_size=4, num_workers=1, **call)
        assert [len(numbers_of(loader)) for _ in range(3)] == [LENGTH] * 3
        assert stream.source.reads == LENGTH + 3000 + 32
        loader.close()


def test_a_stream_that_is_shared_again_begins_anew() -> None:
    """A loader that has served from the old memory serves from the new memory."""
    with closing(CachedStream(Numbers(), "16MiB")) as stream, closing(CachedLoader(stream, batch_size=4)) as loader:
        for _ in range(2):
            assert [sorted(numbers_of(loader)) for _ in range(3)] == [ALL] * 3
            assert stream.counters.totals().hits == 2 * LENGTH
            stream.share()


def test_a_known_length_ends_an_epoch() -> None:
    """A loader that knows the length stops there. That epoch is whole."""

    class Sized(Numbers):
        def __len__(self) -> int:
            return self.length

    with closing(CachedStream(Sized(length=20), "1MiB")) as stream:
        assert len(stream) == 20
        for _ in range(3):
            samples = iter(stream)
            assert sorted(next(samples)[1] for _ in range(20)) == list(range(20))
            assert stream.cache.fill_fraction == 1
        assert stream.counters.totals().hits == 40


def tag(sample: Any) -> tuple[int, Any]:
    content, number = sample
    return number, content if isinstance(content, str) else (tuple(content.shape), content.sum().item())


MAKERS: list[Any] = [row, text, partial(turning, 40), partial(row, values=3000), partial(text, length=20_000)]


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(12, 60))])
def test_every_whole_epoch_has_every_sample_as_often_as_the_stream(seed: int) -> None:
    """Random lives, against a plain list, with epochs that are broken off, raise, or run at the same time."""
    dice = random.Random(seed)
    make, different = dice.choice(MAKERS), dice.choice([3, 1000, 1000])
    length, shuffles = dice.choice([0, 1, 7, 63, 64, 65, 200]), dice.random() < 0.5
    life = Numbers(lambda number: make(number % different), length, shuffles=shuffles)
    expected, served = Counter(tag(life.sample(number)) for number in range(length)), 0
    budget, shuffle = dice.choice(["512KiB", "2MiB", "16MiB"]), dice.random() < 0.7
    with closing(CachedStream(life, budget, shuffle=shuffle)) as stream:
        loader_kind = dice.choice([None, DataLoader, CachedLoader])
        loader: Any = stream if loader_kind is None else loader_kind(stream, batch_size=4, collate_fn=list)
        for _ in range(dice.randrange(4, 14)):
            what = dice.choice(["whole", "whole", "whole", "break", "fail", "two"])
            life.fails_at = dice.randrange(length + 1) if what == "fail" else None
            samples, reads = iter(loader), dice.randrange(length + 1)
            if what == "break":
                for _ in range(reads):
                    next(samples, None)
                del samples
                continue
            if what == "two":
                other = samples
                samples = iter(loader)
                next(other, None)
            try:
                came = list(samples)
            except KeyError:
                continue
            flat = came if loader_kind is None else [sample for batch in came for sample in batch]
            assert Counter(map(tag, flat)) == expected, what
            served += length
        assert stream.counters.totals().served >= served


# ---- streams that pass through ----


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Numbers(partial(turning, 20)), 'layout="records"'),
        (Numbers(augmented), "it moves the generators of torch .*transform="),
        (Numbers(secret), "not among those.*transform="),
        (Numbers(partial(row, values=4096)), "its 103 samples take about 1.6 MiB, and its budget is 1 MiB"),
    ],
    ids=["another shape", "random", "random in secret", "large"],
)
def test_what_cannot_be_kept_passes_through(source: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is random, does not fit, or changes its shape is the stream in every epoch; one warning tells why."""
    with caplog.at_level(logging.WARNING), closing(CachedStream(source, "1MiB")) as stream:
        epochs = [list(stream) for _ in range(3)]
        counts = stream.counters.totals()
        assert stream.cache.memory_bytes < 2**16
    assert all(numbers_of(epoch) == ALL for epoch in epochs)
    assert same(epochs[1], epochs[2]) == ("transform=" not in words)
    assert (counts.hits, counts.served) == (0, 3 * LENGTH)
    assert stream.source.reads <= 3 * LENGTH + 34
    [record] = caplog.records
    assert re.search(words, record.getMessage(), re.DOTALL)


@pytest.mark.parametrize("transform", [None, lambda sample: (sample[0] + torch.rand(1), sample[1])])
def test_freeze_random_freezes_the_stream_and_not_the_transform(transform: Any) -> None:
    """freeze_random=True caches the first draw of a random stream. The transform draws in every epoch."""
    with closing(CachedStream(Numbers(augmented), "16MiB", freeze_random=True, transform=transform)) as stream:
        epochs = [{int(n): float(x[0]) for x, n in stream} for _ in range(3)]
        assert stream.counters.totals().hits == 2 * LENGTH
    assert (epochs[0] == epochs[1] == epochs[2]) == (transform is None)


def test_a_stream_that_is_always_broken_off_is_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    """After three broken epochs it passes through, with one warning."""
    with caplog.at_level(logging.WARNING), closing(CachedStream(Numbers(), "16MiB")) as stream:
        for _ in range(6):
            assert [next(samples)[1] for samples in [iter(stream)] for _ in range(5)] == list(range(5))
        assert stream.counters.totals().hits == 0
        assert stream.cache.filled == 0
    assert len(caplog.records) == 1
    assert "broken off" in caplog.text


def test_a_stream_whose_first_samples_do_not_come_passes_through(monkeypatch: Any, caplog: Any) -> None:
    """Set-up gives it up after a while, and every epoch is the stream."""
    here = os.getpid()

    class Stuck(Numbers):
        def __iter__(self) -> Iterator[int]:
            if os.getpid() != here:
                time.sleep(600)
            yield from super().__iter__()

    monkeypatch.setattr(find, "start_method", lambda chosen: "fork")
    monkeypatch.setattr(reader, "PATIENCE_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING), closing(CachedStream(Stuck(), "1MiB")) as stream:
        assert [len(list(stream)) for _ in range(3)] == [LENGTH] * 3
        assert stream.counters.totals().bypasses == 3 * LENGTH
    assert "reading it has not ended in 0 s" in caplog.text


def test_after_close_and_without_a_budget_it_passes_through() -> None:
    """An epoch after `close` is the stream. budget=0 stores no sample, and counts all as bypasses."""
    closed, off = CachedStream(Numbers()), CachedStream(Numbers(), 0)
    assert [numbers_of(off) for _ in range(2)] == [ALL] * 2
    assert off.cache is None
    assert off.counters.totals().bypasses == 2 * LENGTH
    list(closed)
    closed.close()
    assert numbers_of(closed) == ALL
    off.close()


@pytest.mark.parametrize(
    ("given", "arguments", "error", "words"),
    [
        (iter([1]), {}, TypeError, "samples anew in every epoch: .* got <list_iterator"),
        (5, {}, TypeError, "an object with __iter__, or a function that makes an iterator; got 5"),
        (Numbers, {}, TypeError, "got <class '.*Numbers'>"),
        ("text", {}, TypeError, "must be a stream .* got 'text'"),
        (TensorDataset(torch.zeros(3)), {}, TypeError, "with indices can be given to CachedDataset"),
        (IterableWrapper([1, 2]), {}, TypeError, "got IterableWrapper"),
        (Numbers(), {"budget": "50%"}, ValueError, "nobody knows the size"),
        (Numbers(), {"seed": -1}, ValueError, "seed"),
        (Numbers(), {"defer": "yes"}, ValueError, "defer must be true or false"),
    ],
)
def test_wrong_arguments_are_refused(given: Any, arguments: Any, error: type[Exception], words: str) -> None:
    """The error tells what is allowed."""
    with pytest.raises(error, match=words):
        CachedStream(given, **arguments)


@pytest.mark.processes
def test_an_iterator_that_begins_anew_is_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    """Its `__iter__` decides, where set-up reads it twice; it is never read in the process of the training."""

    class Rewinds:
        def __iter__(self) -> "Rewinds":
            self.number = 0
            return self

        def __next__(self) -> Any:
            self.number += 1
            if self.number > LENGTH:
                raise StopIteration
            return row(self.number - 1)

    source = Rewinds()
    with closing(CachedStream(source, "16MiB")) as stream:
        assert "number" not in vars(source)
        assert [sorted(numbers_of(stream)) for _ in range(3)] == [ALL] * 3
        assert stream.counters.totals().hits == 2 * LENGTH
    assert warnings(caplog) == []


# ---- streams of libraries ----


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four tar shards of 25 samples."""
    webdataset = pytest.importorskip("webdataset")
    folder = tmp_path_factory.mktemp("shards")
    paths = [str(folder / f"{shard}.tar") for shard in range(4)]
    for shard, path in enumerate(paths):
        with webdataset.TarWriter(path) as writer:
            for number in range(shard * 25, shard * 25 + 25):
                writer.write({"__key__": f"{number:05}", "npy": np.full((2, 3), number, np.float32), "cls": number})
    return paths


@pytest.mark.processes
def test_webdataset_is_cached(shards: list[str]) -> None:
    """Tar shards with WebDataset's own shuffling."""
    pipeline = pytest.importorskip("webdataset").WebDataset(shards, shardshuffle=4).shuffle(10)
    with closing(CachedStream(pipeline.decode().to_tuple("npy", "cls"), "16MiB")) as stream:
        loader = DataLoader(stream, batch_size=8, num_workers=2)
        for _ in range(3):
            samples = [(int(n), float(x[0, 0])) for xs, ns in loader for x, n in zip(xs, ns, strict=True)]
            assert sorted(samples) == [(number, float(number)) for number in range(100)]
        counts = stream.counters.totals()
    assert (counts.hits, counts.misses) == (200, 100)


@pytest.mark.processes
def test_streams_of_hugging_face_are_cached() -> None:
    """A shuffled `datasets.IterableDataset` is stored, and receives the calls of `set_epoch`."""
    samples = [{"text": "x" * (number % 5), "number": number} for number in range(60)]
    table = pytest.importorskip("datasets").Dataset.from_list(samples).to_iterable_dataset(num_shards=4)
    table = table.shuffle(seed=3, buffer_size=8)
    with closing(CachedStream(table, "16MiB")) as stream:
        loader: Any = DataLoader(stream, batch_size=5, num_workers=2)
        for epoch in range(3):
            loader.dataset.set_epoch(epoch)
            assert sorted(n for batch in loader for n in batch["number"].tolist()) == list(range(60))
        assert table.epoch == 2
        assert stream.counters.totals().hits == 120


@pytest.mark.parametrize(
    ("options", "length", "words"),
    [
        ({"shardshuffle": 4}, 10, "make them in the loader"),
        ({"shardshuffle": False, "resampled": True}, 30, "resampled"),
    ],
)
def test_what_is_drawn_anew_is_not_frozen(shards: Any, caplog: Any, options: Any, length: int, words: str) -> None:
    """Batches of shuffled samples, and shards that are drawn anew, pass through, with one warning."""
    pipeline = pytest.importorskip("webdataset").WebDataset(shards, **options).shuffle(50)
    pipeline = pipeline.decode().to_tuple("npy", "cls").batched(10).with_epoch(length)
    with caplog.at_level(logging.WARNING), closing(CachedStream(pipeline, "16MiB")) as stream:
        epochs = [numbers_of(stream) for _ in range(3)]
        assert (stream.counters.totals().hits, stream.counters.totals().served) == (0, 3 * length)
    assert [len(epoch) for epoch in epochs] == [10 * length] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    [record] = caplog.records
    assert words in record.getMessage()


# ---- ranks ----


class Divided(CountedStream):
    """Every worker of every rank reads its share of the numbers."""

    def __init__(self) -> None:
        super().__init__(LENGTH)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(self.rank * workers + worker, LENGTH, self.world * workers):
            yield row(number)


@contextmanager
def shared() -> Iterator[CachedStream]:
    """A stream that all ranks share. When it is closed, all ranks have read it."""
    with closing(CachedStream(Divided(), "16MiB", defer=True)) as stream:
        stream.share()
        yield stream
        dist.barrier()


def whole(kind: Any, workers: int) -> Any:
    """The numbers of every batch of three epochs, and the counts of all ranks."""
    with shared() as stream:
        loader = kind(stream, batch_size=4, num_workers=workers)
        epochs = [[numbers.tolist() for _, numbers in loader] for _ in range(3)]
        dist.barrier()
        counts = stream.counters.totals()
        if kind is CachedLoader:
            loader.close()
    return epochs, counts


def kill_worker() -> None:
    """Kill the only worker, and wait for the error of torch's handler of SIGCHLD."""
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    wait_until(lambda: False)


def killed(rank: int) -> Any:
    """The numbers of three epochs, and the hits, after a worker of rank zero was killed in an epoch before."""
    with shared() as stream:
        loader: Any = DataLoader(stream, batch_size=1, num_workers=1, prefetch_factor=2)
        if rank == 0:
            batches = iter(loader)
            next(batches)
            with pytest.raises(RuntimeError, match="is killed by signal"):
                kill_worker()
            del batches
        else:
            list(loader)
        epochs = [sorted(int(numbers) for _, numbers in loader) for _ in range(3)]
        dist.barrier()
        return epochs, stream.counters.totals().hits


def lives(rank: int) -> Any:
    """Whole epochs of both kinds of loaders, a killed worker, and three epochs of rank zero beside one of rank one."""
    found = whole(DataLoader, 0), whole(CachedLoader, 2), killed(rank)
    StreamLedger.patience = 0.2
    with shared() as stream:
        return *found, [sorted(number for _, number in stream) for _ in range(3 if rank == 0 else 1)]


@pytest.mark.processes
def test_every_sample_comes_once_over_all_ranks() -> None:
    """Later epochs are dealt to both ranks, in equally many batches. A killed worker costs an epoch and no sample comes
    twice; if the ranks are out of step, the stream passes through after a wait."""
    first, second = run_ranks(lives, 2)
    # The batches of a plain DataLoader are not known: as by DistributedSampler, a sample comes twice.
    for twice, (epochs, counts), (of_second, _) in zip((1, 0), first[:2], second[:2], strict=True):
        for number, (ours, theirs) in enumerate(zip(epochs, of_second, strict=True)):
            seen = [index for batch in ours + theirs for index in batch]
            assert set(seen) == set(ALL)
            assert len(seen) == LENGTH + (twice if number else 0)
            assert number == 0 or len(ours) == len(theirs)
        assert {index for batch in epochs[1] for index in batch} != {index for batch in epochs[0] for index in batch}
        assert counts.misses == LENGTH
        assert counts.hits == 2 * (LENGTH + twice)

    (epochs, hits), (of_second, _) = first[2], second[2]
    for ours, theirs in zip(epochs, of_second, strict=True):
        assert set(ours + theirs) == set(ALL)
        assert len(ours + theirs) <= LENGTH + 1
    assert LENGTH * 2 <= hits <= LENGTH * 2 + 4

    assert first[3] == [ALL[::2]] * 3
    assert second[3] == [ALL[1::2]]


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 20), st.booleans())
def test_batches_are_dealt_evenly(samples: int, ranks: int, size: int, drop_last: bool) -> None:
    """All ranks get equally many batches, none too large, and every sample once, unless there are too few samples."""
    order = permutation(samples, 0)
    dealt = [batches_of_rank(order, rank, ranks, size, drop_last=drop_last) for rank in range(ranks)]
    assert len({len(batches) for batches in dealt}) == 1
    sizes = [len(batch) for batches in dealt for batch in batches]
    assert all(0 < count <= size for count in sizes)
    seen = sorted(index for batches in dealt for batch in batches for index in batch.tolist())
    if drop_last:
        assert set(sizes) <= {size}
        assert len(set(seen)) == len(seen) == samples // (ranks * size) * ranks * size
    else:
        assert set(seen) == set(range(samples))
        few = samples // ranks < -(-samples // (ranks * size))
        assert len(seen) == samples or (few and len(seen) < samples + ranks)


class Failing(Numbers):
    """A stream whose file is gone when it is read for the second time."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if self.passes:
                raise FileNotFoundError("the shard is gone")
            yield sample
        self.passes += 1


def test_a_stream_that_fails_when_it_is_read_again_is_not_called_random(caplog: Any) -> None:
    """The error is the reason; the epoch then raises it, as without a cache."""
    with closing(CachedStream(Failing(), "16MiB")) as stream:
        assert len(list(stream)) == LENGTH
        with pytest.raises(FileNotFoundError):
            list(stream)
    [words] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    reason = "reading it raised FileNotFoundError: the shard is gone (when it was read again)"
    assert words == f"Failing passes through uncached: {reason}"


def test_a_sample_of_a_stream_that_cannot_be_stored_is_named_by_its_number(caplog: Any) -> None:
    """As of a dataset, by its index."""
    with closing(CachedStream(CountedStream(8, lambda number: lambda: number), "16MiB")) as stream:
        assert stream.cache is None
    assert "passes through uncached: sample 0 cannot be kept as bytes: " in caplog.text
