"""The odds, as fixtures that a test asks for by name: many processes on few cores, another job, a stopped process, a
second thread, a full disk, a device that is behind, and a small /dev/shm.

Where the system does not give one of them, the test is skipped, with the reason. Each ends with its test, also with one
that fails or is interrupted; a mount and a process end with pytest, too, even if that is killed.
"""

import gc
import logging
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import Store
from tests.processes import (
    Child,
    call,
    call_many,
    context,
    die_with_parent,
    hanging,
    have_own_mounts,
    mount_own_shm,
    mount_tmpfs,
    take_all_of,
    wait_until,
)

CROWD = 32
"""Processes: more than most machines have cores."""

_BEAT_SECONDS = 0.0005  # between two rounds of a second thread

# ---- many processes ----


@pytest.fixture
def crowd() -> Callable[..., list[Any]]:
    """What `function(number, *args)` returns in each of 32 processes that begin at once, or the first error. Their
    parent is small, and not this process: the function is importable by name. With method="fork" it need not be, and
    they inherit what this process has."""
    return run_crowd


def run_crowd(function: Callable[..., Any], *args: Any, size: int = CROWD, method: str = "forkserver") -> list[Any]:
    return list(call(_run_crowd, function, size, args, method=method))


def _run_crowd(function: Callable[..., Any], size: int, args: tuple[Any, ...]) -> list[Any]:
    die_with_parent()
    gc.freeze()  # a collection in a member would copy the memory that it looks through
    barrier = context("fork").Barrier(size)
    return call_many(_begin_at_once, [(barrier, function, number, *args) for number in range(size)])


def _begin_at_once(barrier: Any, function: Callable[..., Any], *args: Any) -> Any:
    die_with_parent()
    barrier.wait()
    return function(*args)


# ---- another job ----


@pytest.fixture
def other_job() -> Iterator[Callable[..., Child]]:
    """Starts another job on this node, in a session of its own, in which a function (importable by name) has returned,
    by default `open_store`. What it returned stays open until the test ends, or `kill`."""
    with ExitStack() as jobs:

        def start(function: Callable[..., Any] | None = None, *args: Any) -> Child:
            job = hanging(function or open_store, *args, method="forkserver", own_session=True)
            return jobs.enter_context(job)

        yield start


def open_store(mib: int = 64) -> Store:
    """A cache in memory of so many MiB, of which one is filled."""
    sample = torch.ones(2**20, dtype=torch.uint8)
    store = Store.create(SampleSpec.infer(sample), Arc(mib, mib))
    assert store.fill(0, sample)
    return store


# ---- a stopped process ----


class Stopped(Child):
    """A forked process that stops itself, by `stop`, or by `signal_at_line` with SIGSTOP."""

    def wait_for_stop(self) -> "Stopped":
        """Wait until it has stopped; its error if it ends before."""
        change = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if change.si_code != os.CLD_STOPPED:
            pytest.fail(f"the process has not stopped, and has returned {self.result()!r}")
        return self

    def go_on(self) -> None:
        """Continue it."""
        os.kill(self.process.pid, signal.SIGCONT)


def _run_mortal(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    die_with_parent()
    return function(*args)


def stop() -> None:
    """Stop this process, until `go_on`."""
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.fixture
def stopped() -> Iterator[Callable[..., Stopped]]:
    """Runs a function in a forked process up to the moment at which it stops itself. The process is killed after the
    test, unless that lets it `go_on` and takes its `result`."""
    with ExitStack() as processes:

        def start(function: Callable[..., Any], *args: Any) -> Stopped:
            process = Stopped(_run_mortal, function, args)
            processes.callback(process.kill)
            return process.wait_for_stop()

        yield start


# ---- a second thread ----


@pytest.fixture
def second_thread() -> Iterator[Callable[..., None]]:
    """Starts a thread that draws from Python's generator, logs, and calls a function, again and again beside the test
    until this ends. What the thread raises is raised then."""
    over, generator = threading.Event(), random.getstate()
    with ThreadPoolExecutor() as pool:
        threads = list[Future[None]]()

        def start(function: Callable[[], Any] = int) -> None:
            begun = threading.Event()
            threads.append(pool.submit(_go_round, function, begun, over))
            wait_until(lambda: begun.is_set() or threads[-1].done())

        try:
            yield start
        finally:
            over.set()
    random.setstate(generator)
    for thread in threads:
        thread.result()


def _go_round(function: Callable[[], Any], begun: threading.Event, over: threading.Event) -> None:
    while not over.wait(_BEAT_SECONDS):
        random.random()
        logging.getLogger("beside the test").debug("another round")
        function()
        begun.set()


# ---- a device that is behind ----


class LateDevice:
    """A device that works in order in a thread of its own, as a GPU does, and begins only when it is waited for. It has
    a clock, which only its work advances."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = ThreadPoolExecutor(1)
        self._allowed = threading.Semaphore(0)
        self._ordered = list[Future[Any]]()

    def order(self, work: Callable[[], Any]) -> "Future[Any]":
        """Have it do something later."""

        def do() -> Any:
            self._allowed.acquire()
            return work()

        self._ordered.append(self._thread.submit(do))
        return self._ordered[-1]

    def spend(self, seconds: float) -> None:
        """Have it be busy for so long, on its own clock."""

        def spend() -> None:
            self.seconds += seconds

        self.order(spend)

    def synchronize(self) -> None:
        """Wait until it has done everything, and raise what that raised."""
        ordered, self._ordered = self._ordered, []
        self._allowed.release(len(ordered) or 1)
        for work in ordered:
            work.result()

    def close(self) -> None:
        """Do what is left, and end."""
        with self._thread:
            self.synchronize()


class LateEvent:
    """A moment on a device's clock, as a torch.cuda.Event is, which the device reaches later."""

    def __init__(self, device: LateDevice) -> None:
        self.synchronize = device.synchronize
        self.reached = device.order(lambda: device.seconds)

    def query(self) -> bool:
        return self.reached.done()

    def elapsed_time(self, end: "LateEvent") -> float:
        """Milliseconds up to another event; both have been reached."""
        return 1000 * (end.reached.result(0) - self.reached.result(0))


@pytest.fixture
def late_device() -> Iterator[LateDevice]:
    """A device that is behind; what is left to do when the test ends is done then."""
    with closing(LateDevice()) as device:
        yield device


# ---- little room ----


@pytest.fixture
def small_shm() -> Callable[..., Any]:
    """What a function returns in a process with a /dev/shm of its own, of 64 MiB as Docker makes it, or of `mib`."""
    return run_in_small_shm


def run_in_small_shm(function: Callable[..., Any], *args: Any, mib: int = 64) -> Any:
    return _with_mounts(lambda: mount_own_shm(mib), function, args)


class Disk:
    """A directory on a small filesystem, which may be full."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def take_all(self) -> None:
        """Have others write until it is full."""
        take_all_of(self.directory)

    def make_room(self) -> None:
        """Have others remove what they wrote."""
        (self.directory / "other").unlink()


@pytest.fixture
def full_disk(tmp_path: Path) -> Callable[..., Any]:
    """What `function(disk, *args)` returns in a process for which a `Disk` of `mib` is mounted, by default a tmpfs. The
    function says when the disk is full. Other filesystems, by the name that `mkfs` knows, need root."""

    def run(function: Callable[..., Any], *args: Any, mib: int = 96, filesystem: str = "tmpfs") -> Any:
        disk, image = Disk(tmp_path / "disk"), tmp_path / "image"
        disk.directory.mkdir(exist_ok=True)

        def mount() -> None:
            have_own_mounts()
            if filesystem == "tmpfs":
                mount_tmpfs(str(disk.directory), mib)
                return
            with image.open("wb") as file:
                file.truncate(mib * 2**20)
            for command in ([f"mkfs.{filesystem}", "-q", image], ["mount", "-o", "loop", image, disk.directory]):
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise OSError(done.stderr.strip())

        return _with_mounts(mount, function, (disk, *args))

    return run


def _with_mounts(mount: Callable[[], None], function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a function returns in a forked process with mounts of its own, which end with it. It may skip."""

    def run() -> tuple[str, Any]:
        die_with_parent()
        try:
            mount()
        except OSError as error:
            return str(error), None
        return "", function(*args)

    refusal, value = call(run)
    if refusal:
        pytest.skip(f"nothing can be mounted here: {refusal}")
    return value
