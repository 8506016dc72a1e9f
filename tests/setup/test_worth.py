"""Records that cost more than they give are not made: views with their parents, and samples that are read at once."""

from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_stocache import CachedDataset
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.setup import forms
from lightning_stocache.setup.forms import why_not_worth
from tests.jobs import warnings
from tests.sources import Made

pd, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")

LENGTH, PER = 40, 50
NUMBERS = np.random.default_rng(0).integers(0, 9999, LENGTH * PER)
FRAME = pd.DataFrame({"user": NUMBERS % 97, "word": [f"word {number}" for number in NUMBERS], "item": NUMBERS})
INDEXED = FRAME.assign(row=np.arange(len(NUMBERS))).set_index(["row", "word"])
TABLE = pa.table({"item": NUMBERS, "word": [f"word {number}" for number in NUMBERS]})


class View:
    """A part of an array that it carries whole."""

    def __init__(self, index: int) -> None:
        self.parent, self.begin = NUMBERS, index * PER


class Text(str):
    """A text with an attribute, so that samples are records."""


def part(index: int) -> slice:
    return slice(index * PER, index * PER + PER)


def faces(index: int) -> Any:
    """Images of several sizes, black but for a few pixels."""
    image = np.zeros((60 + index % 5, 60), dtype=np.uint8)
    image[:6, :6] = np.random.default_rng(index).integers(0, 255, (6, 6))
    return image


@pytest.mark.parametrize(
    "make",
    [
        lambda index: TABLE.slice(index * PER, PER),
        lambda index: {"table": TABLE.slice(index * PER, PER), "index": index},
        lambda index: INDEXED.iloc[part(index)],
        View,
    ],
    ids=["an Arrow slice", "a slice in a dict", "a MultiIndex", "the user's view"],
)
def test_views_that_carry_their_parent_pass_through(make: Callable[[int], Any], caplog: Any) -> None:
    """No memory is taken, one warning says why, and samples are those of the source."""
    with closing(CachedDataset(Made(make, LENGTH))) as dataset:
        assert dataset.cache is None
        assert type(dataset[3]) is type(make(3))
    [words] = warnings(caplog)
    assert "have most of their bytes in common" in words
    assert "return data of the sample alone" in words


@pytest.mark.parametrize(
    "make",
    [
        lambda index: pa.table({"item": NUMBERS[part(index)]}),
        lambda index: FRAME.iloc[part(index)],
        lambda index: {"prompt": "You are a helpful assistant. " * 30, "text": f"question {index} " * (3 + index % 5)},
        lambda index: "the same text",
        faces,
        lambda index: {
            "positions": np.arange(2000 + index % 3),
            "mask": np.ones(2000 + index % 3),
            "text": str(index) * 99,
        },
    ],
    ids=["a copy", "rows of a frame", "a common prompt", "equal samples", "black images", "positions"],
)
def test_samples_that_are_only_alike_are_cached(make: Callable[[int], Any], caplog: Any) -> None:
    """Repeated numbers, equal samples and common texts of a few kilobytes carry no parent."""
    with closing(CachedDataset(Made(make, LENGTH))) as dataset:
        assert len(dataset.cache) == LENGTH
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("read_ns", "hit_ns", "length", "is_worth"),
    [
        (10_000, 30_000, 60_000, False),  # 1.2 s in an epoch
        (10_000, 30_000, 40_000, True),  # 0.8 s
        (10_000, 19_000, 10**6, True),  # less than twice a read
        (10_000_000, 30_000_000, 60, False),
        (30_000, 10_000, 10**9, True),
    ],
)
def test_a_hit_may_cost_twice_a_read_or_a_second_in_an_epoch(
    read_ns: int, hit_ns: int, length: int, is_worth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The medians decide; a few slow reads or hits do not."""
    samples = [f"sample {index}" for index in range(32)]
    codec, now, decode = RecordCodec.infer(samples), [0], RecordCodec.decode
    monkeypatch.setattr(forms, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    decoded: list[Any] = []

    def slow(codec: RecordCodec, record: Any) -> Any:
        decoded.append(record)
        now[0] += hit_ns * (100 if len(decoded) % 5 == 0 else 1)
        return decode(codec, record)

    monkeypatch.setattr(RecordCodec, "decode", slow)
    reads = [read_ns * (100 if number % 5 == 0 else 1) for number in range(32)]
    reason = why_not_worth(codec, samples, reads, length)
    assert (reason is None) == is_worth
    assert is_worth or "an epoch from the cache would take longer" in str(reason)
