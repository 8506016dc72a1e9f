"""The tallies of a rank: each sample that was served is in one epoch of one stage, whatever comes between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_stocache import CachedDataset, CachedStream, SampleSpec
from lightning_stocache.insight.stall import Seconds
from lightning_stocache.insight.tallies import Tallies, coverage, end_call, samples_of

SECONDS = Seconds(0.25, 0.5, 1.0)


def numbers(length: int, **arguments: object) -> CachedDataset:
    return CachedDataset([float(index) for index in range(length)], spec=SampleSpec.infer(0.0), **arguments)  # type: ignore[arg-type]


@pytest.fixture
def dataset() -> Iterator[CachedDataset]:
    dataset = numbers(8)
    yield dataset
    dataset.close()


def read(dataset: CachedDataset, *indices: int) -> None:
    for index in indices:
        assert dataset[index] == float(index)


def served(tallies: Tallies, stage: str) -> int:
    return sum(tally.counts.served for tally in tallies.collect(stage, patience=1))


STEPS = st.lists(st.sampled_from(["read", "read", "put aside", "train", "val", "skip"]), max_size=30)


@settings(max_examples=30)
@given(steps=STEPS)
@example(steps=["read", "put aside", "read", "val", "read", "put aside", "skip", "read", "train", "train"])
def test_every_sample_is_in_one_tally(steps: list[str]) -> None:
    """Training's epoch has what came since its last end, without what other stages have taken or what was skipped."""
    dataset, tallies = numbers(3), Tallies()
    expected: Counter[str] = Counter()
    try:
        for step in steps:
            if step == "read":
                read(dataset, 1)
                expected["new"] += 1
            elif step == "put aside":
                expected["aside"] += expected.pop("new", 0)
            elif step == "skip":
                tallies.skip([dataset])
                del expected["new"]
                continue
            if step == "put aside":
                tallies.put_aside([dataset])
            elif step == "val":
                tallies.post("val", [dataset])
                assert served(tallies, "val") == expected.pop("new", 0)
            elif step == "train":
                tallies.post("train", [dataset], SECONDS)
                assert served(tallies, "train") == expected.pop("new", 0) + expected.pop("aside", 0)
            peeked = tallies.peek([dataset], SECONDS)
            assert peeked is not None
            assert peeked.counts.served == expected.total()
    finally:
        dataset.close()


def test_a_tally_says_what_was_counted_and_what_is_there(dataset: CachedDataset) -> None:
    """Counts of the epoch, slots as they are now, and the seconds of the loop, for one rank."""
    tallies = Tallies()
    read(dataset, 0, 1, 1)
    tallies.post("train", [dataset], SECONDS)
    assert dataset.counters is not None
    [tally] = tallies.collect("train", patience=1)
    assert (tally.counts.hits, tally.counts.misses, tally.counts.fills) == (1, 2, 2)
    assert (tally.slots, tally.filled, tally.unsized) == (8, 2.0, 0)
    assert (tally.wait_seconds, tally.compute_seconds, tally.loop_seconds, tally.ranks) == (*SECONDS, 1)
    assert tallies.of_training == {dataset.counters: tally.counts}


def test_an_epoch_is_posted_once(dataset: CachedDataset) -> None:
    """What comes after the post belongs to the next epoch, also if the post is asked for again."""
    tallies = Tallies()
    read(dataset, 0)
    tallies.post("val", [dataset])
    read(dataset, 1, 2)
    tallies.post("val", [dataset])
    assert served(tallies, "val") == 1
    tallies.post("val", [dataset])
    assert served(tallies, "val") == 2


def test_what_was_not_posted_has_no_metrics(dataset: CachedDataset) -> None:
    """Nor has a stage that reads nothing that counts."""
    tallies = Tallies()
    tallies.post("test", [])
    assert tallies.metrics("test", [], patience=1) == {}
    assert tallies.metrics("val", [dataset], patience=1) == {}


def test_a_call_begins_where_the_last_one_ended(dataset: CachedDataset) -> None:
    """Another Trainer call, which has tallies of its own, does not count what the one before was served."""
    read(dataset, 0, 1)
    end_call([dataset])
    read(dataset, 2)
    tallies = Tallies()
    tallies.post("train", [dataset], SECONDS)
    assert tallies.metrics("train", [dataset], patience=1)["misses"] == 1


def test_samples_without_a_cache_are_unsized() -> None:
    """Nobody knows how many bytes they would take in a slot."""
    dataset = numbers(3, budget=0)
    read(dataset, 0, 2)
    tallies = Tallies()
    tallies.post("val", [dataset])
    [tally] = tallies.collect("val", patience=1)
    assert (tally.counts.bypasses, tally.unsized, tally.slots) == (2, 2, 0)
    dataset.close()


def test_coverage_counts_samples_that_are_drawn() -> None:
    """Of all datasets together: those that have a slot among those that are drawn."""
    whole, part, none = numbers(6), numbers(8, indices=[1, 3]), numbers(4, budget=0)
    assert [samples_of(dataset) for dataset in (whole, part, none)] == [6, 2, 4]
    assert coverage([whole, part]) == 1.0
    assert coverage([whole, part, none]) == 8 / 12
    assert coverage([]) == 0.0
    for dataset in (whole, part, none):
        dataset.close()


def test_of_a_stream_what_is_kept_is_known() -> None:
    """Its length is not: it is as long as what has been kept."""
    stream = CachedStream([1.0, 2.0, 3.0], budget="1MiB")
    assert samples_of(stream) == 0
    assert list(stream) == [1.0, 2.0, 3.0]
    assert (samples_of(stream), coverage([stream])) == (3, 1.0)
    stream.close()
