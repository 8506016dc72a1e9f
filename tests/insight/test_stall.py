"""The clock of waiting and computing."""

from __future__ import annotations

from lightning_stocache.insight.stall import Seconds, Stall

WAIT, COMPUTE = "[_TrainingEpochLoop].train_dataloader_next", "run_training_batch"


def step(stall: Stall, asked: float, came: float, begun: float, done: float, ended: float) -> None:
    stall.start(WAIT, asked)
    stall.stop(WAIT, came)
    stall.start(COMPUTE, begun)
    stall.stop(COMPUTE, done)
    stall.end(ended)


def test_waiting_computing_and_the_rest_are_told_apart() -> None:
    """What is neither, between and after them, is in the loop alone."""
    stall = Stall()
    stall.resume(0)
    step(stall, 0.5, 1, 1.25, 3, 3.5)
    step(stall, 3.5, 4, 4, 8, 8)
    assert stall.peek() == Seconds(1, 5.75, 8)
    assert stall.take() == Seconds(1, 5.75, 8)
    assert stall.peek() == Seconds(0, 0, 0)


def test_what_is_no_step_is_not_in_the_loop() -> None:
    """Validation between two steps is not counted."""
    stall = Stall()
    stall.resume(0)
    step(stall, 0, 1, 1, 2, 2)
    stall.resume(50)
    step(stall, 50, 51, 51, 52, 52)
    assert stall.take() == Seconds(2, 2, 4)


def test_other_actions_and_halves_of_one_do_not_count() -> None:
    """A clock that starts in the middle hears the end of what it has not heard begin; and of much else."""
    stall = Stall()
    stall.stop(WAIT, 5)
    stall.start("[Callback]Other.on_train_batch_end", 5)
    stall.stop("[Callback]Other.on_train_batch_end", 6)
    stall.end(7)
    assert stall.peek() == Seconds(0, 0, 0)
