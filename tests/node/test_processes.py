"""Who waits looks again and again, and says so after a while, as often as that has passed."""

from itertools import islice

import pytest

from lightning_stocache.node import processes


class Clock:
    """Stands for `time`: sleeping takes exactly as long as it says, and nothing else takes any time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(processes, "time", clock)
    return clock


def test_the_first_moment_comes_at_once(clock: Clock) -> None:
    """And is none at which one says that one waits."""
    assert next(processes.poll(pause=60.0)) == 0.0
    assert clock.now == 1000.0


def test_a_word_is_due_as_often_as_its_time_has_passed() -> None:
    """Every ten seconds, with the seconds that have passed in all."""
    assert [seconds for seconds in islice(processes.poll(pause=4.0), 12) if seconds] == [12.0, 20.0, 32.0, 40.0]


def test_a_long_pause_is_one_word() -> None:
    """Where a single look took longer than the time between two words, none is made up for."""
    assert list(islice(processes.poll(pause=25.0), 3)) == [0.0, 25.0, 50.0]
