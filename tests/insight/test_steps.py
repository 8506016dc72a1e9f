"""The clock of steps: every moment belongs to the innermost part, and a device is waited for by `take` alone."""

import time

import pytest
import torch

from lightning_stocache.insight.steps import StepClock, cuda_moment
from tests.insight.devices import Device, ManualClock, part


def started(clock: ManualClock | Device) -> StepClock:
    """A clock that runs on the time of a test."""
    made = StepClock(clock.moment)
    made.resume()
    return made


def taken(clock: StepClock) -> dict[str, float]:
    """Mean seconds of the parts that took time."""
    return {part: round(seconds, 9) for part, seconds in clock.take().items() if seconds}


def test_parts_in_each_other_count_once() -> None:
    """Forward and backward lie inside of the optimiser's step, as in Lightning, and do not count as its time."""
    time = ManualClock()
    clock = started(time)
    with part(clock, "wait"):
        time.spend(1)
    with part(clock, "optimizer"):
        time.spend(2)
        with part(clock, "forward"):
            time.spend(4)
        time.spend(8)
        with part(clock, "backward"):
            time.spend(16)
    time.spend(32)
    clock.end_step()
    assert clock.take() == {"wait": 1, "transfer": 0, "forward": 4, "backward": 16, "optimizer": 10, "rest": 32}
    assert clock.take() == {}


def test_a_step_lasts_until_the_next_one() -> None:
    """What comes after `end_step` is its rest; after `pause` nothing counts until a part begins after `resume`."""
    time = ManualClock()
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


def test_a_step_that_has_not_ended_is_dropped() -> None:
    """After a break or an exception the steps before it count, and the next epoch is sound."""
    time = ManualClock()
    clock = started(time)
    for ended in (True, False):
        clock.start("forward")
        time.spend(1)
        if ended:
            clock.end_step()
    clock.pause()
    clock.resume("wait")
    time.spend(3)
    clock.end_step()
    assert taken(clock) == {"wait": 1.5, "forward": 0.5}


def test_ends_without_beginnings_do_not_count() -> None:
    """A clock that starts in the middle of a step hears the end of a part that it has not heard begin."""
    clock = StepClock(ManualClock().moment)
    clock.stop("forward")
    clock.end_step()
    clock.pause()
    assert clock.take() == {}


def train(clock: StepClock, device: Device, steps: int, load: float = 0.0) -> None:
    """Steps that launch 3 + 4 + 1 seconds of work, which takes the host no time; loading does."""
    for _ in range(steps):
        with part(clock, "wait"):
            device.spend(load)
        with part(clock, "optimizer"):
            with part(clock, "forward"):
                device.launch(3)
            with part(clock, "backward"):
                device.launch(4)
            device.launch(1)
        clock.end_step()


def test_a_device_has_the_time_of_what_was_launched() -> None:
    """Although the host is far ahead, the parts have the time of the device, which does not wait for data."""
    device = Device()
    clock = started(device)
    train(clock, device, 5)
    assert (device.host, device.waits) == (0, 0)
    assert taken(clock) == {"forward": 3, "backward": 4, "optimizer": 1}
    assert device.waits == 1  # for the last step


def test_waiting_is_the_time_in_which_the_device_stands_still() -> None:
    """Loading takes 10 s. The work of the step before hides 8 s of it, except in the first step."""
    device = Device()
    clock = started(device)
    train(clock, device, 4, load=10)
    assert taken(clock) == {"wait": (10 + 3 * 2) / 4, "forward": 3, "backward": 4, "optimizer": 1}


@pytest.mark.parametrize("lead", [0, 9])
def test_long_epochs_are_read_as_the_device_passes_them(lead) -> None:
    """However many steps there are, and however far the host is ahead, each counts once."""
    device = Device()
    clock = started(device)
    device.launch(8 * lead)
    for _ in range(1500):
        train(clock, device, 1)
        device.spend(8)
    assert device.waits == 0
    assert device.read > 5000  # of some 10,000
    assert taken(clock) == {"forward": 3, "backward": 4, "optimizer": 1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device() -> None:
    """Work that is launched and not waited for counts where it was launched, within the time of the whole."""
    matrix = torch.ones(4096, 4096, device="cuda")
    clock = StepClock(cuda_moment)
    matrix @ matrix  # what is made for the first time takes longer
    torch.cuda.synchronize()
    begin = time.perf_counter()
    clock.resume("wait")
    for _ in range(20):
        with part(clock, "forward"):
            matrix @ matrix
        with part(clock, "backward"):
            for _ in range(4):
                matrix @ matrix
        clock.end_step()
    means = clock.take()
    assert means["backward"] > 2 * means["forward"] > 0
    assert 20 * sum(means.values()) <= time.perf_counter() - begin
