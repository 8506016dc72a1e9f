"""Whether a source has changed since its cache was opened.

What is cached is what the source gave then. Users change a dataset while it is trained on: a curriculum sets
`dataset.strength`, a callback swaps `dataset.transform` for the last epochs, a method does either. A `SourceState`
remembers the attributes of the source, of the datasets inside it (Subset, ConcatDataset, wrappers) and of their
transforms, down to the lists of steps, and compares them with what they are now.

An attribute has changed if it holds another object that is not equal to the one before. Not counted are what is opened
and closed (files, databases: whatever can be closed), generators, the length of a source that grows, and attributes
that move when the source is read (a counter, a memo): every read of this process stands in a `with`, which learns them,
and `ignored` names those that others know of. Not seen is what changes inside an object that is no transform: a list of
files that is sorted, a tensor that is written to.

A copy of the source, in another process or in this one, is compared with what it was when it was made. In a loader's
worker a name that the source did not have is no change: `worker_init_fn` tells the worker's copy who it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from lightning_stocache.source.generators import KINDS

__all__ = ["SourceState"]

log = logging.getLogger(__name__)

_MOST_PARTS = 64  # of a source with a whole network inside, for instance: each costs about 0.1 us per look
_MOST_STEPS = 64  # in a list that may hold transforms: a longer one holds data
_FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType)
_MISSING = object()
_CHANGED = (
    "%s: its `%s` has changed since it was cached. Epochs that begin now load all samples uncached, as changed.\n"
    "To keep the cache, change what comes after it: transform= of CachedDataset or StocacheDataModule, or the model's "
    "on_after_batch_transfer"
)


@dataclass
class _Part:
    """The attributes of a dataset or transform, or the entries of a list of them.

    Args:
        path: where it lies in the source, for messages.
        live: the `__dict__`, or the list itself.
        seen: a copy of what that held.
        kind: class of the object, whose attributes stand for those that it has not; None for a list.
    """

    path: str
    live: Any
    seen: Any
    kind: type | None = None

    def differences(self) -> Iterator[tuple[str, str, Any, Any]]:
        """The entries that are others now: where they lie, their names, what they held, and what they hold."""
        live, seen = _entries(self.live), _entries(self.seen)
        for name in {**seen, **live}:
            default = _MISSING if self.kind is None else getattr(self.kind, name, _MISSING)
            old, new = seen.get(name, default), live.get(name, default)
            if not (_same(old, new) or (_is_handle(old) and _is_handle(new))):
                yield _inside(self.path, name, self.kind), str(name), old, new


class SourceState:
    """The attributes of a source as they were, to be compared with what they are.

    Args:
        source: the user's dataset.
        tail: transforms that run after the cache, where what changes inside them takes effect at once.
        ignored: names of attributes that move when the source is read.

    Example:
        >>> class Noise(Dataset):
        ...     strength = 1
        ...
        ...     def __len__(self):
        ...         return 8
        >>> source = Noise()
        >>> state = SourceState(source)
        >>> state.look()
        >>> source.strength = 2
        >>> state.look()
        'strength'
    """

    def __init__(self, source: Any, tail: Collection[Callable[..., Any]] = (), ignored: Collection[str] = ()) -> None:
        self._source, self._tail, self._ignored = source, tail, set(ignored)
        self._length = len(source)
        self._parts = self._remember()
        self.change: str | None = None
        self._told = False

    def look(self, first_to_tell: Callable[[], bool] | None = None) -> str | None:
        """Where the source has changed, for instance `transform.p`; None while it has not. What was found stays.

        Args:
            first_to_tell: says whether this process is to warn of a change that is found; None: it is not.
        """
        if self.change is None and (found := self._differences()):
            self.change, self._parts = found[0], []  # they hold what may have been replaced to be rid of it
        if self.change is not None and first_to_tell is not None and not self._told:
            self._told = True
            if first_to_tell():
                log.warning(_CHANGED, type(self._source).__name__, self.change)
        return self.change

    def __enter__(self) -> None:
        """Before a read of the source by this process."""

    def __exit__(self, *_: object) -> None:
        """After it: what has moved meanwhile, reading moves."""
        self._ignored.update(self._differences())

    def _differences(self) -> list[str]:
        """Where attributes hold something else than at the last look."""
        found: list[str] = []
        for part in self._parts:
            if not _same(part.live, part.seen):  # of identical objects a glance is enough
                found += [difference[0] for difference in part.differences() if self._counts(*difference)]
                part.seen = part.live.copy()
        return found

    def _counts(self, path: str, name: str, old: Any, new: Any) -> bool:
        if path in self._ignored or name in self._ignored:
            return False
        if old is _MISSING and get_worker_info() is not None:
            return False
        if self._tail or not _same((old, new), (self._length, len(self._source))):
            return True  # a source that was cut cannot tell its copy that it has grown
        self._length = new
        return False

    def _remember(self) -> list[_Part]:
        parts: list[_Part] = []
        known = set(map(id, self._tail))

        def walk(node: Any, path: str) -> None:
            if id(node) in known or len(parts) == _MOST_PARTS:
                return
            known.add(id(node))
            if _has_state(node) or (node is self._source and hasattr(node, "__dict__")):
                parts.append(_Part(path, vars(node), vars(node).copy(), type(node)))
                for name, value in parts[-1].seen.items():
                    walk(value, _inside(path, name, type(node)))
            elif isinstance(node, list | tuple | dict) and len(node) <= _MOST_STEPS:
                entries = _entries(node)
                if not any(map(_has_state, entries.values())):
                    return
                if not isinstance(node, tuple):
                    parts.append(_Part(path, node, node.copy()))
                for name, value in entries.items():
                    walk(value, _inside(path, name, None))

        walk(self._source, "")
        return parts

    def __getstate__(self) -> dict[str, Any]:
        self.look()
        return self.__dict__ | {"_parts": []}  # they hold what the source itself may not be able to send

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._parts = self._remember() if self.change is None else []


def _has_state(node: Any) -> bool:
    """Whether it is a dataset or a transform: an object whose attributes decide what samples are."""
    decides = isinstance(node, Dataset) or (callable(node) and not isinstance(node, _FUNCTIONS))
    return decides and hasattr(node, "__dict__")


def _is_handle(value: Any) -> bool:
    """Whether it is something that was opened, a generator that may be seeded anew, or nothing yet."""
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
    except Exception:  # arrays and tensors have no such answer, and what users compare may raise anything
        return False
