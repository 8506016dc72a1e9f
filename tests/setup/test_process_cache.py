"""What one Trainer call has cached is there for the next one of this process, if it asks for the same."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_stocache.node.budget import Budget
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.open import open_caches
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.process_cache import close_kept
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.training.options import CacheOptions
from tests.proc import memory_files
from tests.sources import CountedSource

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield
    close_kept()


def opened(source: Any, budget: str = "auto", **options: Any) -> OpenCache:
    request = CacheRequest(source, budget=Budget.parse(budget), kept="train0", **options)
    [cache] = open_caches([request], {"train": request.budget}, NodeGroup())
    return cache


def fill(cache: OpenCache, indices: range) -> None:
    assert cache.cache is not None
    for index in indices:
        assert cache.cache.fill(index, cache.source[index])


def test_the_same_again_is_warm(tmp_path):
    """Another object of the same source finds what was stored, and counts from nothing."""
    first = opened(CountedSource(10))
    fill(first, range(7))
    first.count(misses=7)
    first.close()
    again = opened(CountedSource(10))
    assert again.cache is not None
    assert again.cache.filled == 7
    assert again.budget_bytes == first.budget_bytes
    assert again.counters is not None
    assert again.counters.totals().misses == 0
    fill(again, range(7, 10))
    again.close()


def test_two_at_a_time_share_it():
    """While the first is still open, too."""
    first, second = opened(CountedSource(10)), opened(CountedSource(10))
    fill(first, range(3))
    assert second.cache is not None
    assert second.cache.filled == 3
    first.close()
    fill(second, range(3, 4))
    second.close()


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (CountedSource(11), {}),
        (CountedSource(10, classes=3), {}),
        (CountedSource(10), {"budget": "50%"}),
        (CountedSource(10), {"fingerprint": "v2"}),
        (CountedSource(10), {"allow_random": True}),
    ],
)
def test_anything_else_begins_anew(source, options):
    """And the memory of the one before is given back: there is one for each place."""
    first = opened(CountedSource(10))
    fill(first, range(7))
    first.close()
    before = len(_segments())
    other = opened(source, **options)
    assert other.cache is not None
    assert other.cache.filled == 0
    other.close()
    gc.collect()
    assert len(_segments()) <= before


def _segments() -> set[tuple[str, str]]:
    return memory_files({os.getpid()})


def test_what_cannot_be_known_again_is_not_kept(caplog):
    """A source that cannot be pickled gets a cache, and one warning that says what to do."""
    source: Any = CountedSource(10)
    source.decode = lambda index: index
    before = _segments()
    with caplog.at_level(logging.WARNING):
        first = opened(source)
    fill(first, range(7))
    first.close()
    [said] = [record.getMessage() for record in caplog.records]
    assert "is not kept for the next trial" in said
    assert "cannot be pickled" in said
    assert "name=" in said
    assert _segments() == before


def test_records_are_kept_too():
    """Samples of any kind come back as they were."""
    words = [f"a text of {number} words" * number for number in range(1, 20)]
    first = opened(words)
    fill(first, range(19))
    first.close()
    again = opened(list(words))
    assert again.cache is not None
    assert [again.cache.get(index) for index in range(19)] == words
    again.close()


def test_options_that_do_not_go_together():
    """On a disk a name does it, and a word that is none is refused."""
    with pytest.raises(ValueError, match="keep_cache must be true, false or 'process', got 'always'"):
        CacheOptions(keep_cache="always")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give name="):
        CacheOptions(keep_cache="process", dir="/tmp")
    assert not CacheOptions(keep_cache="process", name="photos").keeps_for_process
