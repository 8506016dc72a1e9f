"""Notice that a source changes, or is random, while it is served.

`SourceState` sees changes: a curriculum sets `dataset.strength`, a callback swaps `dataset.transform` late in training.

A source that is random in few samples only, and draws from a hidden generator, passes the look at set-up, and its
first draw would be frozen. `Recheck` reads samples of a map-style source again; `StreamReader` watches the generators
while a stream is read.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import accumulate
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

from torch.utils.data import Dataset, get_worker_info

from lightning_stocache.source.access import iterate
from lightning_stocache.source.generators import KINDS, Generators
from lightning_stocache.source.random_split import Probe
from lightning_stocache.source.samples import bits

__all__ = ["Recheck", "SourceState", "StreamReader"]

log = logging.getLogger(__name__)

_MOST_PARTS = 64  # of a source with a whole network inside, for instance: each costs about 0.1 us per look
_MOST_STEPS = 64  # in a list that may hold transforms: a longer one holds data
_FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType)
_MISSING = object()
_FIRST_GAP = 64  # loads before the first second read may come
_MOST_RECHECKS = 8
_WATCHED = 32  # samples of a stream that are watched in any case
_SLOW_NS = 1_000_000  # a sample of a stream that takes so long is watched, too: watching takes 0.05 ms


# ---- changed ----


@dataclass
class _Part:
    """The attributes of a dataset or transform, or the entries of a list of them.

    Args:
        path: where it lies in the source, for messages.
        live: the `__dict__`, or the list itself.
        seen: a copy of its earlier content.
        kind: class of the object, whose attributes stand for those that the object lacks; None for a list.
    """

    path: str
    live: Any
    seen: Any
    kind: type | None


class SourceState:
    """The attributes of a source, compared with those of an earlier moment.

    Compared are the source, the datasets inside it (Subset, ConcatDataset, wrappers) and their transforms, down to the
    lists of steps. An attribute has changed if it holds another object that is not equal to the one before. Not counted
    are files and databases, generators, the length of a source that grows, and attributes that move when the source is
    read (a counter, a memo): every read of this process stands in a `with`, which learns them. Changes inside any other
    object are not seen: a list of files that is sorted, a tensor that is written to.

    A copy, in this or another process, is compared with its state when it was made. In a loader's worker a new name is
    no change: `worker_init_fn` tells the worker's copy who it is.

    Args:
        source: the user's dataset.
        tail: transforms that run after the cache, where changes inside them take effect at once.

    Example:
        >>> class Noise(Dataset):
        ...     strength = 1
        ...
        ...     def __len__(self):
        ...         return 8
        >>> source = Noise()
        >>> state = SourceState(source)
        >>> source.strength = 2
        >>> state.look()
        'strength'
    """

    def __init__(self, source: Any, tail: Collection[Callable[..., Any]] = ()) -> None:
        self._source, self._tail = source, tail
        self._length = len(source)
        self._moves = set[str]()  # where reading the source moves something
        self._parts = self._remember()
        self._change: str | None = None

    def look(self) -> str | None:
        """Where the source has changed, for instance `transform.p`; None while it has not. The first change stays."""
        if self._change is None and (found := self._differences()):
            self._change, self._parts = found[0], []  # they hold objects that the user may have replaced to free them
        return self._change

    def __enter__(self) -> None:
        """Begin a read of the source by this process."""

    def __exit__(self, *_: object) -> None:
        """End the read, and learn what it has moved."""
        self._moves.update(self._differences())

    def _differences(self) -> list[str]:
        """The paths of attributes that have changed since the last look."""
        found: list[str] = []
        for part in self._parts:
            if _same(part.live, part.seen):  # fast if the objects are identical
                continue
            live, seen = _entries(part.live), _entries(part.seen)
            for name in {**seen, **live}:
                default = _MISSING if part.kind is None else getattr(part.kind, name, _MISSING)
                if self._is_change(seen.get(name, default), live.get(name, default)):
                    found.append(_inside(part.path, name, part.kind))
            part.seen = part.live.copy()
        return [path for path in found if path not in self._moves]

    def _is_change(self, old: Any, new: Any) -> bool:
        """Whether a new value of an attribute changes the source."""
        if _same(old, new) or (_is_handle(old) and _is_handle(new)):
            return False
        if old is _MISSING and get_worker_info() is not None:
            return False
        if self._tail or not _same((old, new), (self._length, len(self._source))):
            return True  # a source that was cut cannot tell its copy that it has grown
        self._length = new
        return False

    def _remember(self) -> list[_Part]:
        parts: list[_Part] = []
        known, waiting = set(map(id, self._tail)), deque([("", self._source)])
        while waiting and len(parts) < _MOST_PARTS:
            path, node = waiting.popleft()
            if id(node) in known:
                continue
            known.add(id(node))
            if _has_state(node) or (node is self._source and hasattr(node, "__dict__")):
                live, kind = vars(node), type(node)
            elif isinstance(node, list | tuple | dict) and len(node) <= _MOST_STEPS:
                live, kind = cast(Any, node), None
                if not any(map(_has_state, _entries(live).values())):
                    continue
            else:
                continue
            if not isinstance(live, tuple):
                parts.append(_Part(path, live, live.copy(), kind))
            waiting += [(_inside(path, name, kind), value) for name, value in _entries(live).items()]
        return parts

    def __getstate__(self) -> dict[str, Any]:
        self.look()
        return self.__dict__ | {"_parts": []}  # they hold objects that the source itself may not send

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._parts = self._remember() if self._change is None else []


def _has_state(node: Any) -> bool:
    """Whether it is a dataset or a transform: an object whose attributes decide what samples are."""
    decides = isinstance(node, Dataset) or (callable(node) and not isinstance(node, _FUNCTIONS))
    return decides and hasattr(node, "__dict__")


def _is_handle(value: Any) -> bool:
    """Whether it is an open file or the like, a generator that may be seeded anew, or nothing yet."""
    if value is None or value is _MISSING or isinstance(value, KINDS):
        return True
    return hasattr(value, "close") and not isinstance(value, Dataset)


def _entries(container: Any) -> dict[Any, Any]:
    return container if isinstance(container, dict) else dict(enumerate(container))


def _inside(path: str, name: Any, kind: type | None) -> str:
    if kind is None:
        return f"{path}[{name!r}]"
    return f"{path}.{name}" if path else name


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    try:
        return bool(old == new)
    except Exception:  # arrays and tensors have no such answer, and objects of users may raise anything
        return False


# ---- random ----


class Recheck:
    """Reads a few samples a second time while a cache fills, under other seeds, and warns if one is different.

    Of all samples that this process loads, about the 100th is read again, and seven later ones at growing distances.
    All generators are put back.

    Args:
        source: the dataset that is read.
        first_to_tell: returns whether no process of this node has warned yet.
    """

    def __init__(self, source: Dataset[Any], first_to_tell: Callable[[], bool]) -> None:
        self._source, self._first_to_tell = source, first_to_tell
        self._dice = random.Random()  # not a process-wide one, whose draws are the user's
        gaps = (_FIRST_GAP << number for number in range(_MOST_RECHECKS))
        self._due = set(accumulate(gap + self._dice.randrange(gap) for gap in gaps))
        self._loads = 0

    def after(self, index: int, sample: Any) -> bool:
        """Count the load of a sample. Returns whether the sample was read again."""
        self._loads += 1
        if self._loads not in self._due:
            return False
        before = bits(sample)
        try:
            with Probe(self._source) as probe:
                differs = probe.read(self._source, index, self._dice.getrandbits(31)).bits != before
        except Exception:  # the user's code may raise when it is asked twice: the sample has been served
            return True
        if differs:
            self._due.clear()
            if self._first_to_tell():
                log.warning(
                    "sample %d of %s is another one when it is read again: its source is random, and the cache freezes "
                    "its first draw.\nGive its deterministic part to CachedDataset, and the random rest as transform=; "
                    "or leave it uncached (budget=0)",
                    index,
                    type(self._source).__name__,
                )
        return True


class StreamReader:
    """Reads a stream from its beginning, and watches whether it draws random numbers for its samples.

    The first sample is left out, because many streams draw their order there. The next 31 are watched, and later those
    that follow a slow one, so that watching takes at most a twentieth of the stream's time. Not seen are the generators
    of WebDataset's and `datasets`' shuffling. Shuffling by process-wide generators cannot be told from augmentation.

    Args:
        source: the stream, whose own generators are watched, too.
        watched: whether draws matter.
    """

    def __init__(self, source: Any, watched: bool = True) -> None:
        self._generators = Generators(source) if watched else None
        self._stream, self._samples = iterate(source), 0
        self.moved: str | None = None
        """The generators that moved while a sample was read, in words; None as long as none has."""
        self.source_ns = 0
        """Nanoseconds that the last sample took."""

    def __next__(self) -> Any:
        """The next sample. Errors of the stream are raised as they are."""
        is_watched = self._samples > 0 and (self._samples < _WATCHED or self.source_ns > _SLOW_NS)
        generators = self._generators if is_watched else None
        before = None if generators is None else generators.state()
        start = time.perf_counter_ns()
        sample = next(self._stream)
        self.source_ns = time.perf_counter_ns() - start
        if generators is not None and before is not None and (moved := generators.moved(before)):
            self.moved, self._generators = " and ".join(moved), None
        self._samples += 1
        return sample
