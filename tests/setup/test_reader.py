"""The process of set-up reads what the trainer has opened without moving, taking or waiting for anything of it."""

import gzip
import io
import logging
import mmap
import multiprocessing
import os
import queue
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_stocache import CachedDataset, CachedStream
from lightning_stocache.node import isolation
from lightning_stocache.setup.find import Finding, SourceReader
from lightning_stocache.setup.reader import Reader, Subject, UnsharedError
from lightning_stocache.setup.request import CacheRequest, LoaderSettings
from tests.processes import call, is_alive, wait_until
from tests.sources import Made

pytestmark = pytest.mark.processes

LENGTH = 12
BYTES = 300


def record(index: int) -> bytes:
    return bytes([index + 1]) * BYTES


def tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def look(source: Any, workers: int = 0, method: str | None = None, **options: Any) -> Finding:
    """What set-up finds for a loader with so many workers."""
    loader = LoaderSettings(4, workers, start_method=method)
    with closing(SourceReader(CacheRequest(source, reader=loader, **options))) as reading:
        return reading.look()


def served(dataset: Any, epochs: int = 2) -> list[Any]:
    return [sample for _ in range(epochs) for batch in DataLoader(dataset, 4) for sample in batch]


# ---- files that are open in the trainer ----


class Opened(Dataset[Any]):
    """Reads records by a handle that was opened, and read from, when the dataset was made."""

    def __init__(self, handle: Any, read: Callable[[Any, int], bytes]) -> None:
        self.handle, self.read = handle, read

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return tensor(self.read(self.handle, index))


def _by_seek(file: Any, index: int) -> bytes:
    file.seek(16 + index * BYTES)
    return file.read(BYTES)


def _by_descriptor(descriptor: int, index: int) -> bytes:
    os.lseek(descriptor, 16 + index * BYTES, os.SEEK_SET)
    return os.read(descriptor, BYTES)


def _plain(path: Path, buffering: int = -1) -> Any:
    path.write_bytes(bytes(16) + b"".join(map(record, range(LENGTH))))
    file = open(path, "rb", buffering=buffering)  # noqa: SIM115
    file.read(16)
    return file


def _descriptor(path: Path) -> int:
    _plain(path).close()
    descriptor = os.open(path, os.O_RDONLY)
    os.read(descriptor, 16)
    return descriptor


def _compressed(path: Path) -> Any:
    path.write_bytes(gzip.compress(bytes(16) + b"".join(map(record, range(LENGTH)))))
    file = gzip.open(path)  # noqa: SIM115
    file.read(16)
    return file


def _archive(path: Path) -> Any:
    with zipfile.ZipFile(path, "w") as archive:
        for index in range(LENGTH):
            archive.writestr(str(index), record(index))
    archive = zipfile.ZipFile(path)
    archive.read("0")
    return archive


def _database(path: Path) -> Any:
    database = sqlite3.connect(path)
    database.execute("create table records (number integer primary key, content blob)")
    database.executemany("insert into records values (?, ?)", [(index, record(index)) for index in range(LENGTH)])
    database.commit()
    return database


def _select(database: Any, index: int) -> bytes:
    return database.execute("select content from records where number = ?", [index]).fetchone()[0]


def _lines(path: Path) -> Any:
    path.write_text("".join(f"{index + 1:05}\n" for index in range(LENGTH)))
    file = open(path)  # noqa: SIM115
    file.readline()
    return file


def _line(file: Any, index: int) -> bytes:
    file.seek(6 * index)
    return bytes([int(file.readline())]) * BYTES


def _mapped(path: Path) -> Any:
    file = _plain(path)
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    file.close()
    return mapped


FILES: dict[str, tuple[Callable[[Path], Any], Callable[[Any, int], bytes]]] = {
    "buffered": (_plain, _by_seek),
    "unbuffered": (partial(_plain, buffering=0), _by_seek),
    "descriptor": (_descriptor, _by_descriptor),
    "gzip": (_compressed, _by_seek),
    "zip": (_archive, lambda archive, index: archive.read(str(index))),
    "sqlite": (_database, _select),
    "text": (_lines, _line),
    "mmap": (_mapped, _by_seek),
}


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_the_trainer_stays_where_it_is(kind: str, tmp_path: Path) -> None:
    """In order, shuffled and again: each sample is that of the file, whose position set-up does not move."""
    open_file, read = FILES[kind]
    handle = open_file(tmp_path / "file")
    before = None if isinstance(handle, int) else getattr(handle, "tell", lambda: None)()
    offset = os.lseek(handle, 0, os.SEEK_CUR) if isinstance(handle, int) else 0
    with closing(CachedDataset(Opened(handle, read))) as dataset:
        assert dataset.counters.totals().setup_fills == LENGTH
        assert before is None or handle.tell() == before
        assert not offset or os.lseek(handle, 0, os.SEEK_CUR) == offset
        assert [bytes(sample) for sample in served(dataset)] == [*map(record, range(LENGTH))] * 2
    os.close(handle) if isinstance(handle, int) else handle.close()


def test_a_sequential_read_goes_on_where_the_trainer_was(tmp_path: Path) -> None:
    """A source that reads on without a seek is not cached, and gives the batches that it gives without set-up."""
    plain, cached = (_plain(tmp_path / name) for name in ("plain", "cached"))
    expected = served(Opened(plain, lambda file, index: file.read(BYTES)), 1)
    with closing(CachedDataset(Opened(cached, lambda file, index: file.read(BYTES)))) as dataset:
        assert all(map(torch.equal, served(dataset, 1), expected))
    plain.close(), cached.close()


def test_the_position_in_a_file_is_that_of_the_trainer(tmp_path: Path) -> None:
    """The process of set-up begins there, whether or not its samples are stored."""
    descriptor = _descriptor(tmp_path / "file")
    source = Opened(descriptor, lambda number, index: bytes([os.lseek(number, 0, os.SEEK_CUR)]))
    with closing(Reader([Subject(source.__getitem__, source, "a source")], "fork")) as reader:
        assert int(reader.ask(0)) == 16
    with closing(CachedDataset(source)) as dataset:
        assert {int(sample) for sample in served(dataset)} == {16}
    os.close(descriptor)


@pytest.mark.processes
def test_a_number_that_has_another_file_by_now_stays() -> None:
    """A descriptor that was closed before the fork may have given its number to the reader's own pipe."""

    def read_all() -> list[bytes]:
        (first, written), (second, written_too) = os.pipe(), os.pipe()
        os.write(written, b"a"), os.write(written_too, b"b")
        shared = isolation.descriptors()
        isolation.isolate({first: shared[second]} | {second: shared[second]})
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.read(second, 1)
        return [os.read(first, 1)]

    assert call(read_all) == [b"a"]


def test_a_log_of_the_trainer_is_not_written_over(tmp_path: Path) -> None:
    """Lines that the process writes to a file that is appended to stand beside the trainer's lines."""
    with open(tmp_path / "log", "a", buffering=1) as log:
        log.write("begin\n")
        with closing(CachedDataset(Opened(log, lambda log, index: log.write(f"{index}\n") and record(index)))):
            log.write("end\n")
    lines = (tmp_path / "log").read_text().split()
    assert (lines[0], lines.count("end"), lines.count("0")) == ("begin", 1, 2)


# ---- messages that others have sent to the trainer ----


class Fed(Dataset[Any]):
    """Its samples are the messages of somebody, one for each read."""

    def __init__(self, take: Callable[[], Any], held: Any, hides: bool = False) -> None:
        self.take, self.held, self.hides = take, held, hides

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        try:
            return torch.tensor(int(self.take()))
        except Exception:
            if not self.hides:
                raise
            return torch.tensor(-1)


@contextmanager
def fed(kind: str) -> Iterator[tuple[Callable[[], Any], Any]]:
    """A function that takes the next of twelve messages, which have been sent, and the object that has them."""
    if kind == "pipe":
        reads, writes = os.pipe()
        os.write(writes, bytes(range(LENGTH)))
        yield lambda: os.read(reads, 1)[0], (reads, writes)
        os.close(reads), os.close(writes)
    elif kind == "socket":
        left, right = socket.socketpair()
        with left, right:
            left.sendall(bytes(range(LENGTH)))
            yield lambda: right.recv(1)[0], right
    elif kind == "connection":
        ours, theirs = multiprocessing.Pipe()
        with ours, theirs:
            for number in range(LENGTH):
                theirs.send(number)
            yield ours.recv, ours
    elif kind == "manager":
        with multiprocessing.Manager() as manager:
            messages = manager.Queue()
            for number in range(LENGTH):
                messages.put(number)
            yield partial(messages.get, timeout=10), messages
    else:
        messages = queue.Queue() if kind == "thread" else multiprocessing.Queue()
        for number in range(LENGTH):
            messages.put(number)
        if kind == "queue":
            wait_until(lambda: messages.qsize() == LENGTH)
        yield partial(messages.get, timeout=10), messages
        if kind == "queue":
            messages.close()
            messages.join_thread()


MESSAGES = ["pipe", "socket", "connection", "queue", "manager"]


@pytest.mark.parametrize("kind", MESSAGES)
def test_no_message_is_taken(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The training gets every message in its order, uncached, and is told why."""
    with caplog.at_level(logging.WARNING), fed(kind) as (take, held):
        with closing(CachedDataset(Fed(take, held))) as dataset:
            assert dataset.cache is None
            assert served(dataset, 1) == list(range(LENGTH))
    assert "it reads from a pipe, a socket or a queue" in caplog.text
    assert "let each process open its own at its first read" in caplog.text


class Taken(Dataset[Any]):
    """Its samples are what it takes from a queue or a connection, which workers of any start method get."""

    def __init__(self, messages: Any, hides: bool) -> None:
        self.messages, self.hides = messages, hides

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        try:
            take = getattr(self.messages, "recv", None) or self.messages.get
            return torch.tensor(int(take()))
        except OSError:
            if not self.hides:
                raise
            return torch.tensor(-1)


@contextmanager
def messages_of(kind: str, context: Any) -> Iterator[Any]:
    """An object that gives the numbers from zero on, of a class of `multiprocessing`."""
    if kind == "Pipe":
        reads, writes = context.Pipe(duplex=False)
        with reads, writes:
            for number in range(LENGTH):
                writes.send(number)
            yield reads
    elif kind == "Manager":
        with context.Manager() as manager:
            messages = manager.Queue()
            for number in range(LENGTH):
                messages.put(number)
            yield messages
    else:
        messages = getattr(context, kind)()
        for number in range(LENGTH):
            messages.put(number)
        wait_until(lambda: not messages.empty())
        yield messages


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["Queue", "SimpleQueue", "JoinableQueue", "Pipe", "Manager"])
def test_no_message_is_taken_whatever_starts_the_workers(kind: str, method: str) -> None:
    """Set-up leaves all of them to the workers, and the reason says so; what hides the failure is not stored."""
    context = multiprocessing.get_context(method)
    loader = LoaderSettings(4, 2, start_method=method)
    with messages_of(kind, context) as messages:
        for hides in (False, True):
            request = CacheRequest(Taken(messages, hides), reader=loader)
            with closing(SourceReader(request)) as reading:
                finding = reading.look()
            assert finding.seen == ()
            if not hides or kind == "Manager":
                assert "it reads from a pipe, a socket or a queue" in str(finding.reason)
        whole = Taken(messages, False)
        assert [int(whole[index]) for index in range(LENGTH)] == list(range(LENGTH))


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_failure_that_a_source_hides_is_not_stored(kind: str) -> None:
    """No message is taken, and each sample is the source's own, in every epoch."""
    with fed(kind) as (take, held):
        with closing(CachedDataset(Fed(take, held, hides=True))) as dataset:
            assert dataset.cache is None or dataset.counters.totals().setup_fills == 0
            assert served(dataset, 1) == list(range(LENGTH))


@pytest.mark.usefixtures("unhurried")
@pytest.mark.named
def test_under_a_name_only_what_a_source_reaches_is_a_doubt(name: str) -> None:
    """The next job compares its samples with the first ones, so these are stored beside pipes of others."""
    with fed("connection") as (take, held):
        with closing(CachedDataset(Fed(take, held, hides=True), name=f"{name}-hidden")) as dataset:
            assert dataset.cache is not None
            assert dataset.cache.filled == 0
        with closing(CachedDataset(Made(_square, LENGTH), name=name)) as dataset:
            assert dataset.cache is not None
            assert dataset.cache.filled == LENGTH


@pytest.mark.usefixtures("unhurried")
def test_beside_a_thread_or_a_pipe_samples_decide_and_are_not_stored() -> None:
    """A pipe to which the trainer only writes is no reason; a thread of the trainer, or a pipe that it reads, is."""
    reads, writes = os.pipe()
    source = Made(lambda index: torch.tensor(index), LENGTH)
    with closing(CachedDataset(source)) as dataset:
        assert (dataset.cache.codec.nbytes, dataset.counters.totals().setup_fills) == (8, 0)
    os.close(reads)
    with closing(CachedDataset(source)) as dataset:
        assert dataset.counters.totals().setup_fills == LENGTH
    os.close(writes)
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    with closing(CachedDataset(source)) as dataset:
        assert (dataset.cache.codec.nbytes, dataset.counters.totals().setup_fills) == (8, 0)
        assert served(dataset) == [*range(LENGTH)] * 2
    ends.set()
    thread.join()


# ---- threads that only the trainer has ----


class Threaded(Dataset[Any]):
    """Asks a thread of the trainer for its samples."""

    def __init__(self, ask: Callable[[int], Any]) -> None:
        self.ask, self.reads, self.seen = ask, 0, list[int]()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        self.seen.append(index)
        return self.ask(index)


def _square(index: int) -> torch.Tensor:
    return torch.tensor([index, index**2])


def _conditional(ends: threading.Event) -> tuple[Callable[[int], Any], threading.Thread]:
    """A thread that answers by a condition, as a reader of a library of the user's may."""
    condition, asked, answers = threading.Condition(), list[int](), dict[int, Any]()

    def run() -> None:
        while not ends.is_set():
            with condition:
                condition.wait_for(lambda: bool(asked), 0.05)
                while asked:
                    index = asked.pop()
                    answers[index] = _square(index)
                    condition.notify_all()

    def ask(index: int) -> Any:
        with condition:
            asked.append(index)
            condition.notify_all()
            condition.wait_for(lambda: index in answers)
            return answers.pop(index)

    thread = threading.Thread(target=run)
    thread.start()
    return ask, thread


@contextmanager
def threaded(kind: str) -> Iterator[Callable[[int], Any]]:
    """A function that needs a running thread to make the sample of an index."""
    if kind == "executor":
        with ThreadPoolExecutor(2) as executor:
            executor.submit(_square, 0).result()
            yield lambda index: executor.submit(_square, index).result()
    elif kind == "pool":
        with ThreadPool(2) as pool:
            yield lambda index: pool.apply(_square, (index,))
    elif kind == "condition":
        ends = threading.Event()
        ask, thread = _conditional(ends)
        yield ask
        ends.set()
        thread.join()
    else:
        lock, is_held = threading.Lock(), threading.Event()

        def hold() -> None:  # until a process has hung
            with lock:
                is_held.set()
                wait_until(lambda: bool(Reader.hung))

        thread = threading.Thread(target=hold)
        thread.start()
        is_held.wait()

        def locked(index: int) -> torch.Tensor:
            with lock:
                return _square(index)

        yield locked
        thread.join()


THREADS = ["executor", "pool", "condition", "lock"]


@pytest.mark.parametrize("kind", THREADS)
def test_what_hangs_in_a_fork_is_read_here(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cached; counts and lists are put back. The next source of the job is not read in a fork."""
    forks, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(1) or fork())
    with threaded(kind) as ask:
        source = Threaded(ask)
        with closing(CachedDataset(source)) as dataset, closing(CachedDataset(Threaded(ask))) as other:
            assert (source.reads, source.seen) == (0, [])
            assert len(forks) == 1
            assert other.cache is not None
            assert all(map(torch.equal, served(dataset), [*map(_square, range(LENGTH))] * 2))
            assert dataset.counters.totals().hits >= LENGTH


@pytest.mark.parametrize("kind", ["executor", "condition"])
def test_what_hangs_in_a_fork_passes_through_with_workers(kind: str) -> None:
    """They would hang as well. The reason names a way out."""
    with threaded(kind) as ask:
        source = Threaded(ask)
        reasons = [str(look(source, 2, "fork").reason) for _ in range(2)]
        assert source.reads == 0
    assert "it hangs in a forked process, where it waits for a thread" in reasons[0]
    assert "an earlier source hung in a forked process" in reasons[1]
    assert all('multiprocessing_context="forkserver"' in reason for reason in reasons)


def test_a_source_that_must_be_read_in_a_process_is_not_read_here() -> None:
    """A hang is an error; a source after it is read in a process all the same."""
    with threaded("executor") as ask:
        hanging, plain = Threaded(ask), Threaded(_square)
        subjects = [Subject(source.__getitem__, source, "a source") for source in (hanging, plain)]
        with closing(Reader(subjects, "fork", must=True)) as reader:
            with pytest.raises(ChildProcessError, match="hangs in a forked process"):
                reader.ask(3)
            assert torch.equal(reader.ask(3, number=1), _square(3))
        assert (hanging.reads, plain.reads) == (0, 0)


def test_a_queue_that_a_thread_feeds_is_left_alone() -> None:
    """A thread of the trainer loads ahead: what set-up took would be missing."""
    ahead, ends = queue.Queue[int](2), threading.Event()

    def feed() -> None:
        for number in range(LENGTH):
            ahead.put(number)

    thread = threading.Thread(target=feed)
    thread.start()
    with closing(CachedDataset(Fed(ahead.get, ahead))) as dataset:
        assert served(dataset, 1) == list(range(LENGTH))
    ends.set()
    thread.join()


def test_a_queue_is_left_alone_where_no_process_starts() -> None:
    """In the trainer's process set-up takes nothing from it either."""
    ahead = queue.Queue[int]()
    ahead.put(0)
    source = Fed(ahead.get_nowait, ahead)
    with closing(Reader([Subject(source.__getitem__, source, "a source")], None)) as reader:
        with pytest.raises(UnsharedError, match="a queue"):
            reader.ask(0)
    assert ahead.qsize() == 1


class Slow(Dataset[Any]):
    """Waits before one of its samples."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            self.wait()
        return _square(index)


def _try_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=0.8)


def _join() -> None:
    thread = threading.Thread(target=time.sleep, args=(0.8,))
    thread.start()
    thread.join()


def _executor() -> None:
    with ThreadPoolExecutor(2) as executor:
        list(executor.map(time.sleep, [0.8, 0.4]))


def _compute() -> None:
    end = time.monotonic() + 0.8
    while time.monotonic() < end:
        sum(range(1000))


SLOW: dict[str, Callable[[], Any]] = {
    "sleep": partial(time.sleep, 0.8),
    "lock": _try_lock,
    "event": lambda: threading.Event().wait(0.8),
    "thread": _join,
    "executor": _executor,
    "command": partial(subprocess.run, [sys.executable, "-c", "import time; time.sleep(0.8)"]),
    "processor": _compute,
    "signal": lambda: signal.sigtimedwait([signal.SIGUSR2], 0.8),
}


@pytest.mark.parametrize("kind", SLOW)
def test_a_slow_source_is_not_taken_for_a_hanging_one(kind: str) -> None:
    """Whether it sleeps, waits for threads of its own, computes, or waits for a program."""
    assert look(Slow(SLOW[kind])).codec is not None
    assert not Reader.hung


@pytest.mark.slow
def test_five_seconds_are_no_hang() -> None:
    """A sample that takes five seconds is waited for."""
    assert look(Slow(partial(time.sleep, 5))).codec is not None
    assert not Reader.hung


# ---- what cannot be read in a process ----


def _only_in(pid: int, index: int) -> torch.Tensor:
    if os.getpid() != pid:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    return _square(index)


def test_what_raises_in_a_fork_alone_is_read_here() -> None:
    """A device that a fork cannot use: cached without workers, with its error with workers."""
    source = Made(partial(_only_in, os.getpid()), LENGTH)
    assert look(source).codec is not None
    assert "Cannot re-initialize CUDA" in str(look(source, 2, "fork").reason)


def test_a_state_that_cannot_be_put_back_is_a_reason(tmp_path: Path) -> None:
    """A position in a file that no object of Python holds."""
    descriptor = _descriptor(tmp_path / "file")

    def read(index: int) -> torch.Tensor:
        return _only_in(os.getppid() if os.getpid() != here else here, index) + len(os.read(descriptor, 1))

    here = os.getpid()
    reason = str(look(Made(read, LENGTH)).reason)
    assert f"reading it moves the position in {tmp_path / 'file'}, which set-up cannot put back" in reason
    assert reason.endswith('give its loader workers and multiprocessing_context="forkserver" or "spawn"')
    with closing(SourceReader(CacheRequest(Made(read, LENGTH)))) as alone:  # of a CachedDataset, without a loader
        assert str(alone.look().reason).endswith("give CachedDataset a spec=, with which set-up reads nothing")
    os.close(descriptor)


def test_a_process_that_dies_is_no_reason_to_read_here() -> None:
    """The trainer could die as well."""
    here = os.getpid()
    source = Made(lambda index: os.getpid() == here or os.kill(os.getpid(), signal.SIGKILL), LENGTH)
    assert "(signal 9) exited unexpectedly" in str(look(source).reason)


# ---- as in the trainer ----


def _sums(threads: int) -> tuple[bool, int]:
    torch.set_num_threads(threads)
    numbers = torch.rand(3, 1 << 20, generator=torch.Generator().manual_seed(0))
    source = Made(lambda index: numbers[index].sum(), 3)
    expected = [source[index] for index in range(3)]  # by a pool of threads, which runs from here on
    with closing(CachedDataset(source)) as dataset:
        assert dataset.counters.totals().setup_fills == 3
        assert not Reader.hung
        return all(map(torch.equal, served(dataset), expected * 2)), torch.get_num_threads()


def test_sums_have_the_bits_of_the_trainers_threads() -> None:
    """The process has as many threads for parallel loops as the trainer, and does not wait for the trainer's."""
    assert call(_sums, 4) == (True, 4)


def test_with_workers_loops_have_one_thread() -> None:
    """As in the workers of a DataLoader, which say so in `get_worker_info`."""
    source = Made(lambda index: torch.full((torch.get_num_threads(), get_worker_info().num_workers), index), LENGTH)
    assert look(source, 2, "fork").codec.nbytes == 8


def _threads_here(index: int) -> torch.Tensor:
    return torch.full((2,), os.getpid())


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods_have_a_process_too(method: str) -> None:
    """A hang in it is not looked for, and its samples are stored beside threads and pipes."""
    reads, writes = os.pipe()
    subject = Subject(Made(_threads_here, LENGTH).__getitem__, None, "a source", has_workers=True)
    with closing(Reader([subject], method)) as reader:
        [pid, _] = reader.ask(0).tolist()
        assert pid != os.getpid()
        assert reader.ask(1).tolist() == [pid, pid]
        assert reader.is_certain()
    assert not multiprocessing.active_children()
    os.close(reads), os.close(writes)


def test_the_process_ends_with_the_trainer(tmp_path: Path) -> None:
    """Killed in the middle of set-up, a trainer leaves no process that reads on."""

    def note(index: int) -> torch.Tensor:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(600)
        return _square(index)

    trainer = multiprocessing.get_context("fork").Process(target=look, args=(Made(note, LENGTH),))
    trainer.start()
    wait_until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
    pid = int((tmp_path / "pid").read_text())
    trainer.kill()
    trainer.join()
    wait_until(lambda: not is_alive(pid), 20)


# ---- threads that draw ----


class Dropped(Dataset[Any]):
    """Calls its random transform, in a thread of its own if so wanted."""

    def __init__(self, apart: bool) -> None:
        self.transform, self.apart = nn.Sequential(nn.Flatten(0), nn.Dropout(0.5)), apart

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        image = torch.full((8, 8), index + 1.0)
        if not self.apart:
            return self.transform(image)
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(self.transform, image).result()


def test_a_transform_that_another_thread_calls_is_not_cut() -> None:
    """It passes through as random; called by the thread that reads, it is cut."""
    assert look(Dropped(False)).cut is not None
    finding = look(Dropped(True))
    assert finding.codec is None
    assert "called by another thread" in str(finding.reason)


@contextmanager
def drawing() -> Iterator[None]:
    """A thread of another library draws now and then."""
    ends = threading.Event()

    def draw() -> None:
        while not ends.wait(0.02):
            random.random()
            np.random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    yield
    ends.set()
    thread.join()


def test_a_thread_that_draws_beside_a_source_does_not_make_it_random() -> None:
    """All samples of a dataset and of a stream are stored, and hit from the second epoch on."""

    def slow(index: int) -> torch.Tensor:
        time.sleep(0.002)
        return _square(index)

    with drawing(), closing(CachedDataset(Made(slow, 40))) as dataset:
        served(dataset, 3)
        counts = dataset.counters.totals()
        assert (counts.hits, counts.fills) == (80, 40)
    with drawing(), closing(CachedStream(lambda: map(slow, range(40)), "1MiB")) as stream:
        assert [len(list(stream)) for _ in range(3)] == [40] * 3
        assert stream.counters.totals().hits == 80


def test_a_source_that_draws_by_itself_stays_random_beside_a_thread() -> None:
    """The process of set-up has one thread, and decides."""
    with drawing():
        assert "moves the generator of random" in str(look(Made(lambda index: random.random(), LENGTH)).reason)


def test_a_source_that_draws_here_is_random() -> None:
    """It hangs in a fork, so the process that reads it has threads: each of its reads moves a generator."""
    with threaded("executor") as ask:
        state = random.getstate()
        finding = look(Threaded(lambda index: ask(index) if random.random() else ask(0)))
        assert "each read moves the generator of random" in str(finding.reason)
        assert random.getstate() == state
        with drawing():
            assert look(Threaded(lambda index: (time.sleep(0.0001), ask(index))[1])).codec is not None


class Lazy(Dataset[Any]):
    """Draws for its first sample, which does not show it, in a thread that it has started at its first read."""

    executor: Any = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        if self.executor is None:
            self.executor = ThreadPoolExecutor(1)
        if index == 0:
            self.executor.submit(random.random).result()
        return torch.tensor(index)


def test_threads_of_the_source_itself_draw_for_it() -> None:
    """Only threads of the trainer are none of its business."""
    assert "moves the generator of random" in str(look(Lazy()).reason)


# ---- samples that depend on how often they were read ----


class Counting(Dataset[Any]):
    """Counts its reads in some place."""

    total = 0

    def __init__(self, sample: Callable[[Any, int], Any]) -> None:
        self.calls, self.state, self.visits = 0, {"calls": 0, "epoch": 3}, [0] * LENGTH
        self.last, self.clock, self.sample = 0, 0, sample

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        self.state["calls"] += 1
        self.visits[index] += 1
        type(self).total += 1
        self.last, self.clock = index, time.monotonic_ns()
        return torch.tensor(self.sample(self, index))


_reads = 0


def _by_global(source: Any, index: int) -> int:
    global _reads
    _reads += 1
    return index + _reads // 5000


def _by_closure() -> Callable[[Any, int], int]:
    calls = 0

    def sample(source: Any, index: int) -> int:
        nonlocal calls
        calls += 1
        return index + calls // 100_000

    return sample


DEPENDS: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "epoch": (lambda source, index: index + source.calls // 12_000, "Counting.calls"),
    "in a dict": (lambda source, index: index + min(source.state["calls"] // 1000, 1), "['calls']"),
    "by index": (lambda source, index: index + source.visits[index] // 40, "Counting.visits"),
    "of a class": (lambda source, index: index + Counting.total // 10**6, "Counting.total"),
    "a list": (lambda source, index: [index] * 900 if source.calls < 900 else [index], "Counting.calls"),
    "global": (_by_global, "_reads"),
    "closure": (_by_closure(), "variable"),
}


@pytest.mark.parametrize("kind", DEPENDS)
@pytest.mark.parametrize("method", ["fork", None])
def test_a_sample_that_depends_on_the_number_of_reads_passes_through(kind: str, method: Any, monkeypatch: Any) -> None:
    """Wherever the number is, and whoever reads; the reason says where."""
    monkeypatch.setattr("lightning_stocache.setup.find.start_method", lambda chosen: method)
    sample, place = DEPENDS[kind]
    source = Counting(sample)
    reason = str(look(source).reason)
    assert "depend on how often it was read" in reason
    assert place in reason
    assert (source.calls, source.state["calls"], sum(source.visits)) == (0, 0, 0)


def test_a_source_that_only_counts_is_cached() -> None:
    """Also one that remembers the last index, or the time: these are no counts."""
    assert look(Counting(lambda source, index: index + source.state["epoch"])).codec is not None
    assert look(Counting(lambda source, index: index + 0 * min(source.last, source.clock))).codec is not None


def test_in_memory_files_go_back() -> None:
    """A source over `io.BytesIO` that is read here goes on where it was."""
    file = io.BytesIO(b"".join(map(record, range(LENGTH))))
    file.seek(7)
    source = Opened(
        file, lambda file, index: file.seek(index * BYTES) * 0 or _only_in(here, 0) is None or file.read(BYTES)
    )
    here = os.getpid()
    assert look(source).codec is not None
    assert file.tell() == 7
