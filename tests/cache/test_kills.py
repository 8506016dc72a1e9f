"""Processes that are killed while they fill leave samples or empty slots: no torn or wrong sample, and no lock."""

import fcntl
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from lightning_stocache.node import locks
from lightning_stocache.node.named import clean
from lightning_stocache.node.segment import open_descriptors
from tests.cache.stores import (
    ALL,
    ARC,
    KINDS,
    LAYOUTS,
    LENGTH,
    NO_SLOT,
    Disk,
    RollingDisk,
    append,
    append_for_ever,
    attach_rolling,
    codec_of,
    encoded,
    filled,
    infer_codec,
    memory_store,
    number_of,
    resident,
    rolling_store,
    served,
)
from tests.processes import Child, call, call_many, ends_alive, signal_at_line, wait_until

pytestmark = pytest.mark.processes

Job = Callable[[], AbstractContextManager[Any]]
"""Opens the store: one in memory that is there for the test, or the next job's on a disk."""

ROOMS = ("node", "cache")
GRANTED = 2**23  # also for what those who are killed have taken and not stored
EVERY_LINE = pytest.mark.parametrize(
    "every_line", [pytest.param(False, id="changes"), pytest.param(True, marks=pytest.mark.soak, id="all")]
)


@pytest.fixture(params=LAYOUTS)
def layout(request: Any) -> str:
    return str(request.param)


@pytest.fixture(params=KINDS)
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def job(kind: str, layout: str, tmp_path: Path) -> Iterator[Job]:
    with new_job(kind, layout, tmp_path) as job:
        yield job


@contextmanager
def new_job(kind: str, layout: str, directory: Path) -> Iterator[Job]:
    if kind == "disk":
        directory.mkdir(exist_ok=True)
        yield lambda: closing(Disk(directory, layout, GRANTED).open())
        return
    store = memory_store(codec_of(layout), GRANTED)
    yield lambda: nullcontext(store)
    store.close()


def fill_the_rest(job: Job) -> None:
    """Store all missing samples: no slot is lost or still claimed."""
    with job() as store:
        missing = [index for index in ALL if index not in served(store)]
        assert filled(store, missing) == missing
    with job() as store:
        assert served(store) == ALL


def content(files: Iterable[int]) -> bytes:
    """A digest of each byte of some files that was ever written."""
    digest = xxhash.xxh3_128()
    for file in files:
        end = 0
        with suppress(OSError):  # there is nothing more
            while True:
                begin = os.lseek(file, end, os.SEEK_DATA)
                end = os.lseek(file, begin, os.SEEK_HOLE)
                digest.update(b"%d %d " % (begin, end))
                digest.update(os.pread(file, end - begin, begin))
    return digest.digest()


def moments(*, every_line: bool) -> Callable[[], bool]:
    """Tells of a line whether it is to be killed at: all lines, or the first and each before which a file changed that
    this process has mapped. Who is killed at another line leaves the same files as who is killed at the line before."""
    seen = [b""]

    def counts() -> bool:
        before, seen[0] = seen[0], content(open_descriptors())
        return every_line or seen[0] != before

    return counts


def put_killed(job: Job, index: int, moment: int, every_line: bool) -> None:
    with job() as store:
        contents = encoded(store, index)
        with signal_at_line(moment, ROOMS, moments(every_line=every_line)):
            assert store.put([index], [contents]) == [True]


@EVERY_LINE
def test_who_is_killed_at_any_line_does_no_harm(job: Job, every_line: bool) -> None:
    """Wherever in the code a writer dies, what was stored stays, other writers find the slot free, and no more room is
    lost than for the sample that was being stored."""
    stored, taken = list[int](), 0
    for moment in itertools.count(1):
        missing = [index for index in ALL if index not in stored]
        if not missing:
            with job() as store:
                store.clear()
            stored, taken, missing = [], 0, ALL
        index = missing[moment % len(missing)]
        ended = ends_alive(put_killed, job, index, moment, every_line)
        with job() as store:
            found = served(store)
            if not store.codec.is_fixed:
                most = taken + 64 + sum(map(len, encoded(store, index)))
                taken = store.layout.free - store.layout.begin
                assert taken <= most
        assert found in (stored, sorted([*stored, index]))
        stored = found
        if ended:
            break
    assert moment > (20 if every_line else 3)
    assert stored
    fill_the_rest(job)


def opened_and_filled(disk: Disk, moment: int, every_line: bool) -> None:
    with (
        signal_at_line(moment, ROOMS, changes_in(disk.directory, every_line=every_line)),
        closing(disk.open()) as store,
    ):
        filled(store, [0])


def changes_in(directory: Path, *, every_line: bool) -> Callable[[], bool]:
    """As `moments`, of files that appear in a directory while the line runs."""
    seen = [b""]

    def counts() -> bool:
        files = sorted(str(path) for path in directory.iterdir())
        opened = [os.open(path, os.O_RDONLY) for path in files]
        before, seen[0] = seen[0], repr(files).encode() + content(opened)
        for file in opened:
            os.close(file)
        return every_line or seen[0] != before

    return counts


@EVERY_LINE
def test_who_is_killed_while_it_opens_does_no_harm(layout: str, tmp_path: Path, every_line: bool) -> None:
    """Wherever a job dies that makes a store on a disk, or joins it, the next one makes it or has its samples."""
    for stored in ([], ALL[:9]):
        for moment in itertools.count(1):
            directory = tmp_path / f"{len(stored)}-{moment}"
            directory.mkdir(0o700)
            disk = Disk(directory, layout)
            if stored:
                disk.fill(stored)
            ended = ends_alive(opened_and_filled, disk, moment, every_line)
            found = disk.served()
            assert found in (stored, sorted({*stored, 0}))
            disk.fill()
            assert disk.served() == ALL
            if ended:
                break
            shutil.rmtree(directory)
        assert moment > (20 if every_line else 1)


def put_interrupted(job: Job, index: int, moment: int, every_line: bool) -> bool:
    """Whether `put` ended before the line. Then, or when it is called again, nobody is kept from any slot."""
    with job() as store:
        contents, ended = encoded(store, index), True
        try:
            with signal_at_line(moment, ROOMS, moments(every_line=every_line), sent=signal.SIGINT):
                store.put([index], [contents])
        except KeyboardInterrupt:
            ended = False
        before = served(store)
        assert store.put([index], [contents]) == [index not in before]
        others = [other for other in ALL if other not in served(store)]
        assert call(filled, store, others) == others
        assert served(store) == ALL
        return ended


@EVERY_LINE
def test_who_is_interrupted_at_any_line_keeps_nothing_claimed(
    layout: str, kind: str, tmp_path: Path, every_line: bool
) -> None:
    """Wherever Ctrl-C strikes while a sample is stored, it can be stored again at once, and others store the rest."""
    for moment in itertools.count(1):
        with new_job(kind, layout, tmp_path / str(moment)) as job:
            if call(put_interrupted, job, moment % LENGTH, moment, every_line):
                break
    assert moment > (20 if every_line else 3)


def put_under_signals(job: Job, strikes: int) -> None:
    """Store samples, claim and release, while Ctrl-C strikes at any moment. Each time all locks are free, and the
    thread's next call stores."""
    moments, struck = random.Random(9), 0
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with job() as store, closing(store.attach(store.handle)) as other:  # as another process: it has its own locks
        while struck < strikes:
            indices = moments.sample(ALL, 8)
            contents = [encoded(store, index) for index in indices]
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 4e-4))
                    store.divide(indices)
                    store.put(indices, contents)
                    store.release(indices)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    time.sleep(1e-4)  # what another thread has got comes a moment later
            except KeyboardInterrupt:
                struck += 1
                assert locks.lock_turn(other.segment.descriptor, 0), "the turn was not ended"
                fcntl.flock(other.segment.descriptor, fcntl.LOCK_UN)
                store.release(store.divide(indices)[0])
                missing = [index for index in indices if store.ready_slot(index) == NO_SLOT]
                assert store.put(missing, [encoded(store, index) for index in missing]) == [True] * len(missing)
                rest = [index for index in ALL if store.ready_slot(index) == NO_SLOT]
                assert filled(other, rest) == rest, "a slot is still claimed"
            store.clear()
        assert filled(store) == ALL
        assert served(store) == ALL


@pytest.mark.parametrize("strikes", [40, pytest.param(3_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_who_is_interrupted_at_any_moment_keeps_nothing(job: Job, strikes: int) -> None:
    """Also by real signals, which strike between two instructions: no lock is held, and no slot stays claimed."""
    call(put_under_signals, job, strikes)


def append_killed(disk: RollingDisk, number: int, moment: int, every_line: bool) -> None:
    store = disk.open()
    with signal_at_line(moment, ROOMS, moments(every_line=every_line)):
        append(store, [number])


@EVERY_LINE
def test_who_is_killed_at_any_line_of_rolling_does_no_harm(layout: str, tmp_path: Path, every_line: bool) -> None:
    """Wherever a writer dies, the next job finds all other samples, and the next writer goes on."""
    disk = RollingDisk(tmp_path, layout)
    number = 2 * disk.samples
    with closing(disk.open()) as store:
        append(store, range(number))
        before = resident(store)
    for moment in itertools.count(1):
        ended = ends_alive(append_killed, disk, number, moment, every_line)
        with closing(disk.open()) as store:
            found = resident(store)
        assert set(found) <= {*before, number}
        assert found == list(range(found[0], found[-1] + 1))
        before, number = found, found[-1] + 1
        if ended:
            break
    assert moment > (20 if every_line else 9)
    clean()
    last = list(range(number + disk.samples // 2, number + disk.samples))
    with closing(disk.open()) as store:
        append(store, range(number, number + disk.samples))
    with closing(disk.open()) as store:
        assert resident(store)[-len(last) :] == last


def opened_and_appended(disk: RollingDisk, number: int, moment: int, every_line: bool) -> None:
    with (
        signal_at_line(moment, ROOMS, changes_in(disk.directory, every_line=every_line)),
        closing(disk.open()) as store,
    ):
        append(store, [number])


@EVERY_LINE
def test_who_is_killed_while_it_opens_rolling_does_no_harm(layout: str, tmp_path: Path, every_line: bool) -> None:
    """Wherever a job dies that opens a store that has begun at its beginning again, the next one has its samples."""
    disk = RollingDisk(tmp_path, layout)
    number = 4 * disk.samples + 3
    with closing(disk.open()) as store:
        append(store, range(number))
        before = resident(store)
    content = disk.path.read_bytes()
    for moment in itertools.count(1):
        disk.path.write_bytes(content)
        ended = ends_alive(opened_and_appended, disk, number, moment, every_line)
        with closing(disk.open()) as store:
            found = resident(store)
        assert set(found) <= {*before, number}
        assert found == list(range(found[0], found[-1] + 1))
        assert len(found) > len(before) // 2, "only the oldest leave"
        if ended:
            break
    assert moment > 4
    clean()


def put_stopped(job: Job, index: int, moment: int) -> Any:
    with job() as store:
        contents = encoded(store, index)
        with signal_at_line(moment, ROOMS, moments(every_line=False), sent=signal.SIGSTOP):
            return store.put([index], [contents])


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_who_is_stopped_while_it_stores_does_no_harm(job: Job, moment: int, stopped: Any) -> None:
    """Wherever a writer is stopped, others are served what there is, and no sample is stored twice. It may go on."""
    with job() as store:
        filled(store, ALL[:5])
    writer = stopped(put_stopped, job, 7, moment)
    with job() as store:
        assert served(store) == ALL[:5]
        stored = filled(store, ALL[5:])  # no record, while the writer has the right to take room
        assert served(store) == ALL[:5] + stored
        writer.go_on()
        assert writer.result() == [7 not in stored]
    fill_the_rest(job)


def fill_for_ever(job: Job, begun: Path) -> None:
    with job() as store:
        begun.touch()
        while True:
            filled(store, random.sample(ALL, LENGTH))
            served(store)


@pytest.mark.parametrize("kills", [6, pytest.param(250, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
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


# ---- torn samples ----

BIG = 1 << 16


def write_and_read(store: Any, mark: int) -> int:
    """Fill every slot with a mark and look at what is found; how many samples had words of several marks."""
    mine, torn = torch.full((BIG,), mark, dtype=torch.uint8), 0
    for index in range(ARC.size):
        store.fill(index, mine)
        place = store.ready_slot(index)
        for found in store.read(np.array([place])) if place != NO_SLOT else ():
            torn += int(found.min()) != int(found.max())
    return torn


@pytest.mark.parametrize("rounds", [5, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_writers_never_tear_a_sample(layout: str, rounds: int) -> None:
    """Processes that store different bytes into the same slot at the same time: one wins, and all see it whole."""
    codec = infer_codec(layout, [torch.zeros(BIG, dtype=torch.uint8)])
    for _ in range(rounds):
        store = memory_store(codec, 64 * BIG)
        assert call_many(write_and_read, [(store, mark) for mark in (1, 2, 3)]) == [0, 0, 0]
        assert store.filled == ARC.size
        store.close()


def look(handle: Any, over: Path, seed: int) -> int:
    """Read batches of random places, each word of them; how many samples were read."""
    store, random_places, read = attach_rolling(handle), np.random.default_rng(seed), 0
    while store.filled < 3:
        time.sleep(0.01)
    while read <= 50 or not over.exists():
        places = random_places.integers(0, max(min(store.capacity, store.filled), 1), 16)
        read += len([number_of(each) for each in store.read(places)])
    return read


@pytest.mark.parametrize("kills", [8, pytest.param(4000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_reader_sees_a_torn_sample(tmp_path: Path, layout: str, kills: int) -> None:
    """Two readers look at every word of what two writers write, who are killed again and again at random moments."""
    moments, store, over = random.Random(7), rolling_store(codec_of(layout), 12), tmp_path / "over"
    readers = [Child(look, store.handle, over, 7 + number) for number in range(2)]
    writers = [Child(append_for_ever, store.handle, 1_000_000 * number) for number in (1, 2)]
    killed = 0
    try:
        while killed < kills or store.evicted <= 100:
            time.sleep(moments.uniform(0.0, 0.2))
            number = moments.randrange(2)
            writers[number].kill()
            killed += 1
            writers[number] = Child(append_for_ever, store.handle, 1_000_000 * (2 + killed))
        over.touch()
        found = [reader.result() for reader in readers]
    finally:
        for writer in writers:
            writer.kill()
    assert min(found) > 50
    append(store, range(200))
    last = resident(store)
    assert last == list(range(200 - len(last), 200))
    assert len(last) == store.capacity
    store.close()
