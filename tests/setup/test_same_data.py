"""What set-up has read lies in the cache when epoch one begins; under a name it is compared with what lies there."""

import operator
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.setup import find
from lightning_stocache.setup.same_data import FingerprintError
from lightning_stocache.source.probe import spread
from lightning_stocache.source.samples import same_sample
from tests.jobs import warnings
from tests.loading.twins import looked
from tests.processes import call, call_many
from tests.sources import CountedFiles, CountedSource, Made, TransformedSource

pytestmark = [pytest.mark.named, pytest.mark.usefixtures("unhurried")]

LENGTH = 60  # a process reads some samples again once it has loaded 64, to see whether they are random
FIRST = frozenset(spread(range(LENGTH), 4))  # the indices that set-up reads of any source, from the first to the last
SEEN = FIRST.union(spread(range(LENGTH), 30)[1:-1])  # those of a quick one: 28 more
SEEN_RANDOM = FIRST.union(spread(range(LENGTH), 30)[1:2])  # those of a random one: one more


def row(index: int, gain: float = 1.0) -> Any:
    """The gain stands for the folder that a sample is read from."""
    return torch.linspace(-1, 1, 9) * (index + 1) * gain, {"mean": index / 7 * gain}


def record(index: int) -> Any:
    return {"text": "a" * (index % 5), "tags": {f"tag {index + k}" for k in range(9)}, "array": np.arange(index)}


def rows(gain: float = 1.0, log_path: str | Path = "") -> CountedSource:
    return Made(partial(row, gain=gain), LENGTH, log_path)


def augmented(gain: float = 1.0, log_path: str | Path = "") -> CountedSource:
    """Its transform is split: the gain comes before the cache, the noise after it."""
    source = TransformedSource(LENGTH, (3,), log_path)
    source.transform = v2.Compose([partial(operator.mul, float(gain)), torch.nn.Dropout(0.5)])
    return source


def files(gain: float = 1.0, log_path: str | Path = "") -> CountedSource:
    """Files that are decoded after the cache, where noise is added."""
    noisy = lambda content, index: torch.tensor(list(content)) + torch.rand(1)  # noqa: E731
    return CountedFiles(lambda index: bytes([int(gain), index] * 50), noisy, LENGTH, log_path)


SOURCES: dict[str, tuple[Callable[..., CountedSource], dict[str, Any]]] = {
    "rows": (rows, {}),
    "files": (files, {"store": "encoded"}),
    "split": (augmented, {}),
    "spec": (rows, {"spec": SampleSpec.infer(row(0))}),
    "a tenth": (rows, {"budget": "10%"}),
}


@pytest.mark.parametrize("kind", ["rows", "files", "split", "on a disk"])
def test_what_was_read_is_hit_in_the_first_epoch(kind: str, tmp_path: Path) -> None:
    """Each sample is loaded once after set-up, or was stored there; both are counted, each in its column."""
    make, options = (rows, {"dir": str(tmp_path)}) if kind == "on a disk" else SOURCES[kind]
    source = make(1, tmp_path / "log")
    with closing(CachedDataset(source, **options)) as dataset:
        cache, counters = dataset.cache, dataset.counters
        seen = SEEN_RANDOM if kind in ("files", "split") else SEEN
        at_set_up = source.loaded
        assert set(at_set_up) >= seen
        assert cache.filled == counters.totals().setup_fills == len(seen)
        assert (counters.totals().fills, counters.totals().served) == (0, 0)
        assert sum(1 for _ in DataLoader(dataset, 8, collate_fn=list)) == 8
        counts, loads = counters.totals(), LENGTH - len(seen)
        later = source.loaded[len(at_set_up) :]
        assert set(later) >= set(range(LENGTH)) - seen
        assert len(later) == loads + looked(dataset)
        assert (counts.hits, counts.misses, counts.fills, cache.filled) == (len(seen), loads, loads, LENGTH)


def test_what_has_no_slot_or_is_random_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget for fewer samples is not exceeded; a random source has the draws of the training, not of set-up."""
    with closing(CachedDataset(rows(), freeze_random=True)) as dataset:
        assert dataset.cache.filled == 0
    with closing(CachedDataset(rows(), budget="10%")) as dataset:
        held = [index for index in range(LENGTH) if dataset.cache.has_slot(index)]
        assert len(held) == LENGTH // 10
        assert dataset.cache.filled == dataset.counters.totals().setup_fills == len(SEEN.intersection(held))
    monkeypatch.setattr(find, "MOST_BYTES", 5 * SampleSpec.infer(row(0)).nbytes)  # else of 64 MiB
    with closing(CachedDataset(rows())) as dataset:
        assert dataset.cache.filled == 5


def test_what_four_samples_do_not_show_is_looked_for_again(name: str, tmp_path: Path) -> None:
    """Records, of which the first four look like rows, are found to be records."""
    source = Made(lambda index: torch.zeros(2 + (index not in FIRST)), LENGTH, tmp_path / "log")
    with closing(CachedDataset(Made(source.make, LENGTH), name=name)) as first:
        with closing(CachedDataset(source, name=name)) as second:
            assert first.cache is not None
            assert second.cache is not None
            assert set(source.loaded) == SEEN


@pytest.mark.parametrize(
    ("kind", "served", "on_disk"),
    [("rows", 9, True), ("files", 0, True), ("split", 9, False), ("spec", 0, False), ("a tenth", 0, False)],
)
def test_other_data_passes_through_and_the_same_is_joined(name, kind, served, on_disk, tmp_path, caplog) -> None:
    """By four samples: of another folder none is served from the cache, however few lie there, or it is refused."""
    make, options = SOURCES[kind]
    options = options | {"name": name, "dir": str(tmp_path) if on_disk else None}
    with closing(CachedDataset(make(1, tmp_path / "log"), **options)) as first:
        for index in range(served):
            first[index]
        (tmp_path / "log").unlink()
        same = make(1, tmp_path / "log")
        with closing(CachedDataset(same, strict=True, **options)) as second:
            assert second.cache.filled == first.cache.filled > 0
            assert set(same.loaded) == FIRST or (kind in ("spec", "a tenth") and len(set(same.loaded)) <= 8)
        assert warnings(caplog) == []
        other = make(3)
        with closing(CachedDataset(other, **options)) as third:
            assert third.cache is None
            assert third.budget_bytes == 0
            torch.manual_seed(1)
            samples = [third[index] for index in range(LENGTH)]
            torch.manual_seed(1)
            assert same_sample(samples, [other[index] for index in range(LENGTH)])
            assert third.counters.totals().bypasses == LENGTH
        [words] = warnings(caplog)
        assert words.count("\n") == 1
        assert "passes through uncached: there is other data under this name" in words
        assert f"another name, or remove it: stocache clean {name}" in words
        with pytest.raises(FingerprintError, match="other data under this name"):
            CachedDataset(other, strict=True, **options)


class Labelled(CountedSource):
    """Images with labels that its owner changes."""

    def __init__(self, labels: list[int], note: str = "", log_path: str | Path = "") -> None:
        super().__init__(LENGTH, (3,), log_path)
        self.labels, self.note = labels, note

    def expected(self, index: int) -> Any:
        return super().expected(index)[0], self.labels[index]


def test_where_the_state_differs_more_samples_are_compared(name: str, tmp_path: Path, caplog: Any) -> None:
    """A tenth of the labels is seen among 32 samples; a note that no sample depends on is joined after 32 reads."""
    labels = [index % 3 for index in range(LENGTH)]
    others = [label + (index % 10 == 1) for index, label in enumerate(labels)]
    log = tmp_path / "log"
    with closing(CachedDataset(Labelled(labels, log_path=log), name=name)) as first:
        list(first)
        log.unlink()
        for source, compared in ((Labelled(labels, log_path=log), 4), (Labelled(labels, "b", log_path=log), 32)):
            with closing(CachedDataset(source, name=name, strict=True)):
                assert len(set(source.loaded)) == compared
            log.unlink()
        with closing(CachedDataset(Labelled(others, log_path=log), name=name)) as second:
            assert second.cache is None
            assert [sample[1] for sample in second] == others
    [words] = warnings(caplog)
    assert "there is other data under this name" in words


@pytest.mark.processes
def test_other_processes_join_their_own_cache(name) -> None:
    """Sets have another order there, generators other seeds, and a decoder may compute other last bits."""
    for seed, method in ((1, "fork"), (2, "forkserver")):
        assert call(joins_each, name, seed, method=method) == [True, True, True]


def joins_each(name: str, seed: int) -> list[bool]:
    sources = Made(record, LENGTH), augmented(), rows(1 + seed * torch.finfo(torch.float32).eps)
    return [joins(source, f"{name}-{number}", seed) for number, source in enumerate(sources)]


def joins(source: CountedSource, name: str, seed: int) -> bool:
    torch.manual_seed(seed)
    with closing(CachedDataset(source, name=name, strict=True)) as dataset:
        return dataset.cache is not None and len([dataset[index] for index in range(LENGTH)]) == LENGTH


def test_random_samples_are_no_other_data(name, caplog) -> None:
    """The cache is joined, with a warning unless its user says what it holds; with `spec=` no draw is frozen either."""
    noise = Made(lambda index: torch.rand(3))
    for fingerprint in ("", "v2"):
        options: dict[str, Any] = {"name": f"{name}-{fingerprint}x", "fingerprint": fingerprint, "freeze_random": True}
        with closing(CachedDataset(noise, **options)) as first:
            samples = list(first)
            with closing(CachedDataset(noise, **options)) as second:
                assert all(map(torch.equal, samples, second))
    assert ["fingerprint=" in words for words in warnings(caplog)] == [True]
    caplog.clear()
    for _ in range(2):
        with closing(CachedDataset(noise, name=name, spec=SampleSpec.infer(noise[0]))) as dataset:
            assert len(list(dataset)) == 12
            assert dataset.cache.filled == 0
    assert ["draws random numbers" in words for words in warnings(caplog)] == [True] * 2


@pytest.mark.processes
def test_jobs_that_start_at_once_on_one_name(name) -> None:
    """Who comes first says what lies there; who has other data trains on its own."""
    gains = [1, 3, 1, 3]
    cached = call_many(train, [(name, gain) for gain in gains])
    assert len({gain for gain, was_cached in zip(gains, cached, strict=True) if was_cached}) == 1
    assert cached.count(True) == 2


def train(name: str, gain: int) -> bool:
    source = rows(gain)
    with closing(CachedDataset(source, name=name)) as dataset:
        for _ in range(2):
            assert all(same_sample(dataset[index], source[index]) for index in range(LENGTH))
        return dataset.cache is not None
