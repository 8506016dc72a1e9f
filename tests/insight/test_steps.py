"""The clock of steps: when it counts, and that a device is waited for by `take` alone.

`tests/training/test_step_timer.py` has its parts, in each other and on a GPU, in the steps of a Trainer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_stocache.insight.steps import StepClock


class Device:
    """A GPU with one stream, and its host's clock, which a test moves."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0  # seconds on the host's clock
        self.waits = 0  # how often the host waited for the device
        self.events = 0  # that somebody still holds

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
        device.events += 1

    def __del__(self) -> None:
        self.device.events -= 1

    def query(self) -> bool:
        return self.device.host >= self.time

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.host = max(self.device.host, self.time)

    def elapsed_time(self, end_event: Any) -> float:
        if not (self.query() and end_event.query()):
            raise RuntimeError("device not ready")  # so does CUDA
        milliseconds: float = 1000 * (end_event.time - self.time)
        return milliseconds


@contextmanager
def part(clock: StepClock, name: str) -> Iterator[None]:
    """The context is this part of the step."""
    clock.start(name)
    yield
    clock.stop(name)


def started(device: Device) -> StepClock:
    """A clock that runs on the time of a test."""
    made = StepClock(device.moment)
    made.resume()
    return made


def taken(clock: StepClock) -> dict[str, float]:
    """Mean seconds of the parts that took time."""
    return {part: round(seconds, 9) for part, seconds in clock.take().items() if seconds}


def test_a_step_lasts_until_the_next_one() -> None:
    """What comes after `end_step` is its rest; after `pause` nothing counts until a part begins after `resume`."""
    time = Device()
    clock = started(time)
    for wait in (1, 2):
        with part(clock, "wait"):
            time.spend(wait)
        clock.end_step()
        time.spend(10)
    clock.pause()
    with part(clock, "transfer"):
        time.spend(100)
    clock.resume()
    time.spend(100)
    with part(clock, "wait"):
        time.spend(3)
    clock.end_step()
    assert taken(clock) == {"wait": 2, "rest": round(10 / 3, 9)}
    assert clock.take() == {}


def test_a_step_that_has_not_ended_is_dropped() -> None:
    """Steps before a break or an exception count, and the end of a part that has not begun does not."""
    time = Device()
    clock = started(time)
    clock.stop("backward")
    for ended in (True, False):
        clock.start("forward")
        time.spend(1)
        if ended:
            clock.end_step()
    clock.pause()
    clock.end_step()
    clock.resume("wait")
    time.spend(3)
    clock.end_step()
    assert taken(clock) == {"wait": 1.5, "forward": 0.5}


def train(clock: StepClock, device: Device, load: float = 0.0) -> None:
    """A step that launches 3 + 4 + 1 seconds of work, which takes the host no time; loading does."""
    with part(clock, "wait"):
        device.spend(load)
    with part(clock, "optimizer"):
        with part(clock, "forward"):
            device.launch(3)
        with part(clock, "backward"):
            device.launch(4)
        device.launch(1)
    clock.end_step()


@pytest.mark.parametrize(("load", "waits"), [(0, {}), (10, {"wait": (10 + 3 * 2) / 4})])
def test_waiting_is_the_time_in_which_the_device_stands_still(load, waits) -> None:
    """Parts have the time of the device, behind which loading hides; only the last step is waited for."""
    device = Device()
    clock = started(device)
    for _ in range(4):
        train(clock, device, load)
    assert (device.host, device.waits) == (4 * load, 0)
    assert taken(clock) == {**waits, "forward": 3, "backward": 4, "optimizer": 1}
    assert device.waits == 1


@pytest.mark.parametrize("lead", [0, 9])
def test_long_epochs_are_read_as_the_device_passes_them(lead) -> None:
    """However many steps there are, and however far the host is ahead, each counts once and its events are freed."""
    device = Device()
    clock = started(device)
    device.launch(8 * lead)
    for _ in range(1500):
        train(clock, device)
        device.spend(8)
    assert device.waits == 0
    assert device.events < 5000  # of some 10,000
    assert taken(clock) == {"forward": 3, "backward": 4, "optimizer": 1}
