"""A host's clock that a test moves, and a GPU that follows it: its time goes on where work is launched."""

from typing import Any

__all__ = ["Device", "ManualClock"]


class ManualClock:
    """A host's clock that stands still until `spend`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def spend(self, seconds: float) -> None:
        self.seconds += seconds

    def moment(self) -> float:
        return self.seconds


class Device:
    """A device with one stream."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0  # seconds on the host's clock
        self.waits = 0  # how often the host waited for the device
        self.read = 0  # events whose time was asked for

    def moment(self) -> Any:
        """An event like a CUDA event that is recorded now."""
        return _Event(self, max(self.busy_until, self.host))

    def spend(self, seconds: float) -> None:
        """Let the host work."""
        self.host += seconds

    def launch(self, seconds: float) -> None:
        """Queue work for the device."""
        self.busy_until = max(self.busy_until, self.host) + seconds


class _Event:
    """An event, which raises if its time is read before the device has passed it."""

    def __init__(self, device: Device, time: float) -> None:
        self.device, self.time = device, time

    def query(self) -> bool:
        return self.device.host >= self.time

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.host = max(self.device.host, self.time)

    def elapsed_time(self, end_event: Any) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("device not ready")  # so does CUDA
        self.device.read += 1
        milliseconds: float = 1000 * (end_event.time - self.time)
        return milliseconds
