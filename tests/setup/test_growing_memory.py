"""How many samples a rolling cache has room for."""

from __future__ import annotations

import pytest
import torch

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.node.budget import Budget
from lightning_stocache.setup.growing_memory import RollingMemory

SPEC = SampleSpec.infer(torch.zeros(1000, dtype=torch.uint8))
EACH = 1024  # with the generation, the time and the index of a slot


def granted(budget: int | str, length: int | None = None, writers: int = 1) -> RollingMemory:
    return RollingMemory.grant(Budget.parse(budget), SPEC, length, writers, 1)


def test_the_budget_is_divided_into_slots():
    """As many as fit, and no more than the source has samples."""
    assert granted(100 * EACH).count == 100
    assert granted(100 * EACH, length=40).count == 40
    assert granted(100 * EACH, length=40).holds_all
    assert not granted(100 * EACH, length=400).holds_all
    assert granted("50%", length=400).count == 200


def test_too_little_room_is_an_error():
    """One sample more than the writers write at a time has to be readable."""
    with pytest.raises(ValueError, match="room for 6 samples"):
        granted(5 * EACH, writers=4)
    with pytest.raises(ValueError, match="room for"):
        granted(0)
    assert granted(1 * EACH, length=1, writers=4).count == 1


def test_a_share_of_a_stream_is_no_number():
    """Nobody knows how long a stream is."""
    with pytest.raises(ValueError, match="for a stream, got auto"):
        granted("auto")
