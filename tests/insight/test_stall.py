"""The sums of waiting, computing and the loop, on a clock that goes on only where a test says so."""

from __future__ import annotations

import math
import time

import pytest

from lightning_stocache.insight.stall import Seconds, Stall


@pytest.fixture
def spend(monkeypatch):
    """Let seconds pass; nothing else does."""
    now = 100.0

    def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    return pass_by


def step(stall: Stall, spend, waited: float, moved: float, computed: float, rest: float) -> None:
    with stall.waiting:
        spend(waited)
    spend(moved)
    with stall.computing:
        spend(computed)
    spend(rest)
    stall.end()


def test_waiting_computing_and_the_rest_are_told_apart(spend) -> None:
    """What is neither, between and after them, is in the loop alone."""
    stall = Stall()
    stall.resume()
    spend(0.5)
    step(stall, spend, 0.5, 0.25, 1.75, 0.5)
    step(stall, spend, 0.5, 0, 4, 0)
    assert stall.peek() == Seconds(1, 5.75, 8)
    assert stall.take() == Seconds(1, 5.75, 8)
    assert stall.peek() == Seconds(0, 0, 0)


def test_what_is_no_step_is_not_in_the_loop(spend) -> None:
    """Validation between two steps is not counted."""
    stall = Stall()
    stall.resume()
    step(stall, spend, 1, 0, 1, 0)
    spend(50)
    stall.resume()
    step(stall, spend, 1, 0, 1, 0)
    assert stall.take() == Seconds(2, 2, 4)


def test_an_end_without_a_beginning_does_not_count(spend) -> None:
    """A profiler that is told of an end may have been put in place after the beginning."""
    stall = Stall()
    stall.waiting.__exit__(None, None, None)
    spend(1)
    stall.end()
    assert stall.peek() == Seconds(0, 0, 0)


def test_a_loop_that_is_not_heard_has_no_seconds_of_its_parts(spend) -> None:
    """Where nobody says when it waits, or computes, both are NaN, and the loop is what it took."""
    stall = Stall()
    stall.resume()
    with stall.waiting:
        spend(1)
    stall.end()
    waited, computed, looped = stall.take()
    assert math.isnan(waited)
    assert math.isnan(computed)
    assert looped == 1


def test_what_is_left_by_an_exception_counts(spend) -> None:
    """A batch that raises has been waited for, and the exception goes on."""
    stall = Stall()

    def waits() -> None:
        with stall.waiting:
            spend(2)
            raise KeyError

    with pytest.raises(KeyError):
        waits()
    assert stall.peek() == Seconds(2, 0, 0)
