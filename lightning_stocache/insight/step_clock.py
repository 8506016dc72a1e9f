"""A clock that splits training steps into their parts.

It is told when a part begins and ends. Parts may lie in each other, and every moment belongs to the innermost:
Lightning calls forward and backward inside of the optimiser's step, a GAN calls several optimisers inside of its
forward, and each is counted once. What lies in no part is the rest. So a step is a row of moments, each with the part
that begins there, and its seconds are the differences.

A step is over when `end_step` was called and the next part begins; the time between is the rest. `pause` ends it where
`end_step` was called, and nothing counts until `resume`: validation is not of the step. Steps that are over are read
some steps later, many at a time (one by one it would cost ten times as much), and only those whose last moment is
past: a GPU is not waited for. `Stall` is another clock: it sums up what the host waits and computes, and knows no step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from lightning_stocache.insight.breakdown import PARTS, Breakdown
from lightning_stocache.insight.timeline import Timeline, timeline_of

__all__ = ["StepClock"]

_Batch = TypeVar("_Batch")
_MANY = 64  # steps that are read at a time: more than lie between two values that are logged by default


class _Step(NamedTuple):
    """A step that is over, and not read yet."""

    moments: list[Any]
    parts: tuple[str, ...]  # what begins at each moment but the last
    samples: int
    epoch: Breakdown


class StepClock:
    """Splits the steps of a training loop into waiting, transfer, forward, backward, optimiser and the rest.

    In a loop of one's own (plain PyTorch, Fabric) it is used as below; `StepTimer` does so in a Trainer. On a GPU the
    parts are what the device needed for them, and waiting is the time in which it stood still. That costs no
    synchronisation: CUDA events are recorded, and read when they have been passed.

    Args:
        device: on which the model is: a CUDA device has its own time, any other the host's.
        timeline: where moments are read, in place of the device's.

    Raises:
        ValueError: a part is none of `PARTS`.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> clock = StepClock()
        >>> for batch in clock.steps([torch.ones(8, 4)] * 5, batch_size=8):
        ...     with clock("forward"):
        ...         loss = model(batch).sum()
        ...     with clock("backward"):
        ...         loss.backward()
        ...     with clock("optimizer"):
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> [epoch] = clock.epochs
        >>> epoch.steps, epoch.samples, epoch.seconds["backward"] > 0
        (5, 40, True)
    """

    def __init__(self, device: torch.device | str = "cpu", *, timeline: Timeline | None = None) -> None:
        self._timeline = timeline if timeline is not None else timeline_of(device)
        self._now = self._timeline.now
        self._parts = {part: _Part(self, part) for part in PARTS[:-1]}
        self._epochs: list[Breakdown] = []
        self._open: list[str] = []  # the innermost last
        self._moments: list[Any] = []  # of this step,
        self._begun: list[str] = []  # and what began at each
        self._ended: int | None = None  # the samples of its batch, when it has done its work
        self._paused = False
        self._unread: deque[_Step] = deque()
        self._sums, self._steps = np.zeros(len(PARTS)), 0  # since `take`

    def __call__(self, part: str) -> _Part:
        """A context: what runs in it is this part of the step."""
        if part not in self._parts:
            raise ValueError(f"part must be one of {', '.join(self._parts)}, got {part!r}")
        return self._parts[part]

    def steps(self, loader: Iterable[_Batch], batch_size: int = 0) -> Iterator[_Batch]:
        """The batches of one epoch; waiting for each is timed, and a step ends where the next is asked for.

        Args:
            loader: gives the batches.
            batch_size: samples in a batch; 0: they are not counted.
        """
        self.begin_epoch()
        batches = iter(loader)
        try:
            while True:
                self.start("wait")
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                finally:
                    self.stop("wait")
                yield batch
                self.end_step(batch_size)
        finally:
            self.pause()

    def begin_epoch(self) -> None:
        """Count from now on, in a new epoch. Until the first part begins, it waits: workers start meanwhile."""
        self.pause()
        self._epochs.append(Breakdown())
        self.resume()
        self._mark("wait")

    def start(self, part: str) -> None:
        """Have a part of the step begin, in what is open."""
        if self._paused:
            return
        self._open.append(part)
        if self._ended is not None:
            self._begin_next(part)
        elif not self._begun or self._begun[-1] != part:
            self._mark(part)

    def stop(self, part: str) -> None:
        """End a part of the step, and what is open in it; an end that has no beginning is passed over."""
        if part not in self._open:
            return
        while self._open.pop() != part:
            pass
        goes_on = self._open[-1] if self._open else "rest"
        if self._begun[-1] != goes_on:
            self._mark(goes_on)

    def end_step(self, samples: int = 0) -> None:
        """The step has done its work; what comes until the next one begins is its rest.

        Args:
            samples: in the batch; 0: nobody knows.
        """
        if not self._paused and self._moments:
            self._open.clear()
            self._mark("rest")
            self._ended = samples

    def pause(self) -> None:
        """Count nothing until `resume`. A step that has not ended is not counted."""
        if self._ended is not None:
            self._close(self._begun[:-1])
        self._open.clear()
        self._moments, self._begun, self._ended, self._paused = [], [], None, True

    def resume(self) -> None:
        """Count steps again."""
        self._paused = False

    def take(self) -> dict[str, float]:
        """Seconds per step of each part, over the steps that could be read since the last call; empty if none could."""
        self._read()
        sums, steps = self._sums, self._steps
        self._sums, self._steps = np.zeros(len(PARTS)), 0
        return dict(zip(PARTS, (sums / steps).tolist(), strict=True)) if steps else {}

    @property
    def epochs(self) -> list[Breakdown]:
        """All steps so far, by epoch; this waits for a device that is still at the last ones."""
        if self._unread:
            self._timeline.wait(self._unread[-1].moments[-1])
            self._read()
        return [epoch for epoch in self._epochs if epoch.steps]

    def _mark(self, part: str) -> None:
        self._moments.append(self._now())
        self._begun.append(part)

    def _begin_next(self, part: str) -> None:
        """The step that has ended lasts until now, where the next one begins with this part."""
        now = self._now()
        self._moments.append(now)
        self._close(self._begun)
        self._moments, self._begun, self._ended = [now], [part], None

    def _close(self, parts: list[str]) -> None:
        if not self._epochs:
            self._epochs.append(Breakdown())
        self._unread.append(_Step(self._moments, tuple(parts), self._ended or 0, self._epochs[-1]))
        if len(self._unread) >= _MANY:
            self._read()

    def _read(self) -> None:
        """Add up what is past: at once for all steps that went through the same parts."""
        alike: dict[tuple[Breakdown, tuple[str, ...]], list[_Step]] = defaultdict(list)
        while self._unread and self._timeline.is_past(self._unread[0].moments[-1]):
            step = self._unread.popleft()
            alike[step.epoch, step.parts].append(step)
        for (epoch, parts), steps in alike.items():
            whose = np.eye(len(PARTS))[[PARTS.index(part) for part in parts]]
            seconds = self._timeline.seconds([step.moments for step in steps]) @ whose
            epoch.add_steps(seconds, sum(step.samples for step in steps))
            self._sums += seconds.sum(0)
            self._steps += len(steps)
            for step in steps:
                self._timeline.reuse(step.moments[:-1])  # the last may be the next step's first


class _Part:
    """A part of the step, as a context. It knows no beginning, so one serves all steps, also within itself."""

    __slots__ = ("_clock", "_part", "heard")

    def __init__(self, clock: StepClock, part: str) -> None:
        self._clock, self._part = clock, part
        self.heard = False
        """Whether it was ever entered."""

    def __enter__(self) -> None:
        self.heard = True
        self._clock.start(self._part)

    def __exit__(self, *_: object) -> None:
        self._clock.stop(self._part)
