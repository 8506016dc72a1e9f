"""The hit rate that theory predicts on one node, for any sampler whose chances are known.

A cache that never evicts misses each index that has a slot once: when it is drawn for the first time. So the expected
misses of an epoch are the expected first draws: over the indices with a slot, the chance that an index has not been
drawn before, times the chance that the epoch draws it. What has no slot is a bypass as often as it is drawn. All else
hits; whether processes are one or many makes no difference, as long as they share the cache.

Chances, for an epoch of n draws:

- `Anew`: a list in random order, of which the epoch takes the first n. An index that comes c times in a list of L is
  among them with probability `1 - (1 - n/L)^c`. More draws than the list has are several passes. Where each is given r
  times in a row (repeated augmentation), n draws are n/r of the list.
- `InOrder`: a list in its own order: what stands among the first n is drawn, in every epoch.
- `WithReplacement`: each draw is an index with probability p: `1 - (1 - p)^n`. Where m are drawn together, none twice
  (so many of each class), and p is the chance of an index to be among them: `1 - (1 - p)^(n/m)`.
- `ByWeight`: by weight, and no index twice: `1 - exp(-w t)`, with the t for which these sum to n. (Every index waits
  for an exponential time with its weight as the rate, and the first n are drawn: Efraimidis and Spirakis, "Weighted
  random sampling with a reservoir", 2006. The time of the n-th is t, but for its own spread.)

Several loaders that read one dataset draw independently of each other: an index is missed by whoever draws it first,
and with chances p and q one of two draws it with `1 - (1 - p)(1 - q)`, in whatever turns they do (`Together`).

Indices of the same chance are one group, and are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Anew", "ByWeight", "Draws", "FirstDraws", "InOrder", "Together", "WithReplacement"]

Numbers = npt.NDArray[np.float64]


class Draws(Protocol):
    """How an epoch draws, by groups of indices."""

    @property
    def groups(self) -> int:
        """Number of groups."""

    def passes(self, draws: int) -> Iterator[int]:
        """The draws of an epoch, in parts of which each has the chances that `chances` gives."""

    def chances(self, draws: int) -> tuple[Numbers, Numbers]:
        """Per group, how likely one of its indices is drawn, and how often it is, float64 `[groups]` each."""


@dataclass(frozen=True)
class Anew:
    """A list in another random order each time.

    Args:
        copies: how often the indices of each group come in the list, `[groups]`.
        length: of the list.
        repeats: how often in a row each is given.
    """

    copies: npt.NDArray[Any]
    length: int
    repeats: float = 1

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.copies)

    def passes(self, draws: int) -> Iterator[int]:
        """The draws of each pass through the list: the whole of it, and what is left at last."""
        return _passes(draws, round(self.length * self.repeats))

    def chances(self, draws: int) -> tuple[Numbers, Numbers]:
        """How likely and how often an index of each group is among so many draws, of at most one pass."""
        part = min(draws / (self.length * self.repeats), 1.0)
        return 1 - (1 - part) ** self.copies, part * self.copies * self.repeats


@dataclass(frozen=True)
class InOrder:
    """A list in its own order; each of its indices is a group.

    Args:
        numbers: the group of each place of the list, int64 `[length]`.
    """

    numbers: npt.NDArray[np.int64]

    @property
    def groups(self) -> int:
        """Number of groups."""
        return int(self.numbers.max(initial=-1)) + 1

    def passes(self, draws: int) -> Iterator[int]:
        """The draws of each pass through the list, which begins at its beginning."""
        return _passes(draws, len(self.numbers))

    def chances(self, draws: int) -> tuple[Numbers, Numbers]:
        """Whether (0 or 1) and how often an index of each group stands among the first of the list."""
        times = np.bincount(self.numbers[:draws], minlength=self.groups).astype(np.float64)
        return np.minimum(times, 1), times


@dataclass(frozen=True)
class WithReplacement:
    """Draws of which each is independent of the others.

    Args:
        chance: of an index of each group, per draw, `[groups]`.
        together: so many are drawn together, no index twice; then it is the chance for all of these draws.
    """

    chance: Numbers
    together: int = 1

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.chance)

    def passes(self, draws: int) -> Iterator[int]:
        """The whole epoch as one part: its draws do not depend on each other."""
        yield draws

    def chances(self, draws: int) -> tuple[Numbers, Numbers]:
        """How likely and how often an index of each group is drawn in so many draws."""
        times = draws / self.together
        return 1 - (1 - self.chance) ** times, self.chance * times


@dataclass(frozen=True)
class ByWeight:
    """Draws by weight, in which no index comes twice.

    Args:
        weights: of an index of each group, above 0, `[groups]`.
        counts: number of indices of each group, `[groups]`.
    """

    weights: Numbers
    counts: npt.NDArray[Any]

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.weights)

    def passes(self, draws: int) -> Iterator[int]:
        """The draws of each pass, which has every index at most once."""
        return _passes(draws, int(self.counts.sum()))

    def chances(self, draws: int) -> tuple[Numbers, Numbers]:
        """How likely an index of each group is among so many draws: t, of the module's text, is found by bisection."""
        if draws >= self.counts.sum():
            return np.ones(self.groups), np.ones(self.groups)
        low, high = 0.0, 1 / float(self.weights.min())
        while (self.counts * -np.expm1(-self.weights * high)).sum() < draws:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            short = (self.counts * -np.expm1(-self.weights * middle)).sum() < draws
            low, high = (middle, high) if short else (low, middle)
        chance: Numbers = -np.expm1(-self.weights * high)
        return chance, chance


@dataclass(frozen=True)
class Together:
    """Several loaders that draw from one dataset, independently of each other.

    Args:
        each: how each of them draws.
        places: the group of each of them, for every group here; -1 where it draws none of these, int64 `[groups]` each.
        divided: how many of so many draws are each loader's.
    """

    each: Sequence[Draws]
    places: Sequence[npt.NDArray[np.int64]]
    divided: Callable[[int], Sequence[int]]

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.places[0])

    def passes(self, draws: int) -> Iterator[int]:
        """The whole epoch as one part."""
        yield draws

    def chances(self, draws: int) -> tuple[Numbers, Numbers]:
        """How likely an index of each group is drawn by any of them, and how often by all."""
        never, times = np.ones(self.groups), np.zeros(self.groups)
        for loader, place, count in zip(self.each, self.places, self.divided(draws), strict=True):
            for part in loader.passes(count):
                drawn, often = loader.chances(part)
                never *= 1 - np.append(drawn, 0.0)[place]
                times += np.append(often, 0.0)[place]
        return 1 - never, times


class FirstDraws:
    """The prediction for one sampler, epoch by epoch.

    Args:
        draws: how an epoch draws.
        ready: share of the slots that are filled before the first epoch.

    Example:
        >>> import numpy as np
        >>> half = FirstDraws(Anew(np.array([1]), length=1000))  # a shuffled dataset of 1000, with 500 slots
        >>> [half.hit_rate(1000, held=np.array([500]), others=np.array([500])) for epoch in range(3)]
        [0.0, 0.5, 0.5]
        >>> balanced = FirstDraws(WithReplacement(np.array([0.5 / 900, 0.5 / 100])))
        >>> held, none = np.array([900, 100]), np.array([0, 0])
        >>> [round(balanced.hit_rate(1000, held, none), 2) for epoch in range(3)]
        [0.52, 0.78, 0.87]
    """

    def __init__(self, draws: Draws, ready: float = 0.0) -> None:
        self._draws = draws
        self._missing = np.full(draws.groups, 1.0 - ready)  # how likely an index has not been drawn yet

    def hit_rate(self, served: int, held: npt.NDArray[Any], others: npt.NDArray[Any]) -> float:
        """The predicted hit rate of an epoch, which counts as drawn from now on.

        Args:
            served: number of samples that it draws.
            held: number of indices of each group that have a slot, `[groups]`.
            others: number of those that have none, `[groups]`.
        """
        misses = bypasses = 0.0
        for count in self._draws.passes(served):
            drawn, times = self._draws.chances(count)
            misses += float((held * self._missing * drawn).sum())
            bypasses += float((others * times).sum())
            self._missing *= 1 - drawn
        return min(max(1 - (misses + bypasses) / max(served, 1), 0.0), 1.0)


def _passes(draws: int, length: int) -> Iterator[int]:
    whole, rest = divmod(draws, max(length, 1))
    yield from [length] * whole
    if rest:
        yield rest
