"""The clock of steps: every moment belongs to the innermost part, and a device is not waited for."""

from __future__ import annotations

import pytest
import torch

from lightning_stocache.insight.breakdown import PARTS, Breakdown
from lightning_stocache.insight.step_clock import StepClock
from lightning_stocache.insight.timeline import timeline_of
from tests.insight.devices import Device, ManualTimeline


def seconds_of(epoch: Breakdown) -> dict[str, float]:
    return {part: round(seconds, 9) for part, seconds in epoch.seconds.items() if seconds}


def test_parts_in_each_other_count_once() -> None:
    """The optimiser's step has forward and backward in it, as in Lightning; its own is what is left."""
    time = ManualTimeline()
    clock = StepClock(timeline=time)
    with clock("wait"):
        time.spend(1)
    with clock("optimizer"):
        time.spend(2)
        with clock("forward"):
            time.spend(4)
        time.spend(8)
        with clock("backward"):
            time.spend(16)
    time.spend(32)
    clock.end_step()
    clock.pause()
    [epoch] = clock.epochs
    assert seconds_of(epoch) == {"wait": 1, "optimizer": 10, "forward": 4, "backward": 16, "rest": 32}


def test_a_step_lasts_until_the_next_one() -> None:
    """What comes after `end_step` is its rest; after `pause` nothing counts until `resume`."""
    time = ManualTimeline()
    clock = StepClock(timeline=time)
    for wait in (1, 2):
        with clock("wait"):
            time.spend(wait)
        clock.end_step()
        time.spend(10)
    assert clock.take() == {part: {"wait": 1.0, "rest": 10.0}.get(part, 0.0) for part in PARTS}
    clock.pause()
    with clock("transfer"):
        time.spend(100)
    clock.resume()
    time.spend(100)
    with clock("wait"):
        time.spend(4)
    clock.end_step()
    clock.pause()
    [epoch] = clock.epochs
    assert epoch.steps == 3
    assert seconds_of(epoch) == {"wait": 7, "rest": 10}


def test_an_epoch_begins_with_waiting() -> None:
    """Workers that start with an epoch are waited for, before anybody asks them for a batch."""
    time = ManualTimeline()
    clock = StepClock(timeline=time)
    for _ in range(2):
        clock.begin_epoch()
        time.spend(5)
        with clock("wait"):
            time.spend(1)
        clock.end_step(samples=4)
    clock.pause()
    assert [(epoch.steps, epoch.samples, seconds_of(epoch)) for epoch in clock.epochs] == [(1, 4, {"wait": 6})] * 2


def test_a_loop_of_ones_own() -> None:
    """The batches come through, waiting is timed, and what the body does not name is the rest."""
    time = ManualTimeline()
    clock = StepClock(timeline=time)

    def loader():
        for batch in range(3):
            time.spend(0.5)
            yield batch
        time.spend(7)  # after the last batch there is no step

    seen = []
    for batch in clock.steps(loader(), batch_size=2):
        with clock("forward"):
            time.spend(1)
        time.spend(2)
        seen.append(batch)
    assert seen == [0, 1, 2]
    [epoch] = clock.epochs
    assert (epoch.steps, epoch.samples) == (3, 6)
    assert seconds_of(epoch) == {"wait": 1.5, "forward": 3, "rest": 6}


def test_a_loop_that_is_left_has_the_steps_that_it_had() -> None:
    """By break or by an exception: the step that was not finished is not counted, and the next epoch is sound."""
    time = ManualTimeline()
    clock = StepClock(timeline=time)
    for batch in clock.steps(range(5)):
        time.spend(1)
        if batch == 2:
            break

    def breaks() -> None:
        for _ in clock.steps(range(5)):
            with clock("forward"):
                raise KeyError

    with pytest.raises(KeyError):
        breaks()
    for _ in clock.steps(range(2)):
        with clock("forward"):
            time.spend(1)
    assert [(epoch.steps, seconds_of(epoch)) for epoch in clock.epochs] == [(2, {"rest": 2}), (2, {"forward": 2})]


def test_ends_without_beginnings_do_not_count() -> None:
    """A clock that starts in the middle of a step hears the end of what it has not heard begin."""
    clock = StepClock(timeline=ManualTimeline())
    clock.stop("forward")
    clock.end_step()
    clock.pause()
    assert clock.epochs == []
    assert clock.take() == {}


def test_a_part_is_one_of_six() -> None:
    """A part of another name, and the rest, which is what is left, are refused."""
    for part in ("fwd", "rest"):
        with pytest.raises(ValueError, match=f"wait, transfer, forward, backward, optimizer, got '{part}'"):
            StepClock()(part)


def train(clock: StepClock, device: Device, steps: int, load: float = 0.0) -> None:
    """Steps that launch 3 + 4 + 1 seconds of work, which takes the host no time; loading does."""
    for _ in range(steps):
        with clock("wait"):
            device.spend(load)
        with clock("optimizer"):
            with clock("forward"):
                device.launch(3)
            with clock("backward"):
                device.launch(4)
            device.launch(1)
        clock.end_step()


def test_a_device_has_the_time_of_what_was_launched() -> None:
    """The host is far ahead of it; the parts are the device's all the same, and it does not wait for data."""
    device = Device()
    clock = StepClock(timeline=device.timeline)
    train(clock, device, 5)
    clock.pause()
    assert device.host == 0
    assert clock.take() == {}  # nothing has been done yet, and nobody waits for it
    assert device.waits == 0
    [epoch] = clock.epochs
    assert device.waits == 1  # for the last step
    assert epoch.steps == 5
    assert seconds_of(epoch) == {"forward": 15, "backward": 20, "optimizer": 5}


def test_waiting_is_the_time_in_which_the_device_stands_still() -> None:
    """Loading takes 10 of which 8 are hidden behind what was launched before; of the first nothing is."""
    device = Device()
    clock = StepClock(timeline=device.timeline)
    train(clock, device, 4, load=10)
    clock.pause()
    [epoch] = clock.epochs
    assert seconds_of(epoch) == {"wait": 10 + 3 * 2, "forward": 12, "backward": 16, "optimizer": 4}


def test_steps_are_read_when_the_device_has_done_them() -> None:
    """A value that is logged is of the steps that are done; the others are in the next one. Events are used again."""
    device = Device()
    clock = StepClock(timeline=device.timeline)
    train(clock, device, 2)
    device.spend(9)  # the first step is done, and one second of the second
    train(clock, device, 1)
    assert clock.take()["forward"] == 3
    made = device.made
    for _ in range(150):
        device.spend(100)
        train(clock, device, 1)
    assert device.waits == 0
    assert device.made <= made + 64 * 10  # those of the steps that are read at a time
    clock.pause()
    assert sum(epoch.steps for epoch in clock.epochs) == 153


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device() -> None:
    """Work that is launched and not waited for counts where it was launched, within the time of the whole."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    matrix = torch.ones(4096, 4096, device="cuda")
    clock = StepClock("cuda")
    matrix @ matrix  # what is made for the first time takes longer
    torch.cuda.synchronize()
    begin.record()
    for _ in clock.steps(range(20)):
        with clock("forward"):
            matrix @ matrix
        with clock("backward"):
            for _ in range(4):
                matrix @ matrix
    end.record()
    [epoch] = clock.epochs
    torch.cuda.synchronize()
    assert epoch.steps == 20
    assert epoch.seconds["backward"] > 2 * epoch.seconds["forward"] > 0
    assert epoch.total <= begin.elapsed_time(end) / 1000


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one() -> None:
    """A loop on cuda:1 whose current device is cuda:0 is timed on cuda:1."""
    timeline = timeline_of("cuda:1")
    begin = timeline.now()
    torch.ones(4096, 4096, device="cuda:1") @ torch.ones(4096, 4096, device="cuda:1")
    end = timeline.now()
    timeline.wait(end)
    assert timeline.seconds([[begin, end]]).item() > 0
