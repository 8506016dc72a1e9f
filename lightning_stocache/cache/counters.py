"""Counters of a cache: every process counts on its own row.

A segment holds rows of sixteen 64-bit numbers: the rank plus one (zero marks an unused row), then the columns of
`Counts`. The last numbers of the first row belong to all processes: which warnings the node has had, whether the source
has changed, and what it has cost so far to read stored samples again. The last numbers of the second row, too: how many
keys were no indices, and whether a copy of the source has said a change of samples.

A process takes a row at its first count, with the lock of the row's byte, which the kernel frees when the process ends.
A free row with a rank is taken only by a process of the same rank, which goes on adding. So nothing is ever reset, no
two writers share a row, and the counts of an epoch are the difference of two sums. Every process may read; a sum that
is read while others count is at most one addition old. A process without a row (beyond a thousand on a node) counts
nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

import numpy as np

from lightning_stocache.cache.head import columns
from lightning_stocache.node.files import Backend
from lightning_stocache.node.segment import Segment

__all__ = ["Counters", "Counts", "Matter", "Served", "count", "noted", "served_in"]

Matter = Literal["odd sample", "random sample", "changed source", "slow disk", "ranks alone", "keys", "copies"]
"""The subjects of warnings that a node has once."""

Served: TypeAlias = tuple[int, int, int]
"""Numbers of samples: hits, misses and bypasses."""

_ROWS = 1024  # 128 KiB, reserved at once: a row without memory must not end a training
_COLUMNS = 16
_BYTES = _ROWS * _COLUMNS * 8


@dataclass(frozen=True)
class Counts:
    """Numbers of samples, bytes and nanoseconds, to add and subtract. `hits + misses + bypasses` is the number served.

    Args:
        hits: samples served from their slot.
        misses: samples that had to be loaded although they have a slot here.
        bypasses: samples loaded that have no slot here.
        fills: samples stored into their slot.
        bytes_from_cache: bytes of the hits.
        bytes_from_source: bytes of the misses and bypasses, as they would lie in a slot.
        source_ns: nanoseconds spent in the source, summed over processes.
        fill_ns: nanoseconds spent on checking and storing samples.
        gather_ns: nanoseconds spent on copying hits out of their slots, also on the prefetching thread.
        setup_fills: samples that set-up has stored. They belong to no epoch, and are no `fills`: epoch one hits them.

    Example:
        >>> (Counts(hits=3, misses=1) - Counts(hits=1)).served
        3
    """

    hits: int = 0
    misses: int = 0
    bypasses: int = 0
    fills: int = 0
    bytes_from_cache: int = 0
    bytes_from_source: int = 0
    source_ns: int = 0
    fill_ns: int = 0
    gather_ns: int = 0
    setup_fills: int = 0

    @property
    def served(self) -> int:
        """Samples served, whether or not a trainer has used them."""
        return self.hits + self.misses + self.bypasses

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(left + right for left, right in zip(self.values(), other.values(), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(left - right for left, right in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        """The numbers in the order of the fields, as a vector to reduce over ranks."""
        return tuple(vars(self).values())  # astuple copies each number, which takes 50 us


_PLACE = {column.name: place for place, column in enumerate(fields(Counts), start=1)}
# Columns for all processes, in the first row:
_WARNINGS = _COLUMNS - 1  # one bit for each matter
_CHANGED = _COLUMNS - 2  # whether the source has changed
_BEGUN = _COLUMNS - 3  # the moment, in nanoseconds, from which the time of the training counts
_SPENT = _COLUMNS - 4  # nanoseconds in which stored samples were read again
_LOOKED = _COLUMNS - 5  # number of these samples
# In the second row:
_OTHER_KEYS = _COLUMNS - 1  # number of keys that were no indices
_COPY_CHANGED = _COLUMNS - 2  # whether a copy of the source has said that samples have changed
_MATTERS = {matter: 1 << place for place, matter in enumerate(get_args(Matter))}


class Counters:
    """The rows of all processes of a node that use one cache. This process counts for `rank`.

    `here` has, for each thread of this process, what `noted` notes.

    Example:
        >>> counters = Counters.create()
        >>> counters.add(hits=2, bytes_from_cache=64)
        >>> counters.totals().hits
        2
        >>> counters.close()
    """

    def __init__(self, segment: Segment, rank: int = 0) -> None:
        self.segment, self.rank = segment, rank
        self._rows = columns(segment, {"row": (np.int64, (_COLUMNS,))}, _ROWS)["row"]
        self._pid = 0
        self._row: memoryview | None = None
        self.here = threading.local()

    @classmethod
    def create(cls, rank: int = 0, backend: Backend | None = None) -> Counters:
        """Make the rows. Raises OSError if there is no memory for them."""
        return cls(Segment.create(_BYTES, backend, reserved=_BYTES), rank)

    def __reduce__(self) -> tuple[type[Counters], tuple[Segment, int]]:
        return type(self), (self.segment, self.rank)

    def add(self, **counts: int) -> None:
        """Add to this process's row, by the names of `Counts`, in 0.2 us per number."""
        if self.segment.closed:
            return
        note: Counter[str] | None = getattr(self.here, "note", None)
        if note is not None:
            note.update(counts)
        if self._pid != os.getpid():  # the first count in this process
            self._row, self._pid = self._take_row(), os.getpid()
        if (row := self._row) is not None:
            for name, count in counts.items():
                row[_PLACE[name]] += count

    def is_first(self, matter: Matter) -> bool:
        """Whether this is the node's first call for a matter. Then the caller warns for the whole node."""

        def note() -> bool:
            first = not self._rows[0, _WARNINGS] & _MATTERS[matter]
            self._rows[0, _WARNINGS] |= _MATTERS[matter]
            return first

        return not self.closed and self.segment.in_turn(note) is True

    def take_matters(self, other: Counters) -> None:
        """Give no warning that the node has had from counters that these replace."""
        self._rows[0, _WARNINGS] |= other._rows[0, _WARNINGS]

    def say_changed(self) -> None:
        """Say to all processes that the source has changed: none serves a stored sample from now on."""
        if not self.closed:
            self._rows[0, _CHANGED] = 1

    @property
    def says_changed(self) -> bool:
        """Whether a process has said that the source has changed."""
        return not self.closed and bool(self._rows[0, _CHANGED])

    def say_copy_changed(self) -> None:
        """Note that samples change in a copy of the source, and not in the original."""
        if not self.closed:
            self._rows[1, _COPY_CHANGED] = 1

    @property
    def copy_has_changed(self) -> bool:
        """Whether samples have changed in a copy of the source."""
        return not self.closed and bool(self._rows[1, _COPY_CHANGED])

    def add_other_keys(self, count: int) -> int:
        """Count keys that were no indices. Returns the number that all processes have counted."""

        def add() -> int:
            self._rows[1, _OTHER_KEYS] += count
            return int(self._rows[1, _OTHER_KEYS])

        return 0 if self.closed else self.segment.in_turn(add) or 0

    def begin_looks(self) -> int:
        """The time of the training so far, in nanoseconds; the first call of all processes begins it."""
        now = time.monotonic_ns()
        if self.closed:
            return 0
        if not self._rows[0, _BEGUN]:
            self._rows[0, _BEGUN] = now
        return now - int(self._rows[0, _BEGUN])

    def add_look(self, samples: int, spent_ns: int) -> None:
        """Note that stored samples were read again. They are in no count: they count as hits when they are served."""

        def add() -> None:
            self._rows[0, _LOOKED] += samples
            self._rows[0, _SPENT] += spent_ns

        if not self.closed:
            self.segment.in_turn(add)

    @property
    def looks(self) -> tuple[int, int]:
        """The number of stored samples that all processes have read again, and the nanoseconds that this took."""
        return (0, 0) if self.closed else (int(self._rows[0, _LOOKED]), int(self._rows[0, _SPENT]))

    def totals(self, rank: int | None = None) -> Counts:
        """The sum over all rows, or over the rows of one rank."""
        if self.closed:
            return Counts()
        owners = self._rows[:, 0]
        rows = self._rows[owners > 0 if rank is None else owners == rank + 1]
        return Counts(*rows[:, 1 : 1 + len(_PLACE)].sum(0).tolist())

    @property
    def closed(self) -> bool:
        """Whether this process has closed the rows."""
        return self.segment.closed

    def unlink(self) -> None:
        """Remove the name of the file, if it has one."""
        self.segment.unlink()

    def close(self) -> None:
        """Close the rows in this process. Nothing is counted from then on."""
        self._rows = np.empty((0, _COLUMNS), dtype=np.int64)
        self._row, self._pid = None, 0
        self.segment.close()

    def _take_row(self) -> memoryview | None:
        for number in range(_ROWS):
            row: memoryview = self._rows[number].data
            if row[0] in (0, self.rank + 1) and self.segment.lock(number):
                if row[0] in (0, self.rank + 1):
                    row[0] = self.rank + 1
                    return row
                self.segment.unlock(number)  # a process of another rank took the row between our look and our lock
        return None


def count(counters: Counters | None, **counts: int) -> None:
    """Add to counters, if there are any: a dataset that passes through has none."""
    if counters is not None:
        counters.add(**counts)


@contextmanager
def noted(counters: Counters | None) -> Iterator[Counter[str]]:
    """Note what this thread counts in a context, by the names of `Counts`. Others may count meanwhile."""
    note = Counter[str]()
    if counters is None:
        yield note
        return
    here = counters.here
    here.note, before = note, getattr(here, "note", None)
    try:
        yield note
    finally:
        here.note = before


def served_in(note: Counter[str]) -> Served:
    """The samples that were served, of what was noted."""
    return note["hits"], note["misses"], note["bypasses"]
