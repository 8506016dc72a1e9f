"""The processes that fill a rolling cache, and their supervision by the process that has started them.

A filler draws its share (`draws`), loads each sample and appends it. Its notes lie in memory that it shares with its
parent: how many samples it has appended and failed to load, which sample it loads, and since when. So the parent sees
that a filler hangs. The store has the number of samples that each filler has drawn (of a stream: since its beginning).
A restarted filler goes on behind that number, so it does not load the sample that killed it again. It has new seeds.

On a disk the number of drawn samples outlives the job. If the pool is smaller than the source, the fillers of the next
job go on behind that number, provided that the draws are the same. If the whole source has room, they draw from the
beginning of the source, verify the resident samples, and load the rest.

A sample that cannot be loaded, or does not match the codec, is left out. The filler sends its first error with the
traceback, and ends after `_MOST_FAILURES` failures in a row. A filler that dies is started again, at most
`_MOST_RESTARTS` times. `Fillers.look` does this on the trainer's own thread: when an epoch begins, while it waits for
the minimum, and about once a second while indices are drawn. Another thread must not fork, because the child could
inherit locks that the trainer's thread holds.

A filler ends with its parent, even if the parent is killed (`node.processes`).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
import zlib
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.placement import NO_SLOT
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.rolling_draws import FILLERS
from lightning_stocache.node.errors import trace_of
from lightning_stocache.node.processes import end_with_parent
from lightning_stocache.node.segment import Segment
from lightning_stocache.source.draws import Draws, EndOfStreamError
from lightning_stocache.torch_internals import become_worker

__all__ = ["Fillers"]

log = logging.getLogger(__name__)

_MOST_FAILURES = 20  # in a row
_MOST_RESTARTS = 3  # of one filler
_NOTES = _APPENDED, _FAILED, _SINCE, _INDEX, _STOP = range(5)  # of a filler
_END_SECONDS = 1.0  # that a filler has to end by itself
_LONGEST = 8000  # characters of a traceback, which must fit into a pipe that is not read meanwhile


class Fillers:
    """The fillers of one store, supervised by the process that has started them. They end with this object.

    Args:
        draws: the samples that they draw.
        store: the store that they append to.
        count: number of fillers.
        method: how fillers are started: fork, spawn or forkserver; None: the system's default.

    Raises:
        ValueError: `count` is too large.
        OSError: there is no memory for the notes.
        Exception: the source cannot be pickled, and fillers are not forked.
    """

    def __init__(self, draws: Draws, store: RollingStore, count: int, method: str | None = None) -> None:
        self._pid = os.getpid()
        self._processes: dict[int, tuple[BaseProcess, Connection]] = {}
        if count > FILLERS:
            raise ValueError(f"fillers must be at most {FILLERS}, got {count}")
        self._draws, self._store, self._count = draws, store, count
        self._context: Any = multiprocessing.get_context(method)
        self._restarts = [0] * count
        self.last_error: str | None = None
        self._plan_draws()
        size = 8 * count * len(_NOTES)
        self._memory = Segment.create(size, reserved=size)
        self._notes = _notes_in(self._memory, count)
        for number in range(count):
            self._start(number)

    def __del__(self) -> None:
        self.stop()

    @property
    def failed(self) -> int:
        """Number of samples that were left out: not loaded, or not matching the codec."""
        return int(self._notes[:, _FAILED].sum())

    @property
    def restarts(self) -> int:
        """How often a filler died and was started again."""
        return sum(self._restarts)

    def are_at_work(self) -> bool:
        """Whether any filler is at work. If none is, all their errors are logged."""
        self.look()
        return bool(self._processes)

    def look(self) -> None:
        """Log the errors of fillers, and start dead fillers again."""
        if os.getpid() != self._pid:
            return
        for number, (process, reports) in list(self._processes.items()):
            code = process.exitcode  # before the reports, so that no last report is missed
            try:
                while reports.poll():
                    self._report(reports.recv())
            except (EOFError, OSError):  # the filler has ended
                pass
            if code is not None:
                reports.close()
                del self._processes[number]
                if code != 0:  # with 0 the filler has drawn all samples, or has given up and reported it
                    self._restart(number, code)

    def _restart(self, number: int, code: int) -> None:
        """Start a dead filler again, unless it has died too often."""
        notes = self._notes[number]
        died = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = f"filler {number} died ({died}) after it had appended {notes[_APPENDED]} samples"
        if notes[_SINCE]:
            words += f", loading {_sample_name(int(notes[_INDEX]))}"
        if self._restarts[number] < _MOST_RESTARTS:
            log.warning("%s; it is started again, behind what it has drawn", words)
            self._restarts[number] += 1
            self._start(number)
        else:
            self._report(f"{words}, as it has {_MOST_RESTARTS} times before; it is not started again")

    def describe(self) -> str:
        """Describe which samples the fillers are loading, and for how long."""
        now, loading = time.monotonic_ns(), []
        for number in self._processes:
            since, index = int(self._notes[number, _SINCE]), int(self._notes[number, _INDEX])
            if since:
                loading.append(
                    f"filler {number} has been loading {_sample_name(index)} for {(now - since) / 1e9:.1f} s"
                )
        return "; ".join(loading) or "no filler is loading a sample"

    def stop(self) -> None:
        """End the fillers."""
        if os.getpid() != self._pid or not self._processes:
            return
        self._notes[:, _STOP] = 1
        end = time.monotonic() + _END_SECONDS
        for process, reports in self._processes.values():
            process.join(max(end - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()
            reports.close()
            process.close()
        self._processes.clear()

    def _plan_draws(self) -> None:
        """Forget what the last job has drawn, unless the fillers can go on behind it."""
        draws = self._draws
        plan = zlib.crc32(repr((draws.seed, self._count, draws.length, draws.shuffle)).encode())
        if self._store.draws.plan(plan, goes_on=draws.passes is None and draws.length is not None):
            log.warning(
                "the fillers draw from the beginning again: the last job had another source length, seed, shuffle "
                "or number of fillers"
            )

    def _start(self, number: int) -> None:
        reports, theirs = self._context.Pipe(duplex=False)
        work = (self._draws, self._store, self._memory, self._count, number, self._restarts[number], theirs)
        process = self._context.Process(target=_fill, args=work, daemon=True, name=f"filler {number}")
        self._notes[number, _SINCE] = 0
        process.start()
        theirs.close()
        self._processes[number] = process, reports

    def _report(self, words: str) -> None:
        self.last_error = words
        log.warning(words)


def _sample_name(index: int) -> str:
    return "its next sample" if index < 0 else f"sample {index}"


def _notes_in(memory: Segment, count: int) -> npt.NDArray[np.int64]:
    """The notes of fillers, int64 `[fillers, notes]`, live."""
    return np.frombuffer(memory.memory(0, memory.size), np.int64).reshape(count, len(_NOTES))


def _fill(
    draws: Draws, store: RollingStore, memory: Segment, count: int, number: int, restarts: int, reports: Connection
) -> None:
    """Run a filler."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which ends its fillers
    end_with_parent()
    torch.set_num_threads(1)
    seed = draws.seed + number + restarts * count
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    become_worker(number, count, seed, draws.source)
    notes = _notes_in(memory, count)[number]
    in_a_row = 0
    drawn = store.draws.count(number)
    length = 0 if draws.passes is None else draws.length or 0
    indices, slots = store.slots_by_index(length)
    resident = np.full(length, NO_SLOT)
    resident[indices] = slots
    for draw in draws.share(number, count, drawn):
        if notes[_STOP]:
            return
        drawn += 1
        store.draws.note(number, drawn)
        slot = int(resident[draw.index]) if length else NO_SLOT
        if slot != NO_SLOT and store.is_sound(slot):
            continue
        notes[_INDEX], notes[_SINCE] = draw.index, time.monotonic_ns()
        task = "load"
        try:
            sample = draw.load()
            notes[_SINCE], task = 0, "store"
            while (is_stored := store.append(sample, draw.index)) is False:
                if notes[_STOP]:
                    return
                time.sleep(0.001)  # the next slot is still being written, or the system refuses samples for a while
        except EndOfStreamError:
            notes[_SINCE] = drawn = 0
            store.draws.note(number, drawn)
        except Exception as error:  # the source is the user's, and may raise anything
            notes[_SINCE] = 0
            notes[_FAILED] += 1
            in_a_row += 1
            ends = in_a_row >= _MOST_FAILURES
            if ends or int(notes[_FAILED]) == 1:
                trace = trace_of(error)[-_LONGEST:]
                outcome = f"after {in_a_row} failures in a row the filler ends" if ends else "others are only counted"
                name = _sample_name(draw.index)
                words = f"filler {number} could not {task} {name}, which is left out; {outcome}:\n{trace}"
                reports.send(words)
            if ends:
                return
        else:
            notes[_APPENDED] += is_stored is True
            in_a_row = 0
