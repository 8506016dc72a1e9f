"""The life of loaders, workers, threads and memory: nothing outlives its loader, broken off or ended by Ctrl-C."""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import closing, nullcontext, suppress
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_stocache.loading.arena import Arena
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.interrupt import held_back
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.position import Ledger
from lightning_stocache.loading.prefetch import PREFETCH_THREAD, Prefetcher
from tests.cache.leaves import same
from tests.jobs import job_environment
from tests.loading.twins import (
    PERSISTENT,
    Numbers,
    copied,
    in_every_way,
    jitter,
    outcomes,
    plain_batches,
    prefetch_threads,
    to_float,
    totals,
)
from tests.processes import ends_alive, wait_until
from tests.sources import Made

LENGTH = 38

pytestmark = [pytest.mark.usefixtures("seeded", "interruptible")]


def arenas() -> list[Arena]:
    """The memory of batches that workers make, of all loaders of this process."""
    return [each for each in gc.get_objects() if type(each) is Arena]


def worker_pids() -> set[int | None]:
    return {process.pid for process in active_children()}


@in_every_way
def test_nothing_outlives_its_loader(arguments, budget, transform):
    """Thread and workers end with a broken-off iterator, unless they are persistent, with `close`, and with a deleted
    loader. What was handed out stays, an iterator goes on without its loader, and two at once have a place each."""
    expected = plain_batches(Numbers(LENGTH), transform)
    with closing(CachedDataset(Numbers(LENGTH), budget, transform=transform)) as dataset:
        loader, pids = CachedLoader(dataset, 4, **arguments), set[int | None]()
        for stop in (0, 5):
            iterator = iter(loader)
            batches = [next(iterator) for _ in range(stop + 1)]
            pids |= worker_pids()
            del iterator
            assert prefetch_threads() == 0
            assert worker_pids() == (pids if loader.persistent_workers else set())
            assert same(batches, expected[: stop + 1])
        assert not loader.persistent_workers or len(pids) == 2
        assert same([copied(batch) for batch in loader], expected)
        if transform is not None:  # batches that nobody asked for any more gave theirs back
            del batches
            gc.collect()
            assert all(memory.free_slots == memory.slots for memory in arenas())
        iterator = iter(loader)
        batch = next(iterator)
        loader.close()
        assert (worker_pids(), prefetch_threads()) == (set(), 0)
        assert next(iterator, None) is None
        assert same(batch, expected[0])
        iterator = iter(loader)
        got = [copied(next(iterator))]
        del loader
        got.extend(copied(batch) for batch in iterator)
        assert same(got, expected)
        del iterator
        gc.collect()
        assert worker_pids() == set()
        loader = CachedLoader(dataset, 4, **arguments)
        first = iter(loader)
        assert same(next(first), expected[0])
        got = [(copied(batch), copied(next(first, None))) for batch in loader]
        both = zip(expected[::2], expected[1::2], strict=True)  # persistent workers have one iterator, as in DataLoader
        each = zip(expected, [*expected[1:], None], strict=True)
        assert same(got, list(both if loader.persistent_workers else each))
        del first
        assert same([copied(batch) for batch in loader], expected)
        del loader
        assert arenas() == []
        assert worker_pids() == set()


FOLD = list(range(1, LENGTH, 4))


@pytest.mark.processes
@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("indices", [FOLD, None], ids=["slots for a fold", "slots for all"])
def test_workers_end_when_all_that_is_drawn_is_cached(indices):
    """Of a fold, too; where another one is drawn then, there are workers again, and batches are DataLoader's.
    Persistent ones stay, because they have a source of their own."""
    drawn, working = list(FOLD), []
    with closing(CachedDataset(Numbers(LENGTH), indices=indices)) as dataset:
        loader = CachedLoader(dataset, 3, sampler=drawn, num_workers=2, persistent_workers=indices is None)
        for epoch in range(4):
            if epoch == 2:  # the user changes it in place
                drawn[:] = range(0, LENGTH, 4)
            served = [(copied(batch), len(active_children())) for batch in loader]
            assert same([batch for batch, _ in served], list(DataLoader(Numbers(LENGTH), 3, sampler=drawn)))
            working.append(served[0][1])
        assert working == ([2, 2, 2, 2] if indices is None else [2, 0, 2, 2])
        loader.close()
        assert active_children() == []


@pytest.mark.processes
@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("transform", [None, to_float])
def test_a_batch_that_came_too_late_is_the_next_one_again(transform, tmp_path):
    """A time-out is an error, after which the answer still comes: to its own batch."""
    gate, numbers, expected = tmp_path / "gate", Numbers(LENGTH), plain_batches(Numbers(LENGTH), transform)
    gate.touch()  # it is open while the cache is made

    def gated(index: int) -> Any:
        if index == 13:  # a lock would be lost with a worker that is killed
            wait_until(gate.exists, 120)
        return numbers[index]

    with closing(CachedDataset(Made(gated, LENGTH), "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=1, prefetch_factor=1, timeout=0.3)
        iterator, got, errors = iter(loader), list[Any](), set[str]()
        gate.unlink()
        while len(got) < len(expected):
            try:
                got.append(copied(next(iterator)))
            except RuntimeError as error:  # on a busy machine the first batches may come too late, too
                errors.add(str(error))
                if len(got) == 13 // 4:
                    gate.touch()
        assert errors == {"DataLoader timed out after 0.3 seconds"}
        assert next(iterator, None) is None
        assert same(got, expected)


# ---- workers that wait load what nobody has asked for yet ----

IDLE = PERSISTENT | {"batch_size": 4}


def with_a_broken_one(index: int) -> Any:
    if index == 35:
        raise OSError(f"sample {index} is broken")
    return torch.full((3,), index), str(index)


@pytest.mark.processes
@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_idle_workers_fill_what_nobody_asked_for(tmp_path: Path, method: str) -> None:
    """After one batch all that has a slot is filled but a broken sample, whose error is for who asks for it."""
    source = Made(with_a_broken_one, LENGTH, tmp_path / "loads")
    with closing(CachedDataset(source, prefill=True)) as dataset:
        Path(source.log_path).unlink()
        loader = CachedLoader(dataset, multiprocessing_context=method, **IDLE)
        batches = iter(loader)
        first = next(batches)
        wait_until(lambda: dataset.cache is not None and dataset.cache.filled == LENGTH - 1)
        came = [first, *outcomes(batches)]
        loader.close()
        assert "sample 35 is broken" in str(came.pop(35 // 4))
        whole = [index for index in range(LENGTH) if index // 4 != 35 // 4]
        assert [text for _, texts in came for text in texts] == list(map(str, whole))
        assert first[0].tolist() == [[index] * 3 for index in range(4)]
        assert set(source.loaded) == set(range(LENGTH))
        assert source.loads <= LENGTH + 6  # the broken one is loaded again by who asks for it
        counts = totals(dataset)
        assert (counts.served, counts.fills, counts.bypasses) == (len(whole), LENGTH - 1, 0)
    with closing(CachedDataset(Made(with_a_broken_one, 34), "50%", prefill=True)) as dataset:
        loader = CachedLoader(dataset, multiprocessing_context=method, **IDLE)
        for _ in range(2):
            assert sum(len(texts) for _, texts in loader) == 34
        loader.close()
        assert totals(dataset).fills == 17


# ---- forks, and other threads ----


@pytest.mark.processes
@in_every_way
def test_a_forked_process_ends_no_epoch(arguments: dict[str, Any], budget: str, transform: Any) -> None:
    """It may close the loader, and let go of it and of its iterator: the epoch goes on in the process that began it."""
    with closing(CachedDataset(Numbers(LENGTH), budget, transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, timeout=60 if arguments else 0, **arguments)
        iterators = [iter(loader)]
        got = [copied(next(iterators[0]))]

        def let_go() -> None:
            nonlocal loader
            loader.close()
            del loader
            iterators.clear()
            gc.collect()

        assert ends_alive(let_go)
        got.extend(copied(batch) for batch in iterators[0])
        assert same(got, plain_batches(Numbers(LENGTH), transform))
        loader.close()


@pytest.mark.processes
def test_a_forked_process_has_no_batches_of_workers() -> None:
    """A plain DataLoader's epoch, too, is that of the process that began it: each batch comes once, and all come."""
    loader = CachedLoader(Numbers(LENGTH), 4, num_workers=2, timeout=60)
    batches = iter(loader)
    got = [next(batches)]

    def go_on() -> None:
        with suppress(Exception):
            list(batches)

    assert ends_alive(go_on)
    assert same([*got, *batches], plain_batches(Numbers(LENGTH)))
    loader.close()


@pytest.mark.processes
def test_a_forked_process_goes_on_while_the_thread_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gathers for itself what the thread of its parent was gathering at the fork, and has all batches."""
    numbers = Numbers(24, (3, 256, 256))  # two batches take as much memory as are gathered together
    expected, begun, go_on = plain_batches(numbers), threading.Event(), threading.Event()
    with closing(CachedDataset(numbers)) as dataset:
        loader = CachedLoader(dataset, 4)
        assert same([copied(batch) for batch in loader], expected)
        cache: Any = dataset.cache
        gather = cache.gather

        def held(*arguments: Any) -> None:
            if threading.current_thread().name.startswith(PREFETCH_THREAD):
                begun.set()
                go_on.wait(120)
            gather(*arguments)

        monkeypatch.setattr(cache, "gather", held)
        batches, got = iter(loader), list[Any]()
        while not begun.is_set():
            got.append(copied(next(batches)))
            begun.wait(0.1)  # the consumer is away, and a thread gathers meanwhile

        def go_on_here() -> None:
            signal.alarm(60)
            assert same([*got, *map(copied, batches)], expected)

        try:
            assert ends_alive(go_on_here)
        finally:
            go_on.set()
        assert same([*got, *map(copied, batches)], expected)


@pytest.mark.epoch_one_reads_all
@in_every_way
def test_another_thread_may_end_the_epoch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: dict[str, Any], budget: str, transform: Any
) -> None:
    """The batch under way comes, also from a slow worker, and then the iterating thread finds the epoch at its end."""
    shut, begun, numbers = tmp_path / "shut", tmp_path / "begun", Numbers(LENGTH)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # 5 s, after which a worker is killed

    def gated(index: int) -> Any:
        if index == 13 and shut.exists():
            begun.touch()
            wait_until(lambda: not shut.exists(), 120)
        return numbers[index]

    with closing(CachedDataset(Made(gated, LENGTH), budget, transform=transform)) as dataset:
        shut.touch()
        loader = CachedLoader(dataset, 4, **arguments)
        batches = iter(loader)
        got = [copied(next(batches))]
        thread = threading.Thread(target=lambda: got.extend(outcomes(batches)), daemon=True)
        thread.start()
        wait_until(begun.exists)
        threading.Timer(0.5, shut.unlink).start()
        loader.close()
        thread.join(60)
        assert not thread.is_alive()
        assert len(got) < 10
        assert same(got, plain_batches(numbers, transform)[: len(got)])
        assert (worker_pids(), prefetch_threads()) == (set(), 0)


# ---- the end of the interpreter ----

SCRIPT = """
import logging

import torch

from lightning_stocache import CachedDataset, CachedLoader
from lightning_stocache.cache.rows import SampleSpec

logging.getLogger("lightning_stocache").addHandler(logging.NullHandler())  # else it says what is cached
live, source = [], [torch.full((3,), number) for number in range(40)]
for transform in (None, torch.neg):
    for arguments in ({}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}):
        dataset = CachedDataset(source, "75%", transform=transform, spec=SampleSpec.infer(source[0]))
        dataset.__getitems__(list(range(10)))
        loader = CachedLoader(dataset, 4, **arguments)
        iterator = iter(loader)
        live.append((loader, iterator, next(iterator), next(iterator)))
"""


@pytest.mark.processes
def test_the_interpreter_ends_in_silence_with_iterators_alive():
    """All kinds of them, in the middle of an epoch: exit code 0, and not a word."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=job_environment(), timeout=280
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- Ctrl-C ----


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


class KeyboardAtCount(Keyboard):
    """Presses Ctrl-C while a batch that is handed out is counted."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Keyboard:
        return super().__call__(frame, event, argument) if frame.f_code is Ledger.add.__code__ else self


@pytest.mark.processes
def test_ctrl_c_while_a_batch_is_counted_ends_the_epoch() -> None:
    """Nobody gets the batch, so its workers end as in any other moment."""
    with closing(CachedDataset(Numbers(LENGTH), transform=jitter)) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=1)
        batches = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            KeyboardAtCount().next(batches, 1)
        assert [process for process in active_children() if process.is_alive()] == []
        assert next(batches, None) is None
        loader.close()


class KeyboardAtLock(Keyboard):
    """Presses Ctrl-C at the n-th moment at which a queue locks itself to send."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Keyboard:
        is_lock = frame.f_code is threading.Condition.__enter__.__code__
        if is_lock and frame.f_back is not None and frame.f_back.f_code is Queue.put.__code__:
            return super().__call__(frame, event, argument)
        return self


@pytest.mark.parametrize("arguments", [{"num_workers": 2}, PERSISTENT])
def test_ctrl_c_while_a_queue_is_locked_ends_the_epoch(arguments: dict[str, Any]) -> None:
    """The workers end, although the queue that they are told by has been left locked."""
    with closing(CachedDataset(Numbers(LENGTH), "50%")) as dataset:
        loader = CachedLoader(dataset, 4, **arguments)
        keyboard, batches = KeyboardAtLock(), iter(loader)
        with pytest.raises(KeyboardInterrupt):
            list(iter(lambda: keyboard.next(batches, 2), None))
        assert [process for process in active_children() if process.is_alive()] == []
        assert [labels.tolist() for _, labels in loader] == [
            labels.tolist() for _, labels in DataLoader(Numbers(LENGTH), 4)
        ]
        loader.close()


# ---- beginning again ----


ENDS = ["break", "Ctrl-C", "error of a worker"]


@pytest.mark.processes
@pytest.mark.parametrize("transform", [None, jitter])
def test_persistent_workers_begin_again_any_number_of_times(transform: Any) -> None:
    """Epochs broken off in every way, with two workers and nothing left of each; then a whole one."""
    source = Numbers(LENGTH, bad={17: OSError("sample 17 is broken")})
    with closing(CachedDataset(source, "50%", transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, **PERSISTENT)
        held: list[tuple[int, int, int]] = []
        handlers = set[Any]()
        for number in range(12):
            end, pressed, batches = ENDS[number % len(ENDS)], False, iter(loader)
            try:
                for at, _ in enumerate(batches):
                    if at == 2 and end == "break":
                        break
                    if at == 2 and end == "Ctrl-C":
                        Keyboard().next(batches, moment=number * 8)
            except KeyboardInterrupt:
                pressed = True
            except OSError:
                pass
            del batches
            assert len(active_children()) == (0 if pressed else 2)
            handlers.add(signal.getsignal(signal.SIGCHLD))
            wait_until(lambda: feeders() <= len(active_children()))
            gc.collect()
            mapped = re.findall("/dev/shm|/memfd:", Path("/proc/self/maps").read_text())
            held.append((len(os.listdir("/proc/self/fd")), threading.active_count(), len(mapped)))
        assert len(handlers) == 1
        assert all(later <= first for first, later in zip(map(max, *held[:6]), map(max, *held[6:]), strict=True))
        batches, labels = iter(loader), list[int]()
        for number in range(10):
            with pytest.raises(OSError) if number == 17 // 4 else nullcontext():
                labels += next(batches)[1].tolist()
        assert labels == [*range(16), *range(20, LENGTH)]
        loader.close()


def feeders() -> int:
    """The threads that feed workers: nobody joins those of workers that have ended, and they hold the queues."""
    return sum(thread.name == "QueueFeederThread" for thread in threading.enumerate())


def waits_for_a_request(worker: BaseProcess) -> bool:
    """Whether a worker is idle, as far as the kernel shows. In CPython 3.11 a signal in the `put` of its reply may lose
    a wake-up of the queue's thread, and the worker hangs."""
    place = Path(f"/proc/{worker.pid}/wchan").read_text()  # of one that runs "0", as where the kernel does not tell
    state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "S" and (place == "0" or "poll" in place)


@pytest.mark.processes
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


def test_memory_that_is_being_made_is_somebodys() -> None:
    """Whichever step Ctrl-C interrupts, no file stays open."""
    open_files, presses = len(os.listdir("/proc/self/fd")), 0
    for moment in itertools.count(1):
        try:
            Keyboard().next(map(Arena.create, [2], [1]), moment)
        except KeyboardInterrupt:
            presses += 1
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == open_files, moment
        if presses < moment:  # it was done before this moment came
            break
    assert presses > 20


@pytest.mark.processes
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


# ---- the thread, and steps that are not interrupted ----


def test_who_wants_what_is_under_way_waits_for_it() -> None:
    """Nobody else does it, its error is the consumer's, and the thread may be stopped from anywhere, twice."""
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

    thread.offer(work)
    assert begun.wait(120)
    threading.Timer(0.05, go_on.set).start()
    reference = weakref.ref(thread.result(work))
    assert len(done_by) == 1
    assert done_by[0] != threading.get_ident()
    wait_until(lambda: reference() is None)
    thread.result(work)  # which was not offered
    assert done_by[1:] == [threading.get_ident()]

    def fail() -> None:
        raise ZeroDivisionError

    thread.offer(fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            thread.result(fail)
    thread.offer(thread.stop)
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
