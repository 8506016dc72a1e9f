"""The first samples of a stream, read again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_stocache.setup import first_samples
from lightning_stocache.setup.first_samples import difference


@pytest.fixture(autouse=True)
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker, which may have no process of its own."""

    monkeypatch.setattr(first_samples, "start_method", lambda chosen: None)


def test_reading_again_leaves_nothing_behind() -> None:
    """The generators go on where they were."""
    state = torch.get_rng_state()
    assert difference(lambda: iter([torch.rand(2)]), lambda mark: []) is not None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_stream_that_cannot_be_read_again_has_changed() -> None:
    """What it raises is told."""

    def failing() -> Any:
        raise OSError("gone")

    assert "gone" in str(difference(failing, lambda mark: []))
