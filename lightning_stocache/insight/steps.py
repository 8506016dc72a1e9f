"""A clock that splits the time of training steps into parts.

Parts may be nested. Every moment belongs to the innermost part; time outside of all parts is the part "rest". The clock
has a list of marks. A mark is a moment and the part that begins at it, and the seconds of a part are the differences
between marks. A step ends with `end_step`. `pause` drops a step that has not ended, and no time counts until `resume`.

On a GPU a moment is a CUDA event on the current stream. An event is read after the device has passed it, so `take` is
the only method that waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

__all__ = ["PARTS", "StepClock", "cuda_moment"]

PARTS = ("wait", "transfer", "forward", "backward", "optimizer", "rest")
_MANY = 2048  # marks: if there are more, the first half of them is read


class StepClock:
    """Adds up the seconds of each part over the steps of a training loop.

    Args:
        moment: gives the present moment: seconds, or an event that the device passes later.
    """

    def __init__(self, moment: Callable[[], Any] = time.perf_counter) -> None:
        self._moment = moment
        self._marks: list[tuple[Any, str | None]] = []
        self._ended = 0  # marks up to the end of the last step
        self._open: list[str] = []  # parts, the innermost last
        self._paused = True
        self._seconds, self._steps = dict.fromkeys(PARTS, 0.0), 0  # since `take`

    def __reduce__(self) -> tuple[type[StepClock], tuple[()]]:
        return type(self), ()  # a copied model gets a new clock: its methods refer to the clock

    def start(self, part: str) -> None:
        """Begin a part inside of the part that runs."""
        if not self._paused:
            self._open.append(part)
            self._marks.append((self._moment(), part))

    def stop(self, part: str) -> None:
        """End a part, and the parts inside of it that have not ended. An end without a beginning is ignored."""
        if part in self._open:
            while self._open.pop() != part:
                pass
            self._marks.append((self._moment(), self._open[-1] if self._open else "rest"))

    def end_step(self) -> None:
        """End the step. The time until the next part begins belongs to the rest of this step."""
        if self._paused:
            return
        self._open.clear()
        self._marks.append((self._moment(), "rest"))
        self._ended = len(self._marks)
        self._steps += 1
        half = self._ended // 2
        if self._ended > _MANY and _is_past(self._marks[half][0]):
            self._read(half + 1)

    def pause(self) -> None:
        """Count no time until `resume`. Drops a step that has not ended, and the rest of the last step."""
        del self._marks[self._ended :]
        if self._marks:
            self._marks[-1] = self._marks[-1][0], None
        self._open.clear()
        self._paused = True

    def resume(self, part: str | None = None) -> None:
        """Count again: from now on for this part, or, without a part, from the beginning of the next part."""
        self._paused = False
        if part is not None:
            self._marks.append((self._moment(), part))

    def take(self) -> dict[str, float]:
        """Mean seconds of each part over the steps since the last call; empty without a step.

        Waits until the device has passed the end of the last step.
        """
        if self._ended and not _is_past(last := self._marks[self._ended - 1][0]):
            last.synchronize()
        self._read(self._ended)
        seconds, steps = self._seconds, self._steps
        self._seconds, self._steps = dict.fromkeys(PARTS, 0.0), 0
        return {part: spent / steps for part, spent in seconds.items()} if steps else {}

    def _read(self, count: int) -> None:
        """Add up the time between the first marks. The last of these marks stays: the next part begins at it."""
        of_host = count > 0 and isinstance(self._marks[0][0], float)
        for (begin, part), (end, _) in pairwise(self._marks[:count]):
            if part is not None:
                self._seconds[part] += end - begin if of_host else begin.elapsed_time(end) / 1000
        read = max(count - 1, 0)
        del self._marks[:read]
        self._ended -= read


def cuda_moment() -> torch.cuda.Event:
    """An event that is recorded now on the current stream of the current CUDA device."""
    make: Any = torch.cuda.Event  # some versions of torch have no type for it
    event: torch.cuda.Event = make(enable_timing=True)
    event.record()
    return event


def _is_past(moment: Any) -> bool:
    return isinstance(moment, float) or bool(moment.query())
