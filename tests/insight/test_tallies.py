"""The tallies of a rank: each sample that was served is in one epoch of one stage, whatever comes between."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_stocache import CachedDataset, CachedLoader, RollingCache, RollingWriter, SampleSpec
from lightning_stocache.cache.counters import Counts
from lightning_stocache.insight import tallies as module
from lightning_stocache.insight.expectation import Expectation
from lightning_stocache.insight.metrics import Tally
from lightning_stocache.insight.tallies import PoolRates, Tallies, coverage, end_call, samples_of

LOOP = Tally(wait_seconds=0.25, compute_seconds=0.5, loop_seconds=1.0, ranks=1)


def numbers(length: int, **arguments: object) -> CachedDataset:
    return CachedDataset([float(index) for index in range(length)], spec=SampleSpec.infer(0.0), **arguments)  # type: ignore[arg-type]


@pytest.fixture
def dataset() -> Iterator[CachedDataset]:
    with closing(numbers(8)) as dataset:
        yield dataset


def read(dataset: CachedDataset, *indices: int) -> None:
    for index in indices:
        assert dataset[index] == float(index)


def end_epoch(tallies: Tallies, stage: str, loader: object, loop: Tally | None = None) -> dict[str, float]:
    """The metrics of an epoch that ends on the only rank."""
    tallies.post(stage, loader, loop)
    return tallies.metrics(stage, loader, patience=1)


def served(metrics: dict[str, float]) -> float:
    return metrics["hits"] + metrics["misses"] + metrics["bypasses"]


STEPS = st.lists(st.sampled_from(["read", "read", "put aside", "train", "val", "skip"]), max_size=30)


@settings(max_examples=30)
@given(steps=STEPS)
@example(steps=["read", "put aside", "read", "val", "read", "put aside", "skip", "read", "train", "train"])
def test_every_sample_is_in_one_tally(steps: list[str]) -> None:
    """An epoch of training counts all samples since its last end that no other stage has counted."""
    expected: Counter[str] = Counter()
    with closing(numbers(3)) as dataset:
        tallies, loader = Tallies(), DataLoader(dataset)
        for step in [*steps, "train"]:
            if step == "read":
                read(dataset, 1)
                expected["new"] += 1
            elif step == "put aside":
                tallies.count("train", loader)
                expected["aside"] += expected.pop("new", 0)
            elif step == "skip":
                tallies.count("sanity check", loader)
                del expected["new"]
            else:
                due = expected.pop("new", 0) + (expected.pop("aside", 0) if step == "train" else 0)
                assert served(end_epoch(tallies, step, loader)) == due


def test_a_rank_that_stored_nothing_expects_what_the_others_do(dataset: CachedDataset) -> None:
    """The fills of all ranks are subtracted from what is ready, whichever of them stored the samples."""
    read(dataset, *range(8))
    metrics = {"hits": 0.0, "misses": 8.0, "bypasses": 0.0, "fills": 8.0, "fill_fraction": 1.0, "hit_rate": 0.0}
    of_rank = {dataset.counters: Counts(misses=4)}
    assert Expectation().compare(metrics, of_rank, [dataset], DataLoader(dataset)) is None  # type: ignore[dict-item]
    assert metrics["hit_rate_expected"] == 0


def test_an_epoch_is_posted_once(dataset: CachedDataset) -> None:
    """Samples after the post belong to the next epoch, also after a second post. A stage has no metrics if it did not
    post, or if it reads no cached dataset."""
    tallies, loader = Tallies(), DataLoader(dataset)
    assert tallies.metrics("val", loader, patience=1) == {}
    read(dataset, 0)
    tallies.post("val", loader)
    read(dataset, 1, 2)
    tallies.post("val", loader)
    assert served(tallies.metrics("val", loader, patience=1)) == 1
    assert served(end_epoch(tallies, "val", loader)) == 2
    assert end_epoch(tallies, "test", []) == tallies.live([]) == {}


def test_a_call_begins_where_the_last_one_ended(dataset: CachedDataset) -> None:
    """A Trainer call does not count the samples of the call before."""
    read(dataset, 0, 1)
    end_call([dataset])
    read(dataset, 2)
    assert end_epoch(Tallies(), "train", DataLoader(dataset), LOOP)["misses"] == 1


def test_coverage_counts_samples_that_are_drawn() -> None:
    """Coverage is the share of the drawn samples of all datasets that have a slot."""
    whole, part, none = numbers(6), numbers(8, indices=[1, 3]), numbers(4, budget=0)
    assert [samples_of(dataset) for dataset in (whole, part, none)] == [6, 2, 4]
    assert coverage([whole, part]) == 1.0
    assert coverage([whole, part, none]) == 8 / 12
    assert coverage([]) == 0.0
    for dataset in (whole, part, none):
        dataset.close()


def test_rates_of_a_pool_are_of_the_time_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came and went per second, and what was renewed; levels are those of the moment. Of two pools there are
    no numbers, which would be those of nobody knows which."""
    clock = iter([50.0, 54.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    pool = RollingCache(budget=200, spec=SampleSpec.infer(torch.zeros(3)), minimum=1)
    rates, slots = PoolRates(), pool.stats().capacity
    with closing(pool), RollingWriter.attach(pool.handle) as writer:
        writer.append(torch.zeros(3))
        loader = CachedLoader(pool, batch_size=1)  # waits for a sample
        first = rates.metrics({"a": loader, "b": [torch.zeros(1)]})
        assert first.keys() == {"rolling/resident", "rolling/oldest_seconds", "rolling/times_seen"}
        for _ in range(slots + 1):
            writer.append(torch.zeros(3))
        metrics = rates.metrics(loader)
        assert metrics["rolling/resident"] == slots
        assert metrics["rolling/appended_per_second"] == (slots + 1) / 4
        assert metrics["rolling/evicted_per_second"] == 2 / 4
        assert rates.metrics([loader, loader]) == rates.metrics([]) == {}
