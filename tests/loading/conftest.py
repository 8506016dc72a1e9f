"""What holds for every test of this room."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_stocache.loading import stream_choice
from lightning_stocache.setup.reader_process import NotStartedError


@pytest.fixture(autouse=True)
def reads_streams_again_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no process can be started; `tests/training/test_streams.py` has that process."""
    monkeypatch.setattr(stream_choice, "read_apart", _refuse_to_start)


def _refuse_to_start(*_: Any) -> bytes:
    raise NotStartedError("this test reads in its own process")
