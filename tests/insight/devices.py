"""A host's clock that a test moves, and a GPU that follows it: its time goes on where work is launched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_stocache.insight.steps import StepClock

__all__ = ["Device", "ManualClock", "part"]


@contextmanager
def part(clock: StepClock, name: str) -> Iterator[None]:
    """The context is this part of the step."""
    clock.start(name)
    yield
    clock.stop(name)


class ManualClock:
    """A host's clock that stands still until `spend`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def spend(self, seconds: float) -> None:
        self.seconds += seconds

    def moment(self) -> float:
        return self.seconds


class Device:
    """A device with one stream.

    Attributes:
        host: seconds on the host's clock.
        waits: how often the host waited for the device.
        read: events whose time was asked for.
    """

    def __init__(self) -> None:
        self.host = 0.0
        self.waits = self.read = 0
        self._busy_until = 0.0

    def moment(self) -> Any:
        """An event like a CUDA event that is recorded now."""
        return _Event(self, self.free_at())

    def spend(self, seconds: float) -> None:
        """Let the host work."""
        self.host += seconds

    def launch(self, seconds: float) -> None:
        """Queue work for the device."""
        self._busy_until = self.free_at() + seconds

    def free_at(self) -> float:
        return max(self._busy_until, self.host)


class _Event:
    """An event, which raises if its time is read before the device has passed it."""

    def __init__(self, device: Device, time: float) -> None:
        self._device, self._time = device, time

    def query(self) -> bool:
        return self._device.host >= self._time

    def synchronize(self) -> None:
        self._device.waits += 1
        self._device.host = max(self._device.host, self._time)

    def elapsed_time(self, end_event: Any) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("device not ready")  # so does CUDA
        self._device.read += 1
        milliseconds: float = 1000 * (end_event._time - self._time)
        return milliseconds
