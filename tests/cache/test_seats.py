"""A process has one seat for life, and a claim ends with it."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_stocache.cache import seats as seats_module
from lightning_stocache.cache.head import ONCE
from lightning_stocache.cache.layout_rows import Rows
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.seats import EMPTY, READY, Seats
from lightning_stocache.node import segment as segment_module
from lightning_stocache.node.segment import Segment
from tests.odds import stop
from tests.processes import Child, call, hanging, wait_until

SLOTS = 64
ALL = list(range(SLOTS))


@pytest.fixture
def layout() -> Iterator[Rows]:
    codec = SampleSpec.infer(1)
    segment = Segment.create(Rows.bytes_for(codec, SLOTS))
    segment.reserve(0, segment.size)
    layout = Rows(segment, codec, SLOTS, ONCE)
    layout.segment = segment  # type: ignore[attr-defined]
    yield layout
    layout.close()
    segment.close()


def seats_of(layout: Any) -> Seats:
    return Seats(layout.segment, layout.states, layout.lives, layout.changes)


def wait_until_taken(layout: Any, slots: list[int]) -> list[int]:
    """Try every few milliseconds, as who stores does, until a claim is got."""
    taken: list[int] = []
    wait_until(lambda: bool(taken.extend(seats_of(layout).take(slots)) or taken))
    return taken


@pytest.mark.processes
def test_a_claim_lasts_as_long_as_its_process(layout: Any, stopped: Any) -> None:
    """No other process takes it, be its process busy or stopped; when that has ended, the slots are free."""

    def claim() -> None:
        seats_of(layout).take([1, 2])
        stop()

    holder = stopped(claim)
    assert seats_of(layout).take(ALL) == [slot for slot in ALL if slot not in (1, 2)]
    time.sleep(0.02)
    assert seats_of(layout).take([1, 2]) == []
    holder.kill()
    assert wait_until_taken(layout, [1, 2]) == [1, 2]


@pytest.mark.processes
def test_a_claim_of_an_earlier_life_is_void_at_once(layout: Any, monkeypatch: Any) -> None:
    """Who takes the seat of a dead process has none of its claims, and nobody waits for them."""
    monkeypatch.setattr(seats_module, "os", SimpleNamespace(getpid=lambda: 3))  # all try the same seat first
    with hanging(seats_of(layout).take, [5]) as holder:
        assert not seats_of(layout).is_mine(5)
    assert holder.process.exitcode != 0
    first = call(lambda: (seats_of(layout).take([6]), layout.states[6])[1])
    with hanging(seats_of(layout).take, [7]):
        assert int(layout.states[7]) == first + (1 << 2), "the seat is taken again, with the next life"
        assert seats_of(layout).take([6, 7]) == [6]


@pytest.mark.processes
def test_what_was_free_before_the_turn_is_compared_under_it(layout: Any, monkeypatch: Any) -> None:
    """Another process claims a slot between the look and the turn, and stores another: neither is claimed here."""

    def act() -> None:
        seats_of(layout).take([1, 2])
        layout.states[2] = READY

    in_turn = Segment.in_turn

    def late(segment: Segment, *args: Any) -> Any:
        monkeypatch.setattr(Segment, "in_turn", in_turn)
        other.enter_context(hanging(act))
        return in_turn(segment, *args)

    with ExitStack() as other:
        monkeypatch.setattr(Segment, "in_turn", late)
        assert seats_of(layout).take([1, 2, 3]) == [3]


def test_a_stored_slot_is_not_claimed_and_stays(layout: Any) -> None:
    """Only who asks for stored slots gets them; releasing empties what was claimed and not stored."""
    seats = seats_of(layout)
    assert seats.take([1, 2]) == [1, 2]
    layout.states[1] = READY
    seats.release([1, 2, 3])
    assert layout.state[:4].tolist() == [EMPTY, READY, EMPTY, EMPTY]
    assert seats.take([1, 2]) == [2]
    assert seats.take([1], READY) == [1]
    seats.release([1, 2])
    assert layout.state.tolist() == [EMPTY] * SLOTS


def test_a_word_that_no_process_has_written_is_free(layout: Any) -> None:
    """What has damaged it has not stored a sample."""
    layout.state[:4] = [5, 1, 0x7FFFFFFF, 0x80000000 | 3 << 20 | 9]
    assert seats_of(layout).take([0, 1, 2, 3]) == [0, 1, 2, 3]


@pytest.mark.processes
def test_threads_and_forks_keep_to_their_own_claims(layout: Any) -> None:
    """All threads of a process write the same claim: none takes or releases another's. Nor does a forked child."""
    seats, found = seats_of(layout), list[Any]()
    assert seats.take([3]) == [3]

    def other() -> None:
        found.append((seats.is_mine(3), seats.take([3, 4])))
        seats.release([3, 4])

    for run in (threading.Thread(target=other), Child(other)):
        if isinstance(run, Child):
            run.result()
        else:
            run.start()
            run.join()
    assert found == [(False, [4])]
    assert seats.is_mine(3)
    assert call(seats.take, [3, 4]) == [4]


@pytest.mark.processes
def test_nobody_waits_for_ever_for_who_is_stopped_with_the_turn(layout: Any, stopped: Any, monkeypatch: Any) -> None:
    """Who has waited once tries once a call, until the turn is got. Its holder may go on."""
    monkeypatch.setattr(segment_module, "_PATIENCE", 0.05)

    def claim() -> list[int]:
        lives = np.zeros(seats_module.SEATS, np.uint32)

        class Stopping:
            """Stops where a life is written, which is under the turn."""

            def __getitem__(self, seat: int) -> int:
                stop()
                return int(lives[seat])

            __setitem__ = lives.__setitem__

        return Seats(layout.segment, layout.states, Stopping(), layout.changes).take([1])  # type: ignore[arg-type]

    holder = stopped(claim)
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", lambda seconds, plain=time.sleep: (pauses.append(seconds), plain(seconds)))
    assert seats_of(layout).take([1, 2]) == []
    assert pauses
    pauses.clear()
    assert seats_of(layout).take([1, 2]) == []
    assert pauses == []
    holder.go_on()
    assert holder.result() == [1]
    assert wait_until_taken(layout, [2]) == [2]


@pytest.mark.processes
def test_one_process_more_than_there_are_seats_stores_nothing(layout: Any, monkeypatch: Any, caplog: Any) -> None:
    """It says so once, and waits for nobody."""
    monkeypatch.setattr(seats_module, "SEATS", 1)
    with hanging(seats_of(layout).take, [1]):
        assert seats_of(layout).take([2]) == seats_of(layout).take([3]) == []
    assert len(caplog.records) == 1
