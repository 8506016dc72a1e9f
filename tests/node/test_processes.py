"""A process that waits looks again and again, and reports now and then."""

from itertools import islice
from types import SimpleNamespace

import pytest

from lightning_stocache.node import processes


def test_a_report_is_due_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look comes at once and without a report. A pause of more than ten seconds is one report."""
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(processes, "time", clock)
    assert [seconds for seconds in islice(processes.poll(pause=4.0), 12) if seconds] == [12.0, 20.0, 32.0, 40.0]
    assert list(islice(processes.poll(pause=25.0), 3)) == [0.0, 25.0, 50.0]
