"""What can be a stream, and what in it is random."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.source.stream import DrawsWatch


@pytest.mark.parametrize("draw", [torch.rand, lambda _: np.random.rand(), lambda _: random.random()])
def test_draws_are_seen_but_of_the_first_sample(draw: Any) -> None:
    """The first may draw the order of all; what the others draw is random."""
    watch = DrawsWatch(None)
    for number in range(3):
        watch.before()
        if number != 1:
            draw(1)
        assert watch.after() > 0
        assert (watch.moved is not None) == (number == 2)
    assert watch.moved in ("torch", "numpy.random", "random")


def test_generators_of_a_stream_are_watched() -> None:
    """One that belongs to the stream counts as the process-wide ones do."""

    class Noisy:
        draws = np.random.default_rng(0)

    watch = DrawsWatch(Noisy())
    for _ in range(2):
        watch.before()
        Noisy.draws.random()
        watch.after()
    assert "draws" in str(watch.moved)


def test_draws_between_samples_are_nobodys() -> None:
    """What a training draws while it has the sample is not the stream's."""
    watch = DrawsWatch(None)
    for _ in range(5):
        torch.rand(1)
        watch.before()
        watch.after()
    assert watch.moved is None
