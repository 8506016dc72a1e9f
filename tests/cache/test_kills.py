"""Processes that are killed while they fill leave samples or empty slots: no wrong sample, and no lock."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.equality import same
from tests.cache.stores import KINDS, LAYOUTS, LENGTH, NO_PLACE, SAMPLES, codec_of, disk_store, encoded, memory_store
from tests.processes import Child, ChildError, killed_at_line, wait_until

pytestmark = pytest.mark.processes

Job = Callable[[], AbstractContextManager[Any]]
"""Opens the store: one in memory that is there for the test, or the next job's on a disk."""

ALL = list(range(LENGTH))
GRANTED = 2**23  # also for what those who are killed have taken and not stored


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


def served(store: Any, layout: str) -> list[int]:
    """The indices that are served, whose samples are compared with what was stored."""
    places = store.lookup(np.array(ALL), verify=True)
    found = np.flatnonzero(places != NO_PLACE).tolist()
    for index, sample in zip(found, store.read(places[found]), strict=True):
        assert same(sample, SAMPLES[layout](index)), f"a wrong sample under {index}"
    return found


def fill_the_rest(job: Job, layout: str) -> None:
    """Store all missing samples: no slot is lost or still claimed."""
    with job() as store:
        found = served(store, layout)
        assert all(store.fill(index, SAMPLES[layout](index)) for index in ALL if index not in found)
    with job() as store:
        assert served(store, layout) == ALL


def put_killed(job: Job, layout: str, index: int, line: int) -> None:
    with job() as store:
        contents = encoded(store.codec, SAMPLES[layout](index), index)
        with killed_at_line(line, "cache"):
            assert store.put([index], [contents]) == [True]


def test_who_is_killed_at_any_line_does_no_harm(job: Job, layout: str) -> None:
    """Wherever in the code a writer dies, what was stored stays, the next writer finds the slot free, and no more room
    is lost than for the sample that was being stored."""
    index = line = taken = 0
    died = "of SIGKILL"
    while died.endswith("of SIGKILL"):
        line += 1
        try:
            Child(put_killed, job, layout, index, line).result()
            died = ""
        except ChildError as error:
            died = str(error)
        with job() as store:
            found = served(store, layout)
            if layout == "records":
                most = taken + 64 + sum(map(len, encoded(store.codec, SAMPLES[layout](index), index)))
                taken = store.layout.free - store.layout.begin
                assert taken <= most
        assert found in (ALL[:index], ALL[: index + 1])
        index = len(found)
    assert died == ""
    assert line > 20
    fill_the_rest(job, layout)


def fill_for_ever(job: Job, layout: str, begun: Path) -> None:
    with job() as store:
        begun.touch()
        while True:
            for index in random.sample(ALL, LENGTH):
                store.fill(index, SAMPLES[layout](index))
                served(store, layout)


@pytest.mark.parametrize("kills", [12, pytest.param(250, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_who_is_killed_at_any_moment_does_no_harm(job: Job, layout: str, tmp_path: Path, kills: int) -> None:
    """Whenever one of two writers is killed, again and again, what is served is right, and the rest can be stored."""
    moments = random.Random(3)

    def started(number: int) -> Child:
        writer = Child(fill_for_ever, job, layout, tmp_path / str(number))
        wait_until((tmp_path / str(number)).exists)
        return writer

    writers = [started(0), started(1)]
    for number in range(2, kills + 2):
        time.sleep(moments.random() * 0.05)
        writers.pop(0).kill()
        with job() as store:
            served(store, layout)
        writers.append(started(number))
    for writer in writers:
        writer.kill()
    fill_the_rest(job, layout)
