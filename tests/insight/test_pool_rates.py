"""The numbers of a rolling cache between two ends of epochs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_stocache import CachedLoader, RollingCache, RollingWriter, SampleSpec
from lightning_stocache.insight import pool_rates
from lightning_stocache.insight.pool_rates import PoolRates

LEVELS = {"rolling/resident", "rolling/oldest_seconds", "rolling/times_seen"}
RATES = {"rolling/appended_per_second", "rolling/evicted_per_second", "rolling/renewed"}


class Clock:
    """Stands for `time`, and goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pool_rates, "time", clock)
    return clock


@pytest.fixture
def pool() -> Iterator[RollingCache]:
    """A cache of a few slots that nobody fills but the test."""
    pool = RollingCache(budget=200, spec=SampleSpec.infer(torch.zeros(3)), minimum=1)
    yield pool
    pool.close()


def append(pool: RollingCache, count: int) -> None:
    with RollingWriter.attach(pool.handle) as writer:
        for _ in range(count):
            writer.append(torch.zeros(3))


def test_rates_are_of_the_time_between_two_calls(pool: RollingCache, clock: Clock) -> None:
    """What came and went per second, and what was renewed; levels are those of the moment."""
    append(pool, 1)
    loader, rates = CachedLoader(pool, batch_size=1), PoolRates()
    rates.start(loader)
    clock.now += 4
    slots = pool.stats().capacity
    append(pool, slots + 1)
    metrics = rates.metrics(loader)
    assert metrics["rolling/resident"] == slots
    assert metrics["rolling/appended_per_second"] == (slots + 1) / 4
    assert metrics["rolling/evicted_per_second"] == 2 / 4
    clock.now += 1
    again = rates.metrics(loader)
    assert (again["rolling/appended_per_second"], again["rolling/evicted_per_second"]) == (0.0, 0.0)


def test_without_a_start_there_are_no_rates_yet(pool: RollingCache) -> None:
    """The first call has levels alone, the second has both."""
    append(pool, 1)
    loaders, rates = {"a": CachedLoader(pool, batch_size=1), "b": [torch.zeros(1)]}, PoolRates()
    assert rates.metrics(loaders).keys() == LEVELS
    assert rates.metrics(loaders).keys() == LEVELS | RATES


def test_of_none_and_of_several_there_are_no_numbers(pool: RollingCache) -> None:
    """They would be the numbers of nobody knows which."""
    append(pool, 1)
    loader, rates = CachedLoader(pool, batch_size=1), PoolRates()
    for loaders in ([], [torch.zeros(1)], [loader, loader]):
        rates.start(loaders)
        assert rates.metrics(loaders) == {}
