"""One process, and one thread of it, has a slot or a turn to load at a time; death gives it back."""

import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.cache import store as store_module
from lightning_stocache.cache.claims import Claims
from lightning_stocache.node.segment import Segment
from tests.cache.stores import Disk
from tests.processes import call, hanging, wait_until


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(4096)
    segment.reserve(0, 8)
    yield segment
    segment.close()


def can_claim(segment: Segment, slot: int) -> bool:
    claims = Claims(segment)
    if is_mine := claims.take(slot):
        claims.release(slot)
    return is_mine


def test_a_claim_excludes_other_threads(segment: Segment) -> None:
    """POSIX locks do not tell threads apart; claims do. A thread that failed to claim a slot can claim it later, and
    a thread that waits gets it then."""
    seen: list[Any] = []

    def wait() -> None:
        seen.extend(can_claim(segment, 3) for _ in range(3))
        with Claims(segment).waiting(3):
            seen.append("waited")

    thread = threading.Thread(target=wait)
    with Claims(segment).waiting(3):
        thread.start()
        wait_until(lambda: len(seen) >= 3)
        thread.join(0.05)
        seen.append("released")
    thread.join()
    assert seen == [False, False, False, "released", "waited"]
    assert can_claim(segment, 3)


@pytest.mark.processes
def test_a_child_forked_during_a_claim_of_another_thread_waits_for_nobody(segment: Segment) -> None:
    """The thread that held the slot does not exist in the child; once the parent is done the child gets the slot."""
    claimed, done = threading.Event(), threading.Event()

    def fill() -> None:
        with Claims(segment).waiting(3):
            claimed.set()
            done.wait()

    def fork_and_wait() -> None:
        with Claims(segment).waiting(3):
            pass

    thread = threading.Thread(target=fill)
    thread.start()
    claimed.wait()
    release = threading.Timer(0.05, done.set)
    release.start()
    call(fork_and_wait)
    thread.join()
    release.join()


def test_what_is_no_deadlock_is_waited_for(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread waits for a process that waits for another thread: the kernel refuses, and the thread tries again. Any
    other error is raised, and the slot is free."""
    refusals = [errno.EDEADLK, errno.EDEADLK, errno.ENOLCK]
    lock = segment.lock

    def refuse(slot: int, *, wait: bool) -> bool:
        if refusals:
            raise OSError(refusals.pop(), "refused")
        return lock(slot, wait=wait)

    monkeypatch.setattr(segment, "lock", refuse)
    with pytest.raises(OSError, match="refused"):
        Claims(segment).take(3)
    with Claims(segment).waiting(3):
        assert not refusals
    assert can_claim(segment, 3)


# ---- whose turn it is to load ----


def load(folder: Path) -> Any:
    store = Disk(folder, "rows").open()
    assert store.divide([3, 4]) == ([3, 4], [])
    return store


@pytest.mark.processes
def test_what_another_process_loads_is_waited_for_but_not_for_ever(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """A stopped process is waited for once. When it has ended, its samples are free."""
    monkeypatch.setattr(store_module, "PATIENCE", 0.2)
    with hanging(load, tmp_path), caplog.at_level(logging.WARNING):
        store = Disk(tmp_path, "rows").open()
        assert store.divide([2, 3, 4, 5]) == ([2, 5], [3, 4])
        assert not store.wait(3)
        assert not store.wait(4)
    assert len(caplog.records) == 1, "who has waited in vain does not wait again"
    assert store.divide([3, 4]) == ([3, 4], [])
    store.release([2, 3, 4, 5])
    store.close()
