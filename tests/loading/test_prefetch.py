"""Jobs that are done once, by the thread or by who wants the result."""

from __future__ import annotations

import threading
import time
import weakref

import pytest

from lightning_stocache.loading.prefetch import Job, Prefetcher


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stocache-prefetch"]


def test_a_job_that_nobody_has_begun_is_done_by_who_wants_it():
    """Without a thread, or before it gets there, the consumer does the work itself."""
    assert Job(threading.get_ident).result() == threading.get_ident()


def test_an_offered_job_is_done_by_the_thread_while_the_consumer_does_something_else():
    """Its result is there when it is wanted, and it is done once."""
    ahead, done = Prefetcher(), threading.Event()
    times: list[int] = []

    def work() -> int:
        times.append(1)
        done.set()
        return threading.get_ident()

    job = Job(work)
    ahead.offer(job)
    assert done.wait(120)
    assert job.result() != threading.get_ident()
    assert times == [1]
    ahead.stop()
    assert threads() == []


def test_who_wants_a_job_that_is_under_way_waits_for_it():
    """It is not begun a second time."""
    ahead, begun, go_on = Prefetcher(), threading.Event(), threading.Event()
    times: list[int] = []

    def work() -> str:
        times.append(1)
        begun.set()
        go_on.wait(120)
        return "done"

    job = Job(work)
    ahead.offer(job)
    assert begun.wait(120)
    threading.Timer(0.05, go_on.set).start()
    assert job.result() == "done"
    assert times == [1]
    ahead.stop()


@pytest.mark.parametrize("offered", [False, True])
def test_an_error_is_raised_where_the_result_is_wanted(offered):
    """Also by a job that the thread has done, which goes on with the next one."""

    def fail() -> None:
        raise KeyError("no such slot")

    ahead, done = Prefetcher(), threading.Event()
    job, other = Job(fail), Job(done.set)
    if offered:
        ahead.offer(job)
        ahead.offer(other)
        assert done.wait(120)
    for _ in range(2):  # whoever asks, and how often
        with pytest.raises(KeyError, match="no such slot"):
            job.result()
    ahead.stop()


def test_what_a_job_made_goes_with_the_job():
    """The thread keeps no batch alive, though it waits: its memory is needed for the next one."""

    class Batch:
        pass

    ahead, job = Prefetcher(), Job(Batch)
    ahead.offer(job)
    reference = weakref.ref(job.result())
    assert job.result() is reference()
    del job
    deadline = time.monotonic() + 120
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.001)  # the thread is about to let it go
    assert reference() is None
    ahead.stop()


def test_stopping_ends_the_thread_and_may_be_done_twice_or_from_the_thread_itself():
    """A finalizer may run anywhere."""
    ahead = Prefetcher()
    ahead.stop()
    stopped = Job(ahead.stop)
    ahead.offer(stopped)
    [thread] = threads()
    stopped.result()
    thread.join(120)
    ahead.stop()
    assert threads() == []
