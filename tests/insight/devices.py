"""A GPU without a wall clock: the host's time goes on where a test says so, the device's where work is launched."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_stocache.insight.timeline import DeviceTimeline

__all__ = ["Device", "ManualTimeline"]


class ManualTimeline:
    """A host's clock that stands still until `spend`; nothing is ever late."""

    def __init__(self) -> None:
        self.seconds_so_far = 0.0

    def spend(self, seconds: float) -> None:
        self.seconds_so_far += seconds

    def now(self) -> float:
        return self.seconds_so_far

    def is_past(self, moment: float) -> bool:
        return True

    def wait(self, moment: float) -> None:
        pass

    def seconds(self, moments: Any) -> Any:
        return np.diff(np.array(moments))

    def reuse(self, moments: Any) -> None:
        pass


class Device:
    """A device with one stream.

    Attributes:
        host: seconds on the host's clock.
        waits: how often the host waited for the device.
        made: events that were made.
    """

    def __init__(self) -> None:
        self.host = 0.0
        self.waits = self.made = 0
        self._busy_until = 0.0

    @property
    def timeline(self) -> DeviceTimeline:
        return DeviceTimeline(event=lambda: _Event(self))

    def spend(self, seconds: float) -> None:
        """The host does something."""
        self.host += seconds

    def launch(self, seconds: float) -> None:
        """The host gives the device work, which it does after all else."""
        self._busy_until = self.free_at() + seconds

    def free_at(self) -> float:
        return max(self._busy_until, self.host)


class _Event:
    """As a CUDA event: it has a time of which nobody may ask before the device has come to it."""

    def __init__(self, device: Device) -> None:
        self._device, self._time = device, -1.0
        device.made += 1

    def record(self, stream: Any = None) -> None:
        self._time = self._device.free_at()

    def query(self) -> bool:
        return self._device.host >= self._time

    def synchronize(self) -> None:
        self._device.waits += 1
        self._device.host = max(self._device.host, self._time)

    def elapsed_time(self, end_event: Any) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("device not ready")  # so does CUDA
        milliseconds: float = 1000 * (end_event._time - self._time)
        return milliseconds
