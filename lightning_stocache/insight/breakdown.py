"""What training steps are made of: seconds per part, added up, and how they are spread.

A step is one batch, from asking for it to asking for the next one. It has the six `PARTS`; what is none of the first
five (callbacks, logging, hooks) is the rest, so the parts of a step add up to the step. Sums are exact. Of how a part
is spread over the steps a histogram is kept, whose bins are 0.5 % wide: a run of any length takes some kilobytes, and a
quantile is right within that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

__all__ = ["PARTS", "Breakdown"]

PARTS = ("wait", "transfer", "forward", "backward", "optimizer", "rest")
_BIN = 0.005  # of the logarithm
_NOTHING = -(10**6)  # the bin of zero seconds


class Breakdown:
    """What a number of training steps are made of: seconds per part.

    Example:
        >>> steps = Breakdown()
        >>> steps.add({"wait": 0.03, "forward": 0.01}, samples=8)
        >>> steps.add({"wait": 0.01, "forward": 0.01}, samples=8)
        >>> steps.steps, round(steps.mean("wait"), 4), round(steps.share("wait"), 3), round(steps.step_seconds, 4)
        (2, 0.02, 0.667, 0.03)
    """

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0  # 0: nobody knows what a batch holds
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._spread: dict[str, Counter[int]] = {name: Counter() for name in (*PARTS, "step")}

    @classmethod
    def sum(cls, several: Iterable[Breakdown]) -> Breakdown:
        """The steps of several breakdowns, together."""
        whole = cls()
        for each in several:
            whole.steps += each.steps
            whole.samples += each.samples
            for part, seconds in each.seconds.items():
                whole.seconds[part] += seconds
            for name, counts in each._spread.items():
                whole._spread[name] += counts
        return whole

    def add(self, seconds: Mapping[str, float], samples: int = 0) -> None:
        """Count one more step.

        Args:
            seconds: of each part; a part that is left out took none.
            samples: in the batch.

        Raises:
            ValueError: a part is none of `PARTS`.
        """
        if unknown := seconds.keys() - set(PARTS):
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
        self.add_steps(np.array([[seconds.get(part, 0.0) for part in PARTS]]), samples)

    def add_steps(self, seconds: npt.NDArray[np.float64], samples: int = 0) -> None:
        """Count more steps: many at a time cost a tenth of what they cost one by one.

        Args:
            seconds: of each part, float64 `[steps, parts]`.
            samples: in all batches together.
        """
        self.steps += len(seconds)
        self.samples += samples
        for part, spent in zip(PARTS, seconds.sum(0).tolist(), strict=True):
            self.seconds[part] += spent
        for counts, bins in zip(self._spread.values(), _bins(seconds), strict=True):
            counts.update(bins)

    @property
    def total(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values())

    @property
    def step_seconds(self) -> float:
        """Seconds of the mean step; NaN without a step."""
        return self.total / self.steps if self.steps else math.nan

    def mean(self, part: str) -> float:
        """Seconds of a part per step; NaN without a step."""
        return self.seconds[part] / self.steps if self.steps else math.nan

    def share(self, part: str) -> float:
        """Share of a part in all seconds, from 0 to 1; 0 without any."""
        return self.seconds[part] / self.total if self.total > 0 else 0.0

    def quantile(self, part: str, share: float) -> float:
        """Seconds that this share of the steps needs at most for a part, or for the whole `step`; NaN without a step.

        Example:
            >>> steps = Breakdown()
            >>> for milliseconds in range(1, 101):
            ...     steps.add({"forward": milliseconds / 1000})
            >>> round(steps.quantile("forward", 0.5), 2), round(steps.quantile("step", 0.95), 3)
            (0.05, 0.095)
        """
        if not self.steps:
            return math.nan
        counts, rank = self._spread[part], math.ceil(share * self.steps)
        for number in sorted(counts):
            rank -= counts[number]
            if rank <= 0:
                return 0.0 if number == _NOTHING else math.exp((number + 0.5) * _BIN)
        raise AssertionError("the counts add up to the steps")


def _bins(seconds: npt.NDArray[np.float64]) -> list[list[int]]:
    """The bin of each step, for every part and for the whole step."""
    each = np.vstack([seconds.T, seconds.sum(1)])
    with np.errstate(divide="ignore"):
        numbers = np.floor(np.log(each) / _BIN)
    bins: list[list[int]] = np.where(each > 0, numbers, _NOTHING).astype(np.int64).tolist()
    return bins
