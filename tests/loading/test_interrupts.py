"""Ctrl-C at any moment: no batch is lost, none comes twice, and a loader begins again as often as one likes."""

from __future__ import annotations

import dis
import functools
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_stocache.cache.counters import Counts
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.interrupts import HeldBack, LetThrough
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.torch_internals import WorkerIterator
from tests.loading.twins import Jitter, Numbers, Transformed, copied, same

LENGTH = 38
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}

pytestmark = [pytest.mark.usefixtures("seeded", "interruptible"), pytest.mark.processes]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also where a shell has started the tests in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def counts(dataset: CachedDataset) -> Counts:
    assert dataset.counters is not None
    return dataset.counters.totals()


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


def unchanged(sample: Any) -> Any:
    return sample


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


def interrupted_epoch(loader: DataLoader[Any], dice: random.Random) -> tuple[list[Any], int]:
    """All batches of an epoch with Ctrl-C in most of its steps, and how often it was pressed in time."""
    keyboard, batches, got, presses = Keyboard(), iter(loader), [], 0
    while True:
        try:
            got.append(copied(keyboard.next(batches, int(2 ** dice.uniform(0, 11)))))
        except KeyboardInterrupt:
            presses += 1
        except StopIteration:
            return got, presses


@pytest.mark.parametrize("budget", ["50%", "auto"])
@pytest.mark.parametrize(
    ("arguments", "transform"),
    [({}, None), (PERSISTENT, None), (PERSISTENT, Jitter("torch"))],
    ids=["alone", "workers", "transforming workers"],
)
def test_no_batch_is_lost_and_none_comes_twice(
    arguments: dict[str, Any], transform: Any, budget: str, rng: random.Random
) -> None:
    """Whatever is interrupted: waiting, loading, gathering, counting, drawing, handing out; counts are right."""
    arguments = {"batch_size": 4, "shuffle": True, **arguments}
    plain = DataLoader(Transformed(Numbers(LENGTH), transform or unchanged), **arguments)
    torch.manual_seed(0)
    expected = [[copied(batch) for batch in plain] for _ in range(6)]
    with closing(CachedDataset(Numbers(LENGTH), budget, transform=transform)) as dataset:
        loader = CachedLoader(dataset, **arguments)
        torch.manual_seed(0)
        presses = 0
        for epoch in range(6):
            got, pressed = interrupted_epoch(loader, rng)
            assert same(got, expected[epoch])
            assert counts(dataset).served == (epoch + 1) * LENGTH
            presses += pressed
        assert dataset.cache is not None
        assert counts(dataset).fills == len(dataset.cache)
        assert presses > 25
        loader.close()


@pytest.mark.parametrize("transform", [None, Jitter("torch")])
def test_an_answer_that_has_come_is_not_lost(transform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C right after a worker's answer was taken out of its queue: the batch is the next one."""
    source = Transformed(Numbers(LENGTH), transform or unchanged)
    torch.manual_seed(0)
    expected = [copied(batch) for batch in DataLoader(source, 4, num_workers=2)]
    with closing(CachedDataset(Numbers(LENGTH), "50%", transform=transform)) as dataset:
        torch.manual_seed(0)
        batches: Any = iter(CachedLoader(dataset, 4, num_workers=2))
        got, get = [], Queue.get

        def get_and_press(*arguments: Any, **named: Any) -> Any:
            answer = get(*arguments, **named)
            signal.raise_signal(signal.SIGINT)
            return answer

        monkeypatch.setattr(Queue, "get", get_and_press)
        presses = 0
        while True:
            try:
                got.append(copied(batches.__next__()))
            except KeyboardInterrupt:
                presses += 1
            except StopIteration:
                break
        assert presses > 3
        assert same(got, expected)


class Pressing(Numbers):
    """A source during whose loads Ctrl-C is pressed now and then."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.dice: random.Random | None = None

    def __getitem__(self, index: int) -> Any:
        if self.dice is not None and self.dice.random() < 0.2:
            signal.raise_signal(signal.SIGINT)
        return super().__getitem__(index)


class PressingInBatches(Pressing):
    """One that loads whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("budget", ["50%", "auto"])
@pytest.mark.parametrize("kind", [Pressing, PressingInBatches])
def test_what_is_loaded_again_is_counted_once(kind: type[Pressing], budget: str, rng: random.Random) -> None:
    """However often a batch was interrupted; what had been stored by then is read from the cache."""
    expected = [copied(batch) for batch in DataLoader(Numbers(LENGTH), 4)]
    source = kind(LENGTH)
    with closing(CachedDataset(source, budget)) as dataset:
        loader = CachedLoader(dataset, 4)
        for epoch in range(1, 4):
            source.dice = rng
            batches, got, presses = iter(loader), [], 0
            while len(got) < len(expected):
                try:
                    got.append(copied(next(batches)))
                except KeyboardInterrupt:
                    presses += 1
            source.dice = None
            assert same(got, expected)
            assert presses or counts(dataset).bypasses == 0
            assert counts(dataset).served == epoch * LENGTH
        assert dataset.cache is not None
        assert counts(dataset).fills == len(dataset.cache)


# ---- beginning again


class Failing(Numbers):
    """A source that cannot load one sample."""

    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise OSError("sample 17 is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("transform", [None, Jitter("torch")])
def test_persistent_workers_begin_again_any_number_of_times(transform: Any) -> None:
    """Fifty epochs broken off in every way, with the same two workers and nothing left of each; then a whole one."""
    with closing(CachedDataset(Failing(LENGTH), "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, **PERSISTENT)
        workers: set[int | None] = set()
        held: list[tuple[int, int, int]] = []
        for number in range(50):
            with suppress(KeyboardInterrupt, ArithmeticError, OSError):
                break_off(loader, ENDS[number % len(ENDS)], moment=number * 5)
            workers |= {child.pid for child in active_children()}
            gc.collect()
            held.append((len(os.listdir("/proc/self/fd")), threading.active_count(), mapped()))
        assert len(workers) == 2
        assert all(later <= first for first, later in zip(map(max, *held[:8]), map(max, *held[8:]), strict=True))
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


def mapped() -> int:
    """How often this process has files in memory mapped."""
    with open("/proc/self/maps") as file:
        return sum("/dev/shm" in line or "/memfd:" in line for line in file)


@pytest.mark.parametrize("transform", [None, Jitter("torch")])
def test_workers_that_ctrl_c_has_ended_are_replaced(transform: Any) -> None:
    """A terminal sends it to them, too: the next epoch of a persistent loader has new ones."""
    with closing(CachedDataset(Numbers(LENGTH), "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, **PERSISTENT)
        for _ in range(3):
            batches = iter(loader)
            for _ in range(4):  # both have started: while one does, torch takes its end for a crash
                next(batches)
            for child in active_children():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGINT)
            deadline = time.monotonic() + 120
            while active_children() and time.monotonic() < deadline:
                time.sleep(0.01)
            del batches
            assert [label for _, batch in loader for label in batch.tolist()] == list(range(LENGTH))
        loader.close()


# ---- holding back


def test_the_handler_of_the_user_is_put_back() -> None:
    """Also after Ctrl-C; and who ignores it goes on ignoring it."""
    before = signal.getsignal(signal.SIGINT)
    with suppress(KeyboardInterrupt), HeldBack():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        with HeldBack():
            signal.raise_signal(signal.SIGINT)
            assert pressed == []
        assert pressed == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with HeldBack(), LetThrough():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_that_has_waited_for_long_goes_through_when_pressed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sampler that does not come back, for instance; at once, it changes nothing."""
    steps: list[str] = []

    def press_twice() -> None:
        with HeldBack():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            steps.append("twice at once")
            monkeypatch.setattr("lightning_stocache.loading.interrupts.PATIENCE_SECONDS", -1)
            signal.raise_signal(signal.SIGINT)
            steps.append("later")

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert steps == ["twice at once"]


def test_what_was_held_back_is_let_through_first() -> None:
    """Where the loader is about to wait, Ctrl-C that has come before is raised before it waits."""
    steps: list[str] = []

    def press_and_wait() -> None:
        with HeldBack():
            signal.raise_signal(signal.SIGINT)
            steps.append("held")
            with LetThrough():
                steps.append("waiting")

    with pytest.raises(KeyboardInterrupt):
        press_and_wait()
    assert steps == ["held"]


def test_other_threads_hold_nothing_back() -> None:
    """There a handler cannot be changed, and none runs."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with HeldBack(), LetThrough():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []


@pytest.mark.parametrize("sigint", [signal.default_int_handler, signal.SIG_IGN])
@pytest.mark.parametrize("transform", [None, Jitter("torch")])
def test_the_death_of_a_worker_does_not_interrupt_a_request(transform: Any, sigint: Any, monkeypatch: Any) -> None:
    """Torch's handler would raise inside of the queue, and leave its lock to nobody; it raises while we wait."""
    whole: list[str] = []
    push = WorkerIterator.push

    def dying(iterator: WorkerIterator) -> None:
        if not whole:
            victim = active_children()[0]
            victim.kill()
            assert victim.pid is not None
            os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
        push(iterator)
        whole.append("pushed")

    before = signal.signal(signal.SIGINT, sigint)
    try:
        with closing(CachedDataset(Numbers(LENGTH), "50%", transform=transform)) as dataset:
            loader = CachedLoader(dataset, 1, **PERSISTENT)
            batches = iter(loader)
            next(batches)
            with monkeypatch.context() as patch:
                patch.setattr(WorkerIterator, "push", dying)
                with pytest.raises(RuntimeError, match="DataLoader worker"):
                    list(batches)
            assert whole
            assert [label for _, batch in loader for label in batch.tolist()] == list(range(LENGTH))
            loader.close()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("transform", [None, Jitter("torch")])
def test_workers_that_are_being_started_are_somebodys(transform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while they start is raised when they are known, and ends them; the next epoch is whole."""
    start = BaseProcess.start

    def pressed(process: BaseProcess) -> None:
        start(process)
        signal.raise_signal(signal.SIGINT)

    with closing(CachedDataset(Numbers(12), "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=2)
        with monkeypatch.context() as patch:
            patch.setattr(BaseProcess, "start", pressed)
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
        assert active_children() == []
        assert sum(len(labels) for _, labels in loader) == 12
