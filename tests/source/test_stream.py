"""What can be a stream, and what in it is random."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lightning_stocache.source.stream import DrawsWatch, difference, iterate, mark_of

LEAVES = st.one_of(st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), st.booleans(), st.none())
SAMPLES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(SAMPLES)
def test_a_mark_follows_from_the_content(sample: Any) -> None:
    """A copy has the same mark, whatever objects it is made of."""
    assert mark_of(copied(sample)) == mark_of(sample)
    assert 0 <= mark_of(sample) < 2**64


def copied(sample: Any) -> Any:
    if isinstance(sample, dict):
        return {key: copied(value) for key, value in sample.items()}
    return [copied(item) for item in sample] if isinstance(sample, list) else sample


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(3, 64, 64), torch.zeros(3, 64, 64).index_fill_(2, torch.tensor(5), 1.0), torch.zeros(64, 3, 64)],
        [torch.zeros(4, dtype=torch.int32), torch.zeros(4), np.zeros(4, np.float32)],
        [b"a" * 500, b"a" * 250 + b"b" + b"a" * 249, "a" * 500],
        [{"a": 1, "b": 2}, {"a": 2, "b": 1}, [1, 2], (1, 2), [True, 2]],
        [Image.new("RGB", (9, 9)), Image.new("RGB", (9, 9), (1, 0, 0)), Image.new("L", (9, 9))],
        [torch.tensor(1), torch.tensor(True), torch.tensor([1]), 1, 1.0, None],
    ],
)
def test_other_contents_have_other_marks(samples: list[Any]) -> None:
    """A byte in the middle, another shape, type or key changes it."""
    assert len({mark_of(sample) for sample in samples}) == len(samples)


def test_a_sample_inside_itself_has_a_mark() -> None:
    """It is not gone into for ever."""
    sample: list[Any] = [torch.zeros(2)]
    sample.append(sample)
    assert mark_of(sample) == mark_of(sample)


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
    with pytest.raises(OSError, match="gone"):
        iterate(failing)
