"""A cached stream: epoch one is the stream, later epochs come from memory, every sample once."""

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_stocache import CachedLoader, CachedStream
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.setup import child, first_samples
from tests.loading.twins import same
from tests.sources import CountedStream

LENGTH = 103


class Numbers(CountedStream):
    """A tensor and its number."""

    length = LENGTH

    def sample(self, number: int) -> Any:
        return torch.full((4,), float(number)), number


class Texts(Numbers):
    """Samples that are records."""

    def sample(self, number: int) -> Any:
        return "a" * (number % 7), number


class Turning(Numbers):
    """Rows at first, then another shape."""

    def __init__(self, turns_at: int) -> None:
        super().__init__()
        self.turns_at = turns_at

    def sample(self, number: int) -> Any:
        return torch.full((4 + (number > self.turns_at),), float(number)), number


class Augmented(Numbers):
    """Draws for every sample."""

    def sample(self, number: int) -> Any:
        return torch.full((4,), float(number)) + torch.rand(1), number


class Secret(Numbers):
    """Draws for every sample from a generator that cannot be watched."""

    def __iter__(self) -> Iterator[Any]:
        draws = random.SystemRandom()
        for tensor, number in super().__iter__():
            yield tensor + draws.random(), number


class Shuffled(Numbers):
    """Another order in every epoch."""

    def __iter__(self) -> Iterator[Any]:
        samples = list(super().__iter__())
        random.shuffle(samples)
        yield from samples


def numbers_of(loader: Any) -> list[int]:
    return [number for _, numbers in loader for number in (numbers.tolist() if hasattr(numbers, "tolist") else numbers)]


def listed(samples: list[Any]) -> Any:
    return [sample for sample, _ in samples], [number for _, number in samples]


def plus_one(sample: Any) -> Any:
    return sample[0] + 1, sample[1]


@pytest.mark.parametrize("kind", [Numbers, Texts, Shuffled])
def test_epoch_one_is_the_stream_and_later_ones_come_from_memory(kind: type[Numbers]) -> None:
    """The first epoch has the samples of the plain stream in order. Later epochs have each sample once, shuffled."""
    random.seed(0)
    plain = numbers_of(DataLoader(kind(), batch_size=4, collate_fn=listed))
    random.seed(0)
    with closing(CachedStream(kind(), "16MiB")) as stream:
        loader = DataLoader(stream, batch_size=4, collate_fn=listed)
        epochs = [numbers_of(loader) for _ in range(4)]
        reads, counts = stream.source.reads, stream.counters.totals()
    assert epochs[0] == plain
    assert all(sorted(epoch) == list(range(LENGTH)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs[1:]}) == 3
    assert counts.hits == 3 * LENGTH
    assert counts.misses == counts.fills == LENGTH
    assert counts.bypasses == 0
    assert LENGTH < reads <= (3 * LENGTH if kind is Shuffled else LENGTH + 34)


@pytest.mark.parametrize("turns_at", [5, 20])
def test_samples_of_many_shapes_are_records_if_the_first_ones_show_it(turns_at: int, caplog: Any) -> None:
    """The first sixteen samples decide. If a later sample differs, the stream passes through, with a warning."""
    seen = turns_at < 16
    with caplog.at_level(logging.WARNING), closing(CachedStream(Turning(turns_at=turns_at), "16MiB")) as stream:
        assert [sorted(number for _, number in stream) for _ in range(3)] == [list(range(LENGTH))] * 3
        assert stream.counters.totals().hits == (2 * LENGTH if seen else 0)
    assert ('layout="records"' in caplog.text) != seen


@pytest.mark.processes
@pytest.mark.parametrize(("method", "persistent"), [("fork", False), ("forkserver", True)])
def test_workers_store_and_serve_their_shares(method: str, persistent: bool) -> None:
    """With workers, every sample comes once in each epoch, and only the first epoch reads the stream."""
    with closing(CachedStream(Texts(), "16MiB")) as stream:
        loader = DataLoader(
            stream, 4, num_workers=2, collate_fn=listed, multiprocessing_context=method, persistent_workers=persistent
        )
        plain = numbers_of(DataLoader(Texts(), batch_size=4, num_workers=2, collate_fn=listed))
        epochs = [numbers_of(loader) for _ in range(3)]
        counts = stream.counters.totals()
        del loader
    assert epochs[0] == plain
    assert all(sorted(epoch) == list(range(LENGTH)) for epoch in epochs)
    assert counts.hits == 2 * LENGTH
    assert counts.misses == counts.fills == LENGTH


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_follows_from_the_seed(workers: int) -> None:
    """Two runs with one seed have the same epochs, whichever worker was faster. Another seed gives another order."""
    orders = []
    for seed in (1, 1, 2):
        with closing(CachedStream(Numbers(), "16MiB", seed=seed)) as stream:
            loader = DataLoader(stream, batch_size=4, num_workers=workers)
            orders.append([numbers_of(loader) for _ in range(3)])
    assert orders[0] == orders[1]
    assert orders[0][1:] != orders[2][1:]


@pytest.mark.parametrize(("kind", "word"), [(Augmented, "torch"), (Secret, "not among those")])
def test_a_random_stream_is_not_frozen(kind: Any, word: str, caplog: pytest.LogCaptureFixture) -> None:
    """A stream that augments its samples passes through, with one warning that tells how to cache it."""
    with caplog.at_level(logging.WARNING), closing(CachedStream(kind(), "16MiB")) as stream:
        epochs = [{int(n): float(x[0]) for x, n in stream} for _ in range(3)]
        counts = stream.counters.totals()
    assert epochs[1] != epochs[2]
    assert counts.hits == 0
    assert counts.served == 3 * LENGTH
    assert len(caplog.records) == 1
    assert word in caplog.text
    assert "transform=" in caplog.text


@pytest.mark.parametrize("transform", [None, lambda sample: (sample[0] + torch.rand(1), sample[1])])
def test_allow_random_freezes_the_stream_and_not_the_transform(transform: Any) -> None:
    """allow_random=True caches the first draw of a random stream. The transform draws in every epoch."""
    with closing(CachedStream(Augmented(), "16MiB", allow_random=True, transform=transform)) as stream:
        epochs = [{int(n): float(x[0]) for x, n in stream} for _ in range(3)]
        assert stream.counters.totals().hits == 2 * LENGTH
    assert (epochs[0] == epochs[1] == epochs[2]) == (transform is None)


@pytest.mark.processes
def test_a_broken_epoch_begins_again() -> None:
    """After a break, no sample comes twice, and the next whole epoch is stored."""
    with closing(CachedStream(Numbers(), "16MiB")) as stream:
        loader = DataLoader(stream, batch_size=4, num_workers=2)
        next(iter(loader))
        epochs = [numbers_of(loader) for _ in range(3)]
        hits = stream.counters.totals().hits
    assert all(sorted(epoch) == list(range(LENGTH)) for epoch in epochs)
    assert hits == 2 * LENGTH


def test_a_stream_that_is_always_broken_off_is_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    """After three broken epochs it passes through, with one warning."""
    with caplog.at_level(logging.WARNING), closing(CachedStream(Numbers(), "16MiB")) as stream:
        for _ in range(6):
            assert [next(samples)[1] for samples in [iter(stream)] for _ in range(5)] == list(range(5))
        assert stream.counters.totals().hits == 0
        assert stream.cache.filled == 0
    assert len(caplog.records) == 1
    assert "broken off" in caplog.text


class Large(Numbers):
    """Samples of 16 KiB."""

    def sample(self, number: int) -> Any:
        return torch.full((4096,), float(number)), number


def test_a_stream_that_does_not_fit_passes_through(caplog: pytest.LogCaptureFixture) -> None:
    """A stream is cached whole or not at all. One warning tells its size, and its memory is released."""
    with caplog.at_level(logging.WARNING), closing(CachedStream(Large(200), "1MiB")) as stream:
        epochs = [[number for _, number in stream] for _ in range(3)]
        assert stream.source.reads <= 3 * 200 + 17
        assert stream.counters.totals().hits == 0
        assert stream.cache.memory_bytes < 2**16
    assert epochs == [list(range(200))] * 3
    [record] = caplog.records
    assert "its 200 samples take about 3.1 MiB, and its budget is 1 MiB" in record.message


def test_the_whole_of_a_stream_is_no_amount_that_memory_falls_short_of(monkeypatch: Any, caplog: Any) -> None:
    """Nobody knows how many bytes "auto" means for a stream, so no warning compares them with the free memory."""
    monkeypatch.setattr(FreeMemory, "measure", lambda *_: FreeMemory(None, 2**28, None))
    with caplog.at_level(logging.WARNING), closing(CachedStream(Numbers())) as stream:
        assert len(list(stream)) == LENGTH
    assert not caplog.records


def test_a_stream_that_never_ends_is_passed_on() -> None:
    """Its samples are stored as long as there is room, and all samples pass."""

    def endless() -> Iterator[torch.Tensor]:
        number = 0
        while True:
            yield torch.full((1024,), float(number))
            number += 1

    with closing(CachedStream(endless, "1MiB")) as stream:
        samples = iter(stream)
        assert [int(next(samples)[0]) for _ in range(600)] == list(range(600))
        assert 0 < stream.counters.totals().fills < 300


def test_a_stream_may_repeat_a_sample() -> None:
    """In later epochs every sample comes as often as in the first."""
    with closing(CachedStream(lambda: iter([1, 2, 1, 3, 1]), "1MiB")) as stream:
        epochs = [list(stream) for _ in range(3)]
        assert stream.counters.totals().hits == 10
    assert [Counter(epoch) for epoch in epochs] == [Counter([1, 2, 1, 3, 1])] * 3


@pytest.mark.processes
def test_a_stream_whose_first_samples_do_not_come_passes_through(monkeypatch: Any, caplog: Any) -> None:
    """Set-up gives it up after a while, and every epoch is the stream."""
    here = os.getpid()

    class Stuck(Numbers):
        def __iter__(self) -> Iterator[int]:
            if os.getpid() != here:
                time.sleep(600)
            yield from super().__iter__()

    monkeypatch.setattr(first_samples, "start_method", lambda chosen: "fork")
    monkeypatch.setattr(child, "REPORT_SECONDS", 0.5)
    monkeypatch.setattr(child, "PATIENCE_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING), closing(CachedStream(Stuck(), "1MiB")) as stream:
        assert [len(list(stream)) for _ in range(3)] == [LENGTH] * 3
        assert stream.counters.totals().bypasses == 3 * LENGTH
    assert "reading it has not ended in 0 s" in caplog.text


def test_a_known_length_ends_an_epoch() -> None:
    """A loader that knows the length stops there. That epoch is whole."""

    class Sized(Numbers):
        def __len__(self) -> int:
            return self.length

    with closing(CachedStream(Sized(20), "1MiB")) as stream:
        assert len(stream) == 20
        for _ in range(3):
            samples = iter(stream)
            assert sorted(next(samples)[1] for _ in range(20)) == list(range(20))
            assert stream.cache.fill_fraction == 1
        assert stream.counters.totals().hits == 40


def test_after_close_the_stream_passes_through() -> None:
    """An epoch after `close` is the stream."""
    stream = CachedStream(Numbers(), "1MiB")
    list(stream)
    stream.close()
    assert [number for _, number in stream] == list(range(LENGTH))


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
        (Numbers(), {"layout": "x"}, ValueError, "layout"),
        (Numbers(), {"seed": -1}, ValueError, "seed"),
    ],
)
def test_wrong_arguments_are_refused(given: Any, arguments: Any, error: type[Exception], words: str) -> None:
    """The error tells what is allowed."""
    with pytest.raises(error, match=words):
        CachedStream(given, **arguments)


def test_without_a_budget_it_passes_through() -> None:
    """budget=0 stores no sample, and counts all as bypasses."""
    with closing(CachedStream(Numbers(), 0)) as stream:
        assert stream.cache is None
        assert [len(list(stream)) for _ in range(2)] == [LENGTH] * 2
        assert stream.counters.totals().bypasses == 2 * LENGTH


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "workers", "persistent"), [(Numbers, 0, False), (Numbers, 2, True), (Texts, 0, False), (Texts, 2, False)]
)
def test_a_cached_loader_makes_batches_from_memory(kind: type[Numbers], workers: int, persistent: bool) -> None:
    """Its first epoch is DataLoader's. Later epochs have batches of the same kind, all whole but the last."""
    arguments: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "persistent_workers": persistent}
    plain = list(DataLoader(kind(), **arguments))
    with closing(CachedStream(kind(), "16MiB")) as stream, closing(CachedLoader(stream, **arguments)) as loader:
        epochs = [list(loader) for _ in range(4)]
        counts = stream.counters.totals()
    assert all(same(ours, theirs) for ours, theirs in zip(epochs[0], plain, strict=True))
    for epoch in epochs[1:]:
        assert [len(numbers) for _, numbers in epoch] == [4] * 25 + [3]
        assert sorted(number for _, numbers in epoch for number in numbers.tolist()) == list(range(LENGTH))
        assert [type(part) for part in epoch[0]] == [type(part) for part in plain[0]]
    assert len({str(epoch[0][1]) for epoch in epochs[1:]}) == 3
    assert counts.hits == 3 * LENGTH
    assert counts.misses == LENGTH


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_cached_loader_knows_the_other_arguments(workers: int) -> None:
    """drop_last, a collate_fn and a transform work in every epoch."""
    with closing(CachedStream(Numbers(), "16MiB", transform=plus_one)) as stream:
        loader = CachedLoader(stream, batch_size=4, drop_last=True, num_workers=workers, collate_fn=listed)
        epochs = [list(loader) for _ in range(3)]
        loader.close()
    assert all(len(numbers) == 4 for epoch in epochs for _, numbers in epoch)
    assert [len(epoch) for epoch in epochs[1:]] == [25, 25]
    assert all(float(x[0]) == n + 1 for epoch in epochs for xs, ns in epoch for x, n in zip(xs, ns, strict=True))


@pytest.mark.processes
def test_a_cached_loader_without_batches_serves_samples() -> None:
    """batch_size=None gives the samples of the stream, in every epoch."""
    with closing(CachedStream(Numbers(), "16MiB")) as stream:
        loader = CachedLoader(stream, batch_size=None, num_workers=2)
        assert [sorted(number for _, number in loader) for _ in range(3)] == [list(range(LENGTH))] * 3
        assert stream.counters.totals().hits == 2 * LENGTH


def test_a_stream_that_is_shared_again_begins_anew() -> None:
    """A loader that has served from the old memory serves from the new memory."""
    with closing(CachedStream(Numbers(), "16MiB")) as stream, closing(CachedLoader(stream, batch_size=4)) as loader:
        for _ in range(2):
            assert [sorted(numbers_of(loader)) for _ in range(3)] == [list(range(LENGTH))] * 3
            assert stream.counters.totals().hits == 2 * LENGTH
            stream.share()


@pytest.mark.processes
def test_worker_init_fn_finds_the_stream() -> None:
    """worker_init_fn changes the user's own stream, in the first epoch and later."""
    with closing(CachedStream(Texts(), "16MiB")) as stream:
        loader = CachedLoader(stream, batch_size=4, num_workers=1, worker_init_fn=count_call)
        assert [len(numbers_of(loader)) for _ in range(3)] == [LENGTH] * 3
        assert stream.source.reads == LENGTH + 1002 + 32
        loader.close()


def count_call(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.counts[0] += 1000 if info.dataset.reads < 1000 else 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "loader_kind", "workers", "drop_last"),
    [
        (Numbers, DataLoader, 0, False),
        (Numbers, CachedLoader, 0, True),
        (Numbers, CachedLoader, 3, False),
        (Texts, DataLoader, 3, True),
        (Texts, CachedLoader, 3, True),
    ],
)
def test_unshuffled_epochs_are_the_first_one(kind: Any, loader_kind: Any, workers: int, drop_last: bool) -> None:
    """With shuffle=False, later epochs have the batches of the plain stream, in their order."""
    arguments: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "drop_last": drop_last}
    plain = list(DataLoader(kind(), **arguments))
    with closing(CachedStream(kind(), "16MiB", shuffle=False)) as stream:
        loader = loader_kind(stream, **arguments)
        for _ in range(3):
            assert same(list(loader), plain)
        assert stream.counters.totals().hits >= 2 * (LENGTH - 12)
        if loader_kind is CachedLoader:
            loader.close()
