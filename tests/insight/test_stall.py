"""The clock of waiting and computing."""

from lightning_stocache.insight.stall import Stall


def test_waiting_and_computing_are_told_apart():
    """What lies between two steps is waiting, what lies in them is computing."""
    stall = Stall()
    stall.resume(0)
    for begin, end in ((1, 3), (4, 8)):
        stall.begin(begin)
        stall.end(end)
    assert stall.peek() == (2, 6)
    assert stall.take() == (2, 6)
    assert stall.peek() == (0, 0)


def test_what_is_no_step_is_not_counted():
    """Validation between two steps is neither waiting nor computing."""
    stall = Stall()
    stall.resume(0)
    stall.begin(1)
    stall.end(2)
    stall.resume(50)
    stall.begin(51)
    stall.end(52)
    assert stall.take() == (2, 2)


def test_a_step_whose_beginning_was_not_seen_is_not_counted():
    """A clock that starts in the middle of a step counts from the step's end on."""
    stall = Stall()
    stall.end(5)
    stall.begin(7)
    assert stall.peek() == (2, 0)
