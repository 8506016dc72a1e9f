"""What a read of a source moves is put back, and numbers that count reads are found."""

import array
import gzip
import io
import mmap
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.source.snapshot import MovedNumbers, Snapshot

_total = 0
_log = [0]


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Source:
    """Has state of every kind."""

    shared, reads = [1], 0

    def __init__(self) -> None:
        self.calls, self.memo, self.last = 3, {"a": 1}, deque([1, 2], maxlen=2)
        self.seen, self.ordered = {1}, OrderedDict(a=1)
        self.counts, self.weights = np.zeros(4, dtype=np.int64), torch.zeros(3)
        self.file, self.inside = io.BytesIO(bytes(100)), {"deep": [[1]]}
        self.closure, self.slotted = _closure(), Slotted()


def _closure() -> Callable[[], int]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


def _count_globally(source: Any) -> None:
    global _total
    _total += 1
    _log.append(1)


def _new_attribute(source: Any) -> None:
    source.opened = open(__file__)  # noqa: SIM115
    source.opened.close()


MOVES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda source: setattr(source, "calls", 9), lambda source: source.calls),
    "new attribute": (_new_attribute, lambda source: hasattr(source, "opened")),
    "deleted": (lambda source: delattr(source, "calls"), lambda source: hasattr(source, "calls")),
    "dict": (lambda source: source.memo.update(b=2), lambda source: dict(source.memo)),
    "ordered": (lambda source: source.ordered.clear(), lambda source: type(source.ordered)(source.ordered)),
    "deque": (lambda source: source.last.append(7), lambda source: list(source.last)),
    "set": (lambda source: source.seen.add(5), lambda source: set(source.seen)),
    "nested": (lambda source: source.inside["deep"][0].append(3), lambda source: str(source.inside)),
    "array": (lambda source: np.add.at(source.counts, 1, 1), lambda source: source.counts.tolist()),
    "tensor": (lambda source: source.weights.add_(1), lambda source: source.weights.tolist()),
    "of the class": (lambda source: source.shared.append(2), lambda source: list(source.shared)),
    "a class's": (lambda source: setattr(type(source), "reads", 5), lambda source: type(source).reads),
    "closure": (lambda source: source.closure(), lambda source: source.closure.__closure__[0].cell_contents),
    "slot": (lambda source: setattr(source.slotted, "calls", 2), lambda source: source.slotted.calls),
    "function": (lambda source: setattr(source.closure, "calls", 2), lambda source: hasattr(source.closure, "calls")),
    "file": (lambda source: source.file.read(7), lambda source: source.file.tell()),
}


@pytest.mark.parametrize("kind", MOVES)
def test_state_is_put_back(kind: str) -> None:
    """The object itself is as before, wherever the state lies."""
    move, content = MOVES[kind]
    source = Source()
    before = content(source)
    snapshot = Snapshot(source)
    move(source)
    assert content(source) != before
    assert snapshot.put_back() is None
    assert content(source) == before


class Global(Source):
    def __getitem__(self, index: int) -> int:
        _count_globally(self)
        return index


def test_globals_that_the_code_names_are_put_back() -> None:
    """Also those of a function that it calls; other globals are left alone."""
    source = Global()
    snapshot = Snapshot(source)
    source[0]
    assert (_total, _log) == (1, [0, 1])
    assert snapshot.put_back() is None
    assert (_total, _log) == (0, [0])


def test_a_compressed_file_goes_back_with_the_file_inside(tmp_path: Path) -> None:
    """It reads on as if nothing had been read, both within its buffer and far behind."""
    content = np.random.default_rng(0).bytes(400_000)
    (tmp_path / "file.gz").write_bytes(gzip.compress(content))
    source = Source()
    for ahead in (10, 300_000):
        with gzip.open(tmp_path / "file.gz") as source.file:
            source.file.read(1000)
            snapshot = Snapshot(source)
            source.file.seek(ahead)
            source.file.read(500)
            assert snapshot.put_back() is None
            assert source.file.read() == content[1000:]


class Forward(io.RawIOBase):
    """A file that only goes on."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def readinto(self, buffer: Any) -> int:
        return os.readv(self.descriptor, [buffer])

    def tell(self) -> int:
        return os.lseek(self.descriptor, 0, os.SEEK_CUR)


def test_a_text_file_goes_back(tmp_path: Path) -> None:
    """Also in the middle of an iteration, where it does not tell its position."""
    (tmp_path / "lines").write_text("".join(f"{number}\n" for number in range(10_000)))
    source = Source()
    with open(tmp_path / "lines") as source.file:
        source.file.readline()
        snapshot = Snapshot(source)
        next(source.file)
        assert snapshot.put_back() is None
        assert source.file.readline() == "1\n"


def test_a_file_that_cannot_go_back_is_named() -> None:
    """The caller then leaves the source alone."""
    source, descriptor = Source(), os.open(__file__, os.O_RDONLY)
    source.file = Forward(descriptor)
    snapshot = Snapshot(source)
    source.file.read(3)
    assert snapshot.put_back() == "the position of Source.file"
    os.close(descriptor)


def test_the_position_of_a_descriptor_counts_if_it_is_read(tmp_path: Path) -> None:
    """Other processes write to a log that they share."""
    (tmp_path / "read").write_bytes(bytes(10))
    read, log = os.open(tmp_path / "read", os.O_RDONLY), os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    snapshot = Snapshot(Source())
    os.write(log, b"a line")
    assert snapshot.put_back() is None
    os.read(read, 3)
    assert snapshot.put_back() == f"the position in {tmp_path / 'read'}"
    os.close(read), os.close(log)


def test_memory_that_processes_share_is_left_alone(tmp_path: Path) -> None:
    """Others write to it at any time: shared tensors, arrays and mapped files."""
    source: Any = Source()
    source.counts = np.frombuffer(mmap.mmap(-1, 24), dtype=np.int64)  # as of `multiprocessing.Array`
    source.weights = torch.zeros(3, dtype=torch.int64).share_memory_()
    source.mapped = np.memmap(tmp_path / "file", np.int64, "w+", shape=3)
    counters, snapshot = MovedNumbers(source), Snapshot(source)
    for memory in (source.counts, source.weights, source.mapped):
        memory[1] += 1
    assert counters.look() == []
    assert snapshot.put_back() is None
    assert [int(memory[1]) for memory in (source.counts, source.weights, source.mapped)] == [1, 1, 1]


def test_only_numbers_that_grow_with_each_read_are_counts() -> None:
    """Not a position, a clock, or a number that has grown once; steps are equal."""
    source: Any = Source()
    source.position, source.clock, source.once, source.list, source.array = 0, 0, 0, [5, 5], array.array("i", [1])
    counters = MovedNumbers(source)
    for read in range(3):
        source.calls += 1
        source.list[1] += 2
        source.counts[2] += 1
        source.position = 7 if read else 3
        source.clock += 10**9 + read * 10**7
        source.once = 1
        found = counters.look()
    assert sorted(found) == ["Source.calls", "Source.counts", "Source.list[1]"]
    with counters.ahead(length=1000):
        assert source.calls // 1000 == source.list[1] // 2000 == source.counts[2] // 1000 == 1_000_003
        assert (source.position, source.list[0], source.counts[0]) == (7, 5, 0)
    assert (source.calls, source.list, source.counts[2]) == (6, [5, 11], 3)
