"""Processes that are killed while they fill leave samples or empty slots: no wrong sample, and no lock."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.cache.stores import (
    ALL,
    KINDS,
    LAYOUTS,
    LENGTH,
    codec_of,
    disk_store,
    encoded,
    filled,
    gathers,
    memory_store,
    resident,
    rolling_disk_store,
    sample,
    served,
)
from tests.processes import Child, ends_alive, killed_at_line, wait_until

pytestmark = pytest.mark.processes

Job = Callable[[], AbstractContextManager[Any]]
"""Opens the store: one in memory that is there for the test, or the next job's on a disk."""

GRANTED = 2**23  # also for what those who are killed have taken and not stored
ROLLING = 24  # samples of a rolling store


@pytest.fixture(params=LAYOUTS)
def layout(request: Any) -> str:
    return str(request.param)


@pytest.fixture(params=KINDS)
def job(request: Any, layout: str, tmp_path: Path) -> Iterator[Job]:
    codec = codec_of(layout)
    if request.param == "disk":
        yield lambda: closing(disk_store(codec, tmp_path, GRANTED))
        return
    store = memory_store(codec, GRANTED)
    yield lambda: nullcontext(store)
    store.close()


def fill_the_rest(job: Job) -> None:
    """Store all missing samples: no slot is lost or still claimed."""
    with job() as store:
        missing = [index for index in ALL if index not in served(store)]
        assert filled(store, missing) == missing
    with job() as store:
        assert served(store) == ALL


def put_killed(job: Job, index: int, line: int) -> None:
    with job() as store:
        contents = encoded(store, index)
        with killed_at_line(line, "cache"):
            assert store.put([index], [contents]) == [True]


def test_who_is_killed_at_any_line_does_no_harm(job: Job) -> None:
    """Wherever in the code a writer dies, what was stored stays, the next writer finds the slot free, and no more room
    is lost than for the sample that was being stored."""
    index = taken = 0
    for line in itertools.count(1):
        ended = ends_alive(put_killed, job, index, line)
        with job() as store:
            found = served(store)
            if not gathers(store):
                most = taken + 64 + sum(map(len, encoded(store, index)))
                taken = store.layout.free - store.layout.begin
                assert taken <= most
        assert found in (ALL[:index], ALL[: index + 1])
        index = len(found)
        if ended:
            break
    assert line > 20
    fill_the_rest(job)


def append_killed(job: Job, layout: str, number: int, line: int) -> None:
    with job() as store, killed_at_line(line, "cache"):
        assert store.append(sample(layout, number), number)


def test_who_is_killed_at_any_line_of_rolling_does_no_harm(layout: str, tmp_path: Path) -> None:
    """Wherever a writer dies, the next job finds all other samples, and the next writer goes on."""
    codec = codec_of(layout)

    def job() -> AbstractContextManager[Any]:
        return closing(rolling_disk_store(codec, ROLLING, tmp_path))

    def append(numbers: range) -> None:
        with job() as store:
            assert all(store.append(sample(layout, number), number) for number in numbers)

    append(range(2 * ROLLING))
    with job() as store:
        before = resident(store)
    number = 2 * ROLLING
    for line in itertools.count(1):
        ended = ends_alive(append_killed, job, layout, number, line)
        with job() as store:
            found = resident(store)
        assert set(found) <= {*before, number}
        assert found == list(range(found[0], found[-1] + 1))
        before, number = found, found[-1] + 1
        if ended:
            break
    assert line > 20
    append(range(number, number + ROLLING))
    with job() as store:
        last = list(range(number + ROLLING - ROLLING // 2, number + ROLLING))
        assert resident(store)[-len(last) :] == last


def fill_for_ever(job: Job, begun: Path) -> None:
    with job() as store:
        begun.touch()
        while True:
            filled(store, random.sample(ALL, LENGTH))
            served(store)


@pytest.mark.parametrize("kills", [12, pytest.param(250, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_who_is_killed_at_any_moment_does_no_harm(job: Job, tmp_path: Path, kills: int) -> None:
    """Whenever one of two writers is killed, again and again, what is served is right, and the rest can be stored."""
    moments = random.Random(3)

    def started(number: int) -> Child:
        writer = Child(fill_for_ever, job, tmp_path / str(number))
        wait_until((tmp_path / str(number)).exists)
        return writer

    writers = [started(0), started(1)]
    for number in range(2, kills + 2):
        time.sleep(moments.random() * 0.05)
        writers.pop(0).kill()
        with job() as store:
            served(store)
        writers.append(started(number))
    for writer in writers:
        writer.kill()
    fill_the_rest(job)
