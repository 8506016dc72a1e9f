"""Random lives of a stream, against a plain list: an epoch that is read to its end has every sample once."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_stocache import CachedLoader, CachedStream


class Life:
    """A stream of random samples, which may raise, and may change its order."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.length = dice, dice.choice([0, 1, 7, 63, 64, 65, 200])
        self.kind = dice.choice(["rows", "texts", "turning", "large", "large texts"])
        self.shuffles = dice.random() < 0.5
        self.fails_at: int | None = None

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(self.length))
        if self.shuffles:
            self.dice.shuffle(numbers)
        for position, number in enumerate(numbers):
            if position == self.fails_at:
                raise KeyError(position)
            yield self.sample(number)

    def sample(self, number: int) -> Any:
        if self.kind == "rows":
            return number, torch.full((5,), number)
        if self.kind == "turning":
            return number, torch.full((5 + (number > 40),), number)
        if self.kind == "large":
            return number, torch.full((3000,), float(number))
        return number, "a" * (number * 37 % (20 if self.kind == "texts" else 20_000))


def tag(sample: Any) -> tuple[int, Any]:
    number, content = sample
    return number, content if isinstance(content, str) else (tuple(content.shape), content.sum().item())


@pytest.mark.parametrize("seed", range(30))
def test_every_whole_epoch_has_every_sample_once(seed: int) -> None:
    """Epochs before it may be broken off, raise, or run at the same time."""
    dice = random.Random(seed)
    life = Life(dice)
    expected = Counter(tag(life.sample(number)) for number in range(life.length))
    shuffle, served = dice.random() < 0.7, 0
    with closing(CachedStream(life, dice.choice(["512KiB", "2MiB", "16MiB"]), shuffle=shuffle)) as stream:
        loader_kind = dice.choice([None, DataLoader, CachedLoader])
        loader: Any = stream if loader_kind is None else loader_kind(stream, batch_size=4, collate_fn=list)
        for _ in range(dice.randrange(4, 14)):
            what = dice.choice(["whole", "whole", "whole", "break", "fail", "two"])
            if what == "fail":
                life.fails_at = dice.randrange(life.length + 1)
            samples = iter(loader)
            if what == "two":
                other = iter(loader)
                next(samples, None)
                came = list(other)
            elif what == "break":
                for _ in range(dice.randrange(life.length + 1)):
                    next(samples, None)
                del samples
                continue
            else:
                came = []
                try:
                    came = list(samples)
                except KeyError:
                    continue
                finally:
                    life.fails_at = None
            flat = [sample for batch in came for sample in batch] if loader_kind is not None else came
            assert Counter(map(tag, flat)) == expected, what
            served += life.length
        assert stream.counters.totals().served >= served
