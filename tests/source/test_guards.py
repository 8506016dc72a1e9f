"""What counts as a change of a source, and how random samples are found while it is served."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lightning_stocache.source.guards import Recheck, StreamReader
from tests.sources import Made

LOADS = 40_000


def test_few_are_read_again_and_nothing_moves(caplog: pytest.LogCaptureFixture) -> None:
    """Eight at most, none before the 64th load; no generator has moved; what the second read raises ends nothing."""
    asked = list[int]()
    source = Made(lambda index: asked.append(index) or 0.5, LOADS)
    recheck = Recheck(source, lambda: True)
    before = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    again = [index for index in range(LOADS) if recheck.after(index, 0.5)]
    assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == before
    assert asked == again
    assert len(again) == 8
    assert again[0] >= 63
    broken = Recheck(Made(lambda index: 1 // 0, LOADS), lambda: True)
    assert sum(broken.after(index, 0.5) for index in range(LOADS)) == 8
    assert not caplog.messages


@pytest.mark.parametrize("first_to_tell", [True, False])
def test_a_sample_that_differs_is_named_once(first_to_tell: bool, caplog: pytest.LogCaptureFixture) -> None:
    """By the first process of a node, with what to do; no sample is read again afterwards."""
    source = Made(lambda index: random.random() if index > 200 else 0.5, LOADS)
    recheck = Recheck(source, lambda: first_to_tell)
    *equal, other = [index for index in range(LOADS) if recheck.after(index, source[index])]
    assert max(equal, default=0) <= 200 < other
    told = f"sample {other} of Made is another one when it is read again"
    assert [told in words and "transform=" in words for words in caplog.messages] == [True] * first_to_tell


def test_generators_of_a_stream_are_watched() -> None:
    """The stream's own too, unless draws do not matter; what a training draws meanwhile is not the stream's."""
    own = np.random.default_rng(0)

    def noisy() -> Iterator[float]:
        return iter(own.random, 2.0)

    for stream, watched, moved in ((noisy, True, "own"), (noisy, False, None), (range(5), True, None)):
        reader = StreamReader(stream, watched)
        for _ in range(5):
            torch.rand(1)
            next(reader)
        assert reader.moved == moved
