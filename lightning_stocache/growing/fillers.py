"""The processes that fill a rolling cache, and who looks after them.

A filler draws its share (`draws`), loads each sample and appends it. Its notes lie in the store, beside the slots: how
many samples it has drawn (of a stream: since its beginning), appended and failed to load, what it loads and since when.
So a filler that hangs is seen, and one that is started anew leaves out what the last one has drawn, the sample that
killed it included. Its seeds are others.

A sample that cannot be loaded, or is not of the codec, is left out. The first error of a filler is sent with its
traceback; after `MOST_FAILURES` in a row the filler ends. A filler that dies is started anew, at most `MOST_RESTARTS`
times; one that could not begin is not. `Fillers.look` does this on the trainer's own thread: when an epoch begins,
while it waits for a minimum, and about once a second while indices are drawn. A process that is forked in the middle of
another thread's work may inherit its locks.

A filler ends with its parent, however that ends (`node.processes`).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import random
import signal
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from lightning_stocache.cache.rolling import FILLERS, RollingStore
from lightning_stocache.node.processes import end_with_parent, not_sent, why_not_begun
from lightning_stocache.source.draws import Draws, EndOfStreamError
from lightning_stocache.torch_internals import become_worker

__all__ = ["MOST_FAILURES", "MOST_RESTARTS", "Fillers"]

log = logging.getLogger(__name__)

MOST_FAILURES = 20  # in a row
MOST_RESTARTS = 3  # of one filler
_DRAWN, _APPENDED, _FAILED, _SINCE, _INDEX, _STOP = range(6)  # the notes of a filler
_END_SECONDS = 1.0  # for a filler to end by itself
_LONGEST = 8000  # characters of a traceback, so that it fits in a pipe that nobody reads


class Fillers:
    """The fillers of one store, looked after by the process that has started them.

    Args:
        draws: what they draw.
        store: where it goes.
        count: how many there are.
        method: how they are started: fork, spawn or forkserver; None: as the system does.

    Raises:
        ValueError: they are too many.
        TypeError: the source cannot be sent to a process that is not forked.
    """

    def __init__(self, draws: Draws, store: RollingStore, count: int, method: str | None = None) -> None:
        if not 0 <= count <= FILLERS:
            raise ValueError(f"fillers must be between 0 and {FILLERS}, got {count}")
        self._draws, self._store, self._count = draws, store, count
        self._context = multiprocessing.get_context(method)
        self._processes: dict[int, tuple[BaseProcess, Connection]] = {}
        self._pid = os.getpid()
        self._restarts = [0] * count
        self.last_error: str | None = None
        try:
            for number in range(count):
                self._start(number)
        except BaseException:  # the source cannot be sent, or there is no process more
            self.stop()
            raise

    @property
    def failed(self) -> int:
        """Samples that could not be loaded or are of another kind, and were left out."""
        return int(self._notes[:, _FAILED].sum())

    @property
    def restarts(self) -> int:
        """Fillers that died and were started anew."""
        return sum(self._restarts)

    def are_at_work(self) -> bool:
        """Whether any filler is at work. Those that have ended have told their last errors."""
        self.look()
        if not all(process.is_alive() for process, _ in self._processes.values()):
            self.look()  # it ended behind the look
        return bool(self._processes)

    def look(self) -> None:
        """Log the errors of fillers, and start those anew that have died."""
        if os.getpid() != self._pid:
            return
        for number, (process, reports) in list(self._processes.items()):
            code = process.exitcode  # before its last words are read
            try:
                while reports.poll():
                    self._tell(reports.recv())
            except (EOFError, OSError):  # it has ended
                pass
            if code is not None:
                reports.close()
                del self._processes[number]
                if code != 0:  # else it has drawn all that there is, or has given up and said so
                    self._replace(number, code)

    def _replace(self, number: int, code: int) -> None:
        """Start a filler anew that has died, unless that makes no sense."""
        notes = self._notes[number]
        died = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = f"filler {number} died ({died}) after it had appended {notes[_APPENDED]} samples"
        if notes[_SINCE]:
            words += f", loading {_named(int(notes[_INDEX]))}"
        why = why_not_begun(self._context.get_start_method()) if code > 0 else ""
        if why and not notes[: _FAILED + 1].any():
            self._tell(f"{words}. {why}")
        elif self._restarts[number] < MOST_RESTARTS:
            log.warning("%s; it is started anew, behind that sample", words)
            self._restarts[number] += 1
            self._start(number)
        else:
            self._tell(f"{words}, as it has {MOST_RESTARTS} times before; it is not started again")

    def describe(self) -> str:
        """What the fillers are loading, and for how long, for people."""
        now, loading = time.monotonic_ns(), []
        for number in self._processes:
            since, index = int(self._notes[number, _SINCE]), int(self._notes[number, _INDEX])
            if since:
                loading.append(f"filler {number} has been loading {_named(index)} for {(now - since) / 1e9:.1f} s")
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
                process.terminate()
                process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            reports.close()
            process.close()
        self._processes.clear()

    @property
    def _notes(self) -> Any:
        return self._store.notes[: self._count]

    def _start(self, number: int) -> None:
        reports, theirs = self._context.Pipe(duplex=False)
        work = (self._draws, self._store, self._count, number, self._restarts[number], theirs)
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=_fill, args=work, daemon=True, name=f"filler {number}"
        )
        self._notes[number, _SINCE] = self._notes[number, _STOP] = 0
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
            raise TypeError(not_sent(self._context.get_start_method(), error)) from error
        theirs.close()
        self._processes[number] = process, reports

    def _tell(self, words: str) -> None:
        self.last_error = words
        log.warning(words)


def _named(index: int) -> str:
    return "its next sample" if index < 0 else f"sample {index}"


def _fill(draws: Draws, store: RollingStore, count: int, number: int, restarts: int, reports: Connection) -> None:
    """What a filler does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which ends its fillers
    end_with_parent()
    torch.set_num_threads(1)
    seed = draws.seed + number + restarts * count
    random.seed(seed), np.random.seed(seed % 2**32), torch.manual_seed(seed)
    become_worker(number, count, seed, draws.source)
    notes, in_a_row = store.notes[number], 0
    for draw in draws.share(number, count, int(notes[_DRAWN])):
        if notes[_STOP]:
            return
        notes[_INDEX], notes[_SINCE] = draw.index, time.monotonic_ns()
        notes[_DRAWN] += 1
        try:
            sample = draw.load()
            notes[_SINCE] = 0
            while not store.append(sample, draw.index):
                if notes[_STOP]:
                    return
                time.sleep(0.001)  # all slots are being written
        except EndOfStreamError:
            notes[_SINCE] = notes[_DRAWN] = 0
        except Exception as error:  # the source is the user's, and may raise anything
            notes[_SINCE] = 0
            notes[_FAILED] += 1
            in_a_row += 1
            ends = in_a_row >= MOST_FAILURES
            if ends or int(notes[_FAILED]) == 1:
                trace = "".join(traceback.format_exception(error))[-_LONGEST:]
                outcome = f"after {in_a_row} failures in a row the filler ends" if ends else "others are only counted"
                words = f"filler {number} could not load {_named(draw.index)}, which is left out; {outcome}:\n{trace}"
                reports.send(words)
            if ends:
                return
        else:
            notes[_APPENDED] += 1
            in_a_row = 0
