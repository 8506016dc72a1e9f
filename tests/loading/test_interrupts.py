"""Ctrl-C at any moment ends the epoch, and a loader begins again as often as one likes; the thread that gathers."""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import os
import random
import re
import signal
import sys
import threading
import weakref
from contextlib import closing, nullcontext, suppress
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_stocache.loading import batch_pool
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.prefetch import Job, Prefetcher, held_back
from lightning_stocache.node.free import FreeMemory
from tests.loading.twins import PERSISTENT, Numbers, jitter, prefetch_threads, same
from tests.processes import wait_until

LENGTH = 38

pytestmark = [pytest.mark.usefixtures("seeded", "interruptible"), pytest.mark.processes]


@functools.cache
def checked(code: CodeType) -> tuple[set[int], set[int]]:
    """The offsets at which CPython has just looked for signals: after calls, and where functions and loops begin."""
    after_calls, others, last = set[int](), set[int](), ""
    for instruction in dis.get_instructions(code):
        if last in ("CALL", "CALL_FUNCTION_EX", "CALL_KW"):
            after_calls.add(instruction.offset)
        elif last == "RESUME":
            others.add(instruction.offset)
        if instruction.opname == "JUMP_BACKWARD":
            others.add(instruction.argval)
        last = instruction.opname
    return after_calls, others


class Keyboard:
    """Presses Ctrl-C while a batch is made: at the n-th of the moments at which CPython looks for signals."""

    def __init__(self) -> None:
        self.left = 0
        self.returned_to: FrameType | None = None  # from Python code, after which it does not look

    def __call__(self, frame: FrameType, event: str, _: Any) -> Keyboard:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "return":
            self.returned_to = frame.f_back
        elif event == "opcode":
            after_calls, others = checked(frame.f_code)
            if frame.f_lasti in others or (frame.f_lasti in after_calls and self.returned_to is not frame):
                self.left -= 1
                if self.left == 0:
                    signal.raise_signal(signal.SIGINT)
            self.returned_to = None
        return self

    def next(self, batches: Any, moment: int) -> Any:
        """The next batch."""
        self.left = moment
        sys.settrace(self)
        try:
            return batches.__next__()
        finally:
            sys.settrace(None)


@pytest.mark.parametrize(
    ("arguments", "transform", "budget"),
    [({}, None, "50%"), ({}, None, "auto"), (PERSISTENT, None, "50%"), ({"num_workers": 2}, jitter, "auto")],
)
def test_ctrl_c_ends_the_epoch_and_the_next_one_is_whole(
    arguments: dict[str, Any], transform: Any, budget: str, rng: random.Random
) -> None:
    """Whatever is interrupted: waiting, loading, gathering, counting, drawing, handing out; nothing is left of it."""
    plain = list(DataLoader(Numbers(LENGTH), 4))
    with closing(CachedDataset(Numbers(LENGTH), budget, transform=transform)) as dataset:
        loader, presses = CachedLoader(dataset, 4, **arguments), 0
        for _ in range(12):
            keyboard, batches = Keyboard(), iter(loader)
            with suppress(StopIteration):
                try:
                    while True:
                        keyboard.next(batches, int(2 ** rng.uniform(1, 11)))  # the first is before it has begun
                except KeyboardInterrupt:
                    presses += 1
                    assert [process for process in active_children() if process.is_alive()] == []
                    assert prefetch_threads() == 0
                    assert next(batches, None) is None
        got = list(loader)
        assert [labels.tolist() for _, labels in got] == [labels.tolist() for _, labels in plain]
        assert transform is not None or same(got, plain)
        assert presses > 6
        loader.close()


# ---- beginning again


@pytest.mark.parametrize("transform", [None, jitter])
def test_persistent_workers_begin_again_any_number_of_times(transform: Any) -> None:
    """Epochs broken off in every way, with two workers and nothing left of each; then a whole one."""
    source = Numbers(LENGTH, bad={17: OSError("sample 17 is broken")})
    with closing(CachedDataset(source, "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, **PERSISTENT)
        held: list[tuple[int, int, int]] = []
        handlers = set[Any]()
        for number in range(12):
            pressed = False
            try:
                break_off(loader, ENDS[number % len(ENDS)], moment=number * 8)
            except KeyboardInterrupt:
                pressed = True
            except (ArithmeticError, OSError):
                pass
            assert len(active_children()) == (0 if pressed else 2)
            handlers.add(signal.getsignal(signal.SIGCHLD))
            wait_until(lambda: feeders() <= len(active_children()))
            gc.collect()
            held.append((len(os.listdir("/proc/self/fd")), threading.active_count(), mapped()))
        assert len(handlers) == 1
        assert all(later <= first for first, later in zip(map(max, *held[:4]), map(max, *held[4:]), strict=True))
        batches, labels = iter(loader), list[int]()
        for number in range(10):
            with pytest.raises(OSError) if number == 17 // 4 else nullcontext():
                labels += next(batches)[1].tolist()
        assert labels == [*range(16), *range(20, LENGTH)]
        loader.close()


ENDS = ["break", "Ctrl-C", "error of the consumer", "error of a worker"]


def break_off(loader: DataLoader[Any], end: str, moment: int) -> None:
    for number, _ in enumerate(batches := iter(loader)):
        if number == 2 and end == "break":
            return
        if number == 2 and end == "error of the consumer":
            raise ArithmeticError
        if number == 2 and end == "Ctrl-C":
            Keyboard().next(batches, moment)


def feeders() -> int:
    """The threads that feed workers: nobody joins those of workers that have ended, and they hold the queues."""
    return sum(thread.name == "QueueFeederThread" for thread in threading.enumerate())


def mapped() -> int:
    """How often this process has files in memory mapped."""
    return len(re.findall("/dev/shm|/memfd:", Path("/proc/self/maps").read_text()))


def waits_for_a_request(worker: BaseProcess) -> bool:
    """Whether a worker is idle, as far as the kernel shows.

    A signal inside of `Condition.notify`, in the `put` of its reply, loses a wake-up of the queue's thread (CPython
    3.11): the worker then waits for that thread until its parent ends it.
    """
    place = Path(f"/proc/{worker.pid}/wchan").read_text()  # of one that runs "0", as where the kernel does not tell
    state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "S" and (place == "0" or "poll" in place)


def test_workers_that_ctrl_c_has_ended_are_replaced() -> None:
    """A terminal sends Ctrl-C to workers, too. They were not killed: the next epoch has new ones, without an error."""
    with closing(CachedDataset(Numbers(LENGTH), "50%")) as dataset:
        loader = CachedLoader(dataset, 4, **PERSISTENT)
        for _ in range(3):
            batches = iter(loader)
            for _ in range(4):  # both have started: while one does, torch takes its end for a crash
                next(batches)
            wait_until(lambda: all(waits_for_a_request(child) for child in active_children()))
            for child in active_children():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGINT)
            wait_until(lambda: not active_children())
            del batches
            assert [label for _, batch in loader for label in batch.tolist()] == list(range(LENGTH))
        loader.close()


def test_shared_memory_that_is_being_taken_belongs_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever step Ctrl-C interrupts, closing the pool closes every file."""
    free = FreeMemory(None, 2**40, 2**40)
    monkeypatch.setattr(batch_pool.FreeMemory, "now", lambda _: free)  # it asks the kernel in a thousand steps
    open_files, presses = len(os.listdir("/proc/self/fd")), 0
    for moment in itertools.count(1):
        pool = BatchPool(shared=1)
        try:
            Keyboard().next(map(pool.take_shared, [[64]]), moment)
        except KeyboardInterrupt:
            presses += 1
        pool.close()
        assert len(os.listdir("/proc/self/fd")) == open_files, moment
        if presses < moment:  # it was done before this moment came
            break
    assert presses > 20


def test_workers_that_are_being_started_are_somebodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while they start is raised when they are known, and ends them; the next epoch is whole."""
    start = BaseProcess.start

    def pressed(process: BaseProcess) -> None:
        start(process)
        signal.raise_signal(signal.SIGINT)

    with closing(CachedDataset(Numbers(12), "50%")) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=2)
        with monkeypatch.context() as patch:
            patch.setattr(BaseProcess, "start", pressed)
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
        assert active_children() == []
        assert sum(len(labels) for _, labels in loader) == 12


# ---- the thread, and steps that are not interrupted


def test_who_wants_a_job_that_is_under_way_waits_for_it() -> None:
    """The thread has begun it, and nobody else does; its result is there as often as it is wanted. The thread keeps no
    batch alive, though it waits: its memory is needed for the next one. An error is the consumer's, and the thread goes
    on. A finalizer may stop it from anywhere, the thread itself included, and more than once."""
    thread = Prefetcher()
    thread.stop()
    begun, go_on, done_by = threading.Event(), threading.Event(), list[int]()

    class Batch:
        pass

    def work() -> Batch:
        done_by.append(threading.get_ident())
        begun.set()
        go_on.wait(120)
        return Batch()

    job = Job(work)
    thread.offer(job)
    assert begun.wait(120)
    threading.Timer(0.05, go_on.set).start()
    assert job.result() is job.result()
    thread.offer(job)
    assert len(done_by) == 1
    assert done_by[0] != threading.get_ident()
    reference = weakref.ref(job.result())
    del job
    broken = Job(lambda: 1 / 0)
    thread.offer(broken)
    wait_until(lambda: reference() is None)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            broken.result()
    thread.offer(Job(thread.stop))
    wait_until(lambda: prefetch_threads() == 0)
    thread.stop()


def test_the_handler_of_the_user_is_put_back() -> None:
    """Also after Ctrl-C, which waits for the end of the block; and who ignores it goes on ignoring it."""
    before, pressed = signal.getsignal(signal.SIGINT), list[int]()
    with suppress(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        pressed.append(0)
    assert pressed == [0]
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_back():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
