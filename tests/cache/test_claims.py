"""One thread of one process has a slot at a time."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_stocache.cache.claims import Claims
from lightning_stocache.node.segment import Segment
from tests.processes import Child, wait_until


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


def wait_for_claim(segment: Segment) -> None:
    with Claims(segment).waiting(3):
        pass


@pytest.mark.processes
def test_a_claim_excludes_other_threads(segment: Segment) -> None:
    """Locks do not tell threads apart; claims do, also in a child that was forked meanwhile."""
    seen: list[Any] = []

    def wait() -> None:
        seen.extend(can_claim(segment, 3) for _ in range(3))
        with Claims(segment).waiting(3):
            seen.append("waited")

    def fork() -> None:
        children.append(Child(wait_for_claim, segment))

    children = list[Child]()
    threads = [threading.Thread(target=target) for target in (wait, fork)]
    with Claims(segment).waiting(3):
        for thread in threads:
            thread.start()
        wait_until(lambda: len(seen) >= 3 and bool(children))
        threads[0].join(0.05)
        seen.append("released")
    for thread in threads:
        thread.join()
    children[0].result()
    assert seen == [False, False, False, "released", "waited"]
    assert can_claim(segment, 3)


def test_nobody_waits_for_a_lock_that_no_process_gets(segment: Segment) -> None:
    """Where a system has no locks between processes, a claim that would be waited for is an error."""
    segment.has_locks = False
    assert not can_claim(segment, 3)
    with pytest.raises(OSError, match="no locks between processes"), Claims(segment).waiting(3):
        pass
