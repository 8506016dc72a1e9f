"""Where moments of a step are read: on the host's clock, or on the device's own time.

What is launched on a GPU runs later. A clock on the host would see how long launching takes, and all the rest wherever
the host happens to wait for the device. So on a GPU a moment is a CUDA event, recorded on the current stream: it is
passed when all work launched before it is done. Recording waits for nothing. Between two events lies the time in which
the device did what was launched between them, or stood still because nothing was: this is how waiting for data is seen
there. An event is read some steps later, when it has been passed, and is then used again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["DeviceTimeline", "Event", "HostTimeline", "Timeline", "timeline_of"]


class Timeline(Protocol):
    """Moments, which can be compared once they are past."""

    def now(self) -> Any:
        """The moment that it is now."""

    def is_past(self, moment: Any) -> bool:
        """Whether a moment can be compared yet."""

    def wait(self, moment: Any) -> None:
        """Wait until a moment can be compared."""

    def seconds(self, moments: Sequence[Sequence[Any]]) -> npt.NDArray[np.float64]:
        """Seconds from each moment of a row to the next one, `[rows, moments - 1]`; all are past."""

    def reuse(self, moments: Iterable[Any]) -> None:
        """Take back moments that nobody will ask for."""


class Event(Protocol):
    """What a `torch.cuda.Event` does."""

    def record(self, stream: Any = None) -> None:
        """Put it into a stream, by default the current one of the current device."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds to a later event."""


class HostTimeline:
    """The host's own clock, `time.perf_counter`.

    Example:
        >>> timeline = HostTimeline()
        >>> begin = timeline.now()
        >>> timeline.is_past(begin), timeline.seconds([[begin, begin]])
        (True, array([[0.]]))
    """

    def __init__(self) -> None:
        self.now = time.perf_counter  # an attribute, not a method: it is called ten times a step

    def is_past(self, moment: float) -> bool:
        """Always true: a time of the host's is past when it has been read."""
        return True

    def wait(self, moment: float) -> None:
        """Return at once: a time of the host's is past when it has been read."""

    def seconds(self, moments: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
        """Seconds from each moment of a row to the next one."""
        return np.diff(np.array(moments))

    def reuse(self, moments: Iterable[float]) -> None:
        """Do nothing: moments are numbers, and need no second use."""


class DeviceTimeline:
    """Events in the current stream of a device.

    Args:
        device: whose current stream it is; None: that of the device which is the current one.
        event: makes an event that can be timed; by default CUDA's.
    """

    def __init__(self, device: torch.device | None = None, event: Callable[[], Event] | None = None) -> None:
        self._device = device
        self._make: Callable[[], Any] = event or _cuda_event
        self._free: list[Any] = []

    def now(self) -> Event:
        """An event, recorded now."""
        event: Event = self._free.pop() if self._free else self._make()
        if self._device is None:
            event.record()
        else:
            event.record(torch.cuda.current_stream(self._device))
        return event

    def is_past(self, moment: Event) -> bool:
        """Whether the device has passed an event."""
        return moment.query()

    def wait(self, moment: Event) -> None:
        """Let the host wait for this event, and for nothing that was launched after it."""
        moment.synchronize()

    def seconds(self, moments: Sequence[Sequence[Event]]) -> npt.NDArray[np.float64]:
        """Seconds that the device needed from each event of a row to the next one."""
        return np.array([[begin.elapsed_time(end) for begin, end in pairwise(row)] for row in moments]) / 1000

    def reuse(self, moments: Iterable[Event]) -> None:
        """Keep these events, to be recorded anew."""
        self._free.extend(moments)


def timeline_of(device: torch.device | str) -> Timeline:
    """Events for a CUDA device; the host's clock for all others.

    Example:
        >>> type(timeline_of("cpu")).__name__, type(timeline_of("cuda:1")).__name__
        ('HostTimeline', 'DeviceTimeline')
    """
    device = torch.device(device)
    if device.type != "cuda":
        return HostTimeline()
    return DeviceTimeline(device if device.index is not None else None)


def _cuda_event() -> Any:
    make: Any = torch.cuda.Event  # without types in some versions
    return make(enable_timing=True)
