"""A process that waits looks again and again, and reports now and then."""

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


def test_a_report_is_due_every_ten_seconds(clock: Clock) -> None:
    """The first look comes at once and without a report. A pause of more than ten seconds is one report."""
    assert next(processes.poll(pause=60.0)) == 0.0
    assert clock.now == 1000.0
    assert [seconds for seconds in islice(processes.poll(pause=4.0), 12) if seconds] == [12.0, 20.0, 32.0, 40.0]
    assert list(islice(processes.poll(pause=25.0), 3)) == [0.0, 25.0, 50.0]
