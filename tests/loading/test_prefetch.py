"""Jobs that are done once, by the thread or by who wants the result."""

import threading
import weakref
from collections.abc import Iterator

import pytest

from lightning_stocache.loading.prefetch import Job, Prefetcher
from tests.processes import wait_until


@pytest.fixture
def thread() -> Iterator[Prefetcher]:
    """It leaves nothing running, however often it is stopped."""
    prefetcher = Prefetcher()
    prefetcher.stop()
    yield prefetcher
    prefetcher.stop()
    prefetcher.stop()
    assert [thread for thread in threading.enumerate() if thread.name == "stocache-prefetch"] == []


def test_who_wants_a_job_that_is_under_way_waits_for_it(thread: Prefetcher) -> None:
    """The thread has begun it, and nobody else does; its result is there as often as it is wanted."""
    begun, go_on, done_by = threading.Event(), threading.Event(), list[int]()

    def work() -> str:
        done_by.append(threading.get_ident())
        begun.set()
        go_on.wait(120)
        return "done"

    job = Job(work)
    thread.offer(job)
    assert begun.wait(120)
    threading.Timer(0.05, go_on.set).start()
    assert (job.result(), job.result()) == ("done", "done")
    assert len(done_by) == 1
    assert done_by[0] != threading.get_ident()


@pytest.mark.parametrize("offered", [False, True])
def test_an_error_is_raised_where_the_result_is_wanted(thread: Prefetcher, offered: bool) -> None:
    """Also by a job that the thread has done, which goes on with the next one."""

    def fail() -> None:
        raise KeyError("no such slot")

    done = threading.Event()
    job = Job(fail)
    if offered:
        thread.offer(job)
        thread.offer(Job(done.set))
        assert done.wait(120)
    for _ in range(2):  # however often one asks
        with pytest.raises(KeyError, match="no such slot"):
            job.result()


def test_what_a_job_made_goes_with_the_job(thread: Prefetcher) -> None:
    """The thread keeps no batch alive, though it waits: its memory is needed for the next one."""

    class Batch:
        pass

    job = Job(Batch)
    thread.offer(job)
    reference = weakref.ref(job.result())
    del job
    wait_until(lambda: reference() is None)


def test_a_finalizer_may_stop_it_from_the_thread_itself(thread: Prefetcher) -> None:
    """It may run anywhere."""
    stopped = Job(thread.stop)
    thread.offer(stopped)
    stopped.result()
    wait_until(lambda: not any(other.name == "stocache-prefetch" for other in threading.enumerate()))
