"""A few samples are read again while a cache fills; one that differs is warned about, and nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_stocache.source.probe import Recheck

LOADS = 40_000


class Seldom(Dataset[Any]):
    """Draws for some samples; each time it is asked it adds the index to `asked`."""

    def __init__(self, is_random: Any) -> None:
        self.is_random, self.asked = is_random, list[int]()

    def __len__(self) -> int:
        return LOADS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return torch.rand(2) if self.is_random(index) else torch.tensor([index, 0.5])


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def test_few_are_read_again_and_nothing_moves(caplog: pytest.LogCaptureFixture) -> None:
    """Eight at most, none before the 64th load; no generator has moved, and there is no warning."""
    source = Seldom(lambda index: False)
    recheck = Recheck(source, lambda: True)
    before = states()
    again = [recheck.after(index, torch.tensor([index, 0.5])) for index in range(LOADS)]
    assert states() == before
    assert sum(again) == len(source.asked) == 8
    assert not any(again[:63])
    assert source.asked == [index for index, read in enumerate(again) if read]
    assert not caplog.messages


def test_a_sample_that_differs_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """The warning names index and source, says what to do, and comes once."""
    source = Seldom(lambda index: index > 200)
    recheck = Recheck(source, lambda: True)
    for index in range(LOADS):
        recheck.after(index, source[index])
    [warning] = caplog.messages
    assert warning.startswith("sample ")
    assert int(warning.split()[1]) > 200
    assert "of Seldom is another one when it is read again" in warning
    assert "transform=" in warning


def test_only_one_process_of_a_node_tells(caplog: pytest.LogCaptureFixture) -> None:
    """Who is told that somebody else has warned is silent."""
    source = Seldom(lambda index: True)
    recheck = Recheck(source, lambda: False)
    assert sum(recheck.after(index, source[index]) for index in range(LOADS)) == 1
    assert not caplog.messages


def test_an_error_of_the_second_read_is_nobodys() -> None:
    """The sample has been served; what the user's code raises when it is asked twice ends nothing."""

    def raises(index: int) -> bool:
        raise OSError("gone")

    recheck = Recheck(Seldom(raises), lambda: True)
    assert sum(recheck.after(index, torch.zeros(2)) for index in range(LOADS)) == 8
