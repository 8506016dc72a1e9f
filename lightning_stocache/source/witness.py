"""What a read of a source depends on, compared with an earlier moment.

A `Witness` keeps copies of the state that the source's code can reach (`reach`), and says later what differs:

- "data": an array, or a container of more than 64 items, that the code of a read names. It is a change of the source,
  unless the samples at `indices` prove otherwise.
- "setting": a number, a text, a small container, a network, another function or object in a place. Samples that are
  read again decide whether it is a change; it is one where there is no time for them.
- "unread": data that no code of a read names, or that merely grew. Samples decide, as many as there is time for.
- "machinery": a handle, or what a read itself moves (a counter, a memo). It is a reason to look at some samples.

Bounds are bytes and objects, never time: 64 MiB of copies, 4,000 objects, 1,024 spread items of a long container of
objects. No attribute of a user's object is asked for: its `__dict__`, its
slots and its class tell.

Attributes of the dataset, its transforms and the datasets inside it are also compared before each batch (`look`). For
other processes and other jobs there is a digest, of data and of settings, blind to identity and to the order of sets.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, TypeAlias

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from lightning_stocache.source.generators import are_draws_evidence
from lightning_stocache.source.places import (
    SMALL,
    Around,
    Array,
    Attributes,
    Items,
    Place,
    Tensors,
    is_plain_value,
    same_value,
)
from lightning_stocache.source.reach import Reach, covers, is_handle
from lightning_stocache.source.walk import (
    CONTAINERS,
    GENERATORS,
    MISSING,
    class_name,
    inside,
    is_of_library,
    node_dict,
    package_of,
)

__all__ = ["Difference", "Kind", "Sums", "Witness", "digest_of_state", "same_state"]

Kind = Literal["data", "setting", "unread", "machinery"]

Sums: TypeAlias = "dict[str, tuple[Kind, bytes]]"
"""A digest of each place of a state, and whether it is data or a setting."""

_RANKS = frozenset(("get_rank", "get_node_rank", "get_local_rank", "local_rank", "global_rank", "node_rank"))
_FIRST = "the first value of "  # before a path among the machinery, if reads have filled the place, and no more
_FEW = 2  # items of a container that are learned by themselves; a ring moves more of them
_COLUMNS = 64  # of an array with a row for each sample, in which reads move some columns
_REPLACED = 256  # objects whose replacements are compared by content at once; of more, the places alone count


class Difference(NamedTuple):
    """A place whose content differs from that of an earlier moment.

    Args:
        path: where it lies, for messages: `transform.p`.
        kind: what follows from it.
        indices: the samples that it may concern; None: any.
        is_filled: whether reads have filled the place: they may move it, so only samples prove a change.
    """

    path: str
    kind: Kind
    indices: tuple[int, ...] | None = None
    is_filled: bool = False


class Witness:
    """The state that reads of a source depend on, compared with that of an earlier moment.

    A copy that is pickled to another process is compared with its state when it arrived; a forked process goes on with
    the copies that it has inherited. In a loader's worker a new name is no change: `worker_init_fn` tells the worker's
    copy who it is.

    Every read of this process stands in a `with`, which learns the attributes that reads move; `learning` learns all
    places. A place that was empty before a read (None, or no attribute), or a dict or set that got other keys in it, is
    filled, not moved: it may be filled again, and its content is compared from then on.

    Where several threads run, nobody can tell what moved an attribute during a read: the read, or the user. Its path is
    `doubtful` until samples have been read again (`take_doubtful`, `excuse`). So is a number that no code of a read
    names, and, where several threads run, an attribute that the code of a read sets.

    Args:
        source: the user's dataset.
        tail: transforms that run after the cache, where changes inside them take effect at once.

    Example:
        >>> from torch.utils.data import Dataset
        >>> class Labelled(Dataset):
        ...     def __init__(self):
        ...         self.labels = [0] * 100
        ...
        ...     def __len__(self):
        ...         return 100
        ...
        ...     def __getitem__(self, index):
        ...         return self.labels[index]
        >>> source = Labelled()
        >>> witness = Witness(source)
        >>> source.labels[7] = 1
        >>> [(place.path, place.kind, place.indices) for place in witness.differences()]
        [('labels', 'data', (7,))]
    """

    def __init__(self, source: Any, tail: Collection[Callable[..., Any]] = ()) -> None:
        self._source = source
        self._tail = tail
        self._length = len(source)
        self._lengths = {self._length}  # a source may grow
        self._machinery = set[str]()
        self._filled = set[str]()
        self._fills = set[str]()  # places that were empty before the last comparison
        self._change: str | None = None
        self._pending: list[Difference] = []
        self._unread = set[str]()  # places with differences that no code of a read names
        self._reading = dict[int, int]()  # how deep each thread is in a read
        self.doubtful = set[str]()
        """Paths where a change may be none: reads or other threads may move them, or no read names them."""
        self._remember()

    def _remember(self) -> None:
        self._reach = Reach(self._source, self._length, self._tail)
        places = self._reach.places
        # With copies of their own: what is compared before each batch is compared in an epoch, too.
        self._watched = {path: copy(places[path]) for path in self._reach.watched if path in places}

    @property
    def machinery(self) -> frozenset[str]:
        """The places that reads move or fill."""
        return frozenset(self._machinery | {_FIRST + path for path in self._filled})

    def learn(self, paths: Collection[str]) -> None:
        """Take over the places that reads move or fill in another process."""
        self._filled.update(path.removeprefix(_FIRST) for path in paths if path.startswith(_FIRST))
        self._machinery.update(path for path in paths if not path.startswith(_FIRST))

    # ---- before each batch ----

    def look(self) -> str | None:
        """Where an attribute has changed, for instance `transform.p`; None while none has. The first change stays."""
        if self._change is not None:
            return self._change
        moved = self._moved()
        if moved and self._is_read_elsewhere():
            self.doubtful.update(moved)
            return None
        certain = [path for path, is_certain in moved.items() if is_certain]
        self.doubtful.update(moved.keys() - certain)
        if certain:
            self._change = certain[0]
            self._forget()
        return self._change

    def take_doubtful(self) -> set[str]:
        """The doubtful paths, which are none from now on."""
        doubtful, self.doubtful = self.doubtful, set()
        return doubtful

    def excuse(self, paths: Collection[str]) -> None:
        """Samples were the same although these attributes had moved: they may move from now on."""
        self._machinery.update(paths)

    def excuse_unread(self, differences: Collection[Difference]) -> None:
        """Samples were the same although these places differ: those that no code of a read names may move."""
        self.excuse(self._unread.intersection(difference.path for difference in differences))

    def __enter__(self) -> None:
        """Begin a read of the source by this thread. What has moved before is not moved by the read."""
        thread = threading.get_ident()
        if thread not in self._reading:
            self.look()
        self._reading[thread] = self._reading.get(thread, 0) + 1

    def __exit__(self, *_: object) -> None:
        """End the read, and learn which attributes it has moved."""
        moved = self._moved(is_read=True)
        thread = threading.get_ident()
        self._reading[thread] -= 1
        if not self._reading[thread]:
            del self._reading[thread]
        self._learn(moved)

    def _learn(self, moved: Collection[str]) -> None:
        if not moved:
            return
        is_evidence = are_draws_evidence()
        written = self._reach.written  # names of attributes that the code of a read sets
        filled = {path for path in self._fills.intersection(moved) if is_evidence or path.rpartition(".")[2] in written}
        self._filled |= filled
        (self._machinery if is_evidence else self.doubtful).update(set(moved) - filled - self._machinery)

    def _is_read_elsewhere(self) -> bool:
        thread = threading.get_ident()
        return any(reading != thread for reading in list(self._reading))

    def _moved(self, *, is_read: bool = False) -> dict[str, bool]:
        """The paths of watched attributes that have changed since the last call; whether each is certainly one."""
        found: dict[str, bool] = {}
        for path, place in list(self._watched.items()):
            content = place.read()
            with suppress(RuntimeError, ValueError):  # another thread changes it at this moment
                if place.is_same(content):
                    continue
            content = content.copy() if isinstance(content, dict | list) else content
            values = _changed_values(place, content)
            place.keep(content)
            for name, old, new in values:
                child = _child_path(path, place, name)
                self._note_fill(child, _is_empty(old))
                if child in self._machinery or not self._is_change(old, new):
                    continue
                if child not in self._filled:
                    found[child] = self._is_certain(place, name, old, new)
                elif is_read or is_plain_value(new):  # else the next comparison of all places says which samples differ
                    found[child] = False
        return found

    def _is_certain(self, place: Place, name: Any, old: Any, new: Any) -> bool:
        """Whether another value of an attribute is a change that no sample need prove."""
        if issubclass(type(new), GENERATORS):  # where there was none; perhaps only a sampler draws from it
            return False
        is_plain = all(value is MISSING or is_plain_value(value) for value in (old, new))
        if is_plain and _is_of_user(place) and not self._is_named(place.around.inside(name)):
            return False
        # What reads set themselves may be of no consequence, whichever thread sets it.
        return name not in self._reach.written or are_draws_evidence()

    def _forget(self) -> None:
        """Let go of the copies: they hold objects that the user may have replaced to free them."""
        self._watched = {}
        self._reach.places.clear()

    def _is_change(self, old: Any, new: Any) -> bool:
        if same_value(old, new) or _is_same_handle(old, new):
            return False
        if old is MISSING and get_worker_info() is not None:
            return False
        return not self._is_growth(old, new)

    def _is_growth(self, old: Any, new: Any) -> bool:
        """Whether an attribute is the length of a source that has grown. A source that was cut cannot tell its copy."""
        if self._tail or type(old) is not int or old not in self._lengths or new != len(self._source):
            return False
        self._lengths.add(new)
        return True

    # ---- in an epoch ----

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Around reads of this process: learn every place that they move."""
        self._pending += self._compare()
        try:
            yield
        finally:
            self._learn({difference.path for difference in self._compare()})

    def differences(self) -> list[Difference]:
        """What differs from the last call, whose state is replaced by that of now."""
        found, self._pending = self._pending + self._compare(), []
        return list(dict.fromkeys(map(self._as_known, found)))

    def _as_known(self, difference: Difference) -> Difference:
        """A difference, given what reads move and fill."""
        path = difference.path
        if covers(self._machinery, path) or (path in self._fills and covers(self._filled, path)):
            return Difference(path, "machinery")
        if covers(self._filled, path):
            return Difference(path, "setting", difference.indices, is_filled=True)
        return difference

    def _note_fill(self, path: str, is_fill: bool) -> None:
        """Note whether a place was only filled: it was empty before, or got other keys."""
        (self._fills.add if is_fill else self._fills.discard)(path)

    def _compare(self) -> list[Difference]:
        found: list[Difference] = []
        self._replaced = 0
        for path in list(self._reach.places):
            place = self._reach.places.get(path)
            if place is None:  # an object around it has been replaced
                continue
            try:
                found += self._compared(path, place)
            except Exception as error:  # of foreign objects that are compared
                found.append(Difference(f"{path} ({type(error).__name__})", "machinery"))
        return found

    def _compared(self, path: str, place: Place) -> Iterator[Difference]:
        content, earlier = place.read(), place.earlier
        with suppress(TypeError, ValueError):  # arrays inside have no such answer
            if place.is_same(content):
                return
        values = _changed_values(place, content)
        place.keep(content)
        if isinstance(place, Attributes):
            for name, old, new in values:
                around = place.around if place.is_known else place.around.inside(name)
                yield from self._value(_child_path(path, place, name), old, new, around)
            return
        if isinstance(place, Tensors):
            yield Difference(path, "setting")
            return
        if isinstance(place, Items):
            is_filled = isinstance(content, dict) and covers(self._filled, path)
            new_keys = [key for key, old, _ in values if old is MISSING]
            changed, grew = [], len(content) > len(earlier.keys)
            for key, old, new in values:
                if old is MISSING or same_value(old, new):
                    continue
                if is_filled and not (is_plain_value(old) and is_plain_value(new)):  # made anew, or let go
                    grew = True
                    continue
                if new is MISSING or place.is_plain or (is_plain_value(old) and is_plain_value(new)):
                    changed.append(key)
                else:
                    index = key if place.is_of_samples and type(key) is int else place.around.sample
                    around = replace(place.around, sample=index)
                    yield from self._value(inside(path, key, is_item=True), old, new, around)
        else:
            changed, grew = place.changed(earlier, content)
            new_keys = []
        if not changed and not grew and isinstance(place, Items):
            return
        if _is_learned_by_item(place, content, changed, grew):
            for key in [*changed, *new_keys]:
                item = inside(path, key, is_item=True)
                self._note_fill(item, key in new_keys)
                self._note_unread(item, place.around)
                yield Difference(item, "setting")
            return
        columns = {f"{path}[:, {k}]": rows for k, rows in _columns(place, earlier, content, changed).items()}
        if columns and (not all(columns.values()) or not self._machinery.isdisjoint(columns)):
            yield from (self._judged(column, place, rows, grew) for column, rows in columns.items() if rows)
            return
        self._note_fill(path, not changed and isinstance(content, dict | set))
        numbers = [key for key in [*changed, *new_keys] if type(key) is int and 0 <= key < place.around.length]
        has_new_indices = bool(new_keys and numbers) and not place.is_of_samples
        if has_new_indices and isinstance(content, dict | set):
            yield Difference(path, "setting", tuple(place.around.outer(numbers)) or None)
        yield self._judged(path, place, changed, grew)

    def _value(self, path: str, old: Any, new: Any, around: Around) -> Iterator[Difference]:
        """What differs where another object stands: the content of the two, if it is known."""
        self._note_fill(path, _is_empty(old))
        if same_value(old, new) or self._is_growth(old, new):
            return
        if _is_same_handle(old, new):
            yield Difference(path, "machinery")
            return
        if old is MISSING and get_worker_info() is not None:
            self._reach.walk([(path, new, around)])
            return
        before = self._reach.take(path)
        self._replaced += 1
        is_comparable = self._replaced <= _REPLACED
        if is_comparable:
            self._reach.walk([(path, new, around)])
        if type(old) is not type(new):
            is_data = any(self._judged(path, place, [], False).kind == "data" for place in before.values())
            self._note_unread(path, around)
            yield Difference(path, "data" if is_data else "setting", self._sample(around))
        elif not before and not _is_same_foreign(old, new):
            is_foreign = not (is_plain_value(old) or callable(old) or isinstance(old, CONTAINERS))
            yield self._judged(path, Place(tuple, around, SMALL + 1 if is_foreign else None), [], False)
        else:
            for inner, place in before.items():
                now = self._reach.places.get(inner)
                if now is None or type(now) is not type(place):
                    yield self._judged(inner, place, [], False)
                else:
                    now.earlier = place.earlier
                    yield from self._compared(inner, now)

    def _sample(self, around: Around) -> tuple[int, ...] | None:
        return None if around.sample is None else tuple(around.outer([around.sample])) or None

    def _judged(self, path: str, place: Place, changed: list[Any], grew: bool) -> Difference:
        """The kind of a difference, and the samples that it may concern."""
        around = place.around
        is_named = self._note_unread(path, around)
        if around.sample is not None:
            return Difference(path, "data" if is_named else "unread", self._sample(around))
        if place.is_of_samples and changed and not grew:
            indices = self._indices(place, changed)
            if indices is not None:
                outer = tuple(around.outer(indices))
                return Difference(path, "data" if is_named and outer else "unread", outer or None)
        is_small = not place.is_of_samples and (place.length is None or place.length <= SMALL)
        only_grew = grew and not changed
        if is_small and (is_named or place.length is None):
            return Difference(path, "setting")
        return Difference(path, "data" if is_named and not only_grew else "unread")

    def _note_unread(self, path: str, around: Around) -> bool:
        """Note a difference in a place that no code of a read names. Returns whether such code names it."""
        is_named = self._is_named(around)
        if not is_named:
            self._unread.add(path)
        return is_named

    def _indices(self, place: Place, keys: list[Any]) -> list[int] | None:
        """The indices of samples, given keys of a container with an item for each sample."""
        if all(type(key) is int for key in keys):
            return keys
        numbers: dict[str, int] = {}
        for other in self._reach.places.values():  # a name stands in a list of names
            if isinstance(other, Items) and other.is_of_samples:
                for number, item in enumerate(other.earlier[1]):
                    names = item if type(item) is tuple else (item,)
                    numbers.update((name, number) for name in names if type(name) is str)
        indices = [key if type(key) is int else numbers.get(key, -1) for key in keys]
        return None if -1 in indices else indices

    # ---- for other processes and jobs ----

    def sums(self, length: int | None = None) -> Sums:
        """A digest of each place now, which other processes and other jobs can compare.

        Args:
            length: leave out the items from this one on, of places with an item for each sample: a source that only
                grew has the digests that it had.
        """
        sums: Sums = {"class": ("data", class_name(type(self._source)).encode())}
        for path, place in self._reach.places.items():
            with suppress(Exception):  # of objects of the user's that are read
                content = place.read()
                if isinstance(place, Attributes):
                    values = ((name, value) for name, value in content.items() if not is_handle(value))
                    sums |= {
                        inside(place.prefix, name): ("setting", place.described(value))
                        for name, value in values
                        if name not in place.hidden and not same_value(value, place.missing(name))
                    }
                    continue
                shown, most = place.length, None
                if place.is_of_samples and place.around.length == self._length and length is not None:
                    shown = most = length
                digest = hashlib.blake2b(f"{type(place).__name__} {shown}".encode(), digest_size=16)
                for part in place.chunks(content, most):
                    digest.update(part)
                sums[f"{path}[content]"] = "data" if self._is_data(place) else "setting", digest.digest()
        return sums

    @property
    def asks_rank(self) -> bool:
        """Whether the code of a read names the rank of its process."""
        return not self._reach.names.isdisjoint(_RANKS)

    def named_indices(self) -> list[int]:
        """Indices of samples that small containers of settings name, at most 64: `{5: "another label"}`."""
        found = dict[int, None]()
        for place in self._reach.places.values():
            with suppress(Exception):  # of objects of the user's that are read
                content = place.read() if isinstance(place, Items) else ()
                if len(content) <= SMALL:
                    found.update((key, None) for key in content if type(key) is int and 0 <= key < self._length)
        return list(found)[:SMALL]

    def _is_data(self, place: Place) -> bool:
        is_long = place.is_of_samples or (place.length or 0) > SMALL or place.around.sample is not None
        return is_long and not isinstance(place, Tensors) and self._is_named(place.around)

    def _is_named(self, around: Around) -> bool:
        return self._reach.is_blind or self._reach.names.issuperset(around.names)

    def __getstate__(self) -> dict[str, Any]:
        self.look()
        self._pending += self._compare()
        # The copies hold objects that the source itself may not send.
        state = {name: value for name, value in vars(self).items() if name not in ("_reach", "_watched")}
        return state | {"_reading": {}, "_pending": list(self._pending), "doubtful": set(self.doubtful)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._remember()
        if self._change is not None:
            self._forget()


def digest_of_state(sums: Sums, kind: Kind | None = None) -> str:
    """The digests of all places in one text, or of the places of one kind alone."""
    digest = hashlib.blake2b(digest_size=16)
    for path, (of_kind, content) in sorted(sums.items()):
        if kind in (None, of_kind):
            digest.update(path.encode(errors="replace") + b"\0" + content)
    return digest.hexdigest()


def same_state(ours: Sums, theirs: Sums, moved: Collection[str] = ()) -> bool:
    """Whether two states are equal, but for places that reads move or fill."""
    moved = {path.removeprefix(_FIRST) for path in moved}
    differing = (path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path))
    return all(covers(moved, path) for path in differing)


def _is_of_user(place: Place) -> bool:
    """Whether a place is an object whose whole code is the user's: no library reads its attributes."""
    if not isinstance(place, Attributes) or place.kind is None:
        return False
    return not any(map(is_of_library, set(place.kind.__mro__) - {object, Dataset, Generic}))


def _is_empty(value: Any) -> bool:
    return value is None or value is MISSING or type(value) is cached_property


def _is_same_handle(old: Any, new: Any) -> bool:
    """Whether a handle, or nothing, stands where another one stood. A first generator is one only in a worker."""
    if not (is_handle(old) and is_handle(new)):
        return False
    return get_worker_info() is not None or not _is_empty(old) or not issubclass(type(new), GENERATORS)


def _is_learned_by_item(place: Place, content: Any, changed: list[Any], grew: bool) -> bool:
    """Whether a content is small, with names as its keys (others are those of a memo), or with few changed items."""
    if place.is_of_samples or place.around.sample is not None or (place.length or 0) > SMALL:
        return False
    if isinstance(content, dict):
        return len(content) <= SMALL and all(type(key) is str for key in content)
    is_ordered = isinstance(place, Array) or isinstance(content, list | tuple | deque)
    return is_ordered and not grew and 0 < len(changed) <= _FEW


def _columns(place: Place, earlier: Any, content: Any, changed: list[Any]) -> dict[int, list[int]]:
    """The changed rows of each column, in an array with a row for each sample; nothing if it has no columns."""
    if not (isinstance(place, Array) and place.is_of_samples and changed):
        return {}
    shape = content.form.rpartition(" (")[2].rstrip("),").split(", ")
    width = math.prod(map(int, shape[1:])) if len(shape) > 1 else 1
    if not 1 < width <= _COLUMNS:
        return {}
    before = np.frombuffer(earlier[1], dtype=np.uint8).reshape(content.length, width, -1)
    moved = (before != content.memory.reshape(content.length, width, -1)).any(axis=2)
    return {column: np.flatnonzero(moved[:, column]).tolist() for column in range(width)}


def _changed_values(place: Place, content: Any) -> list[tuple[Any, Any, Any]]:
    """Names or keys with other objects than before, and both objects."""
    old, new = place.values(place.earlier), place.values(content)
    pairs = []
    for name in {**old, **new}:
        before = old[name] if name in old else place.missing(name)
        after = new[name] if name in new else place.missing(name)
        if before is not after:
            pairs.append((name, before, after))
    return pairs


def _child_path(path: str, place: Place, name: Any) -> str:
    if isinstance(place, Attributes):
        return inside(place.prefix, name)
    return inside(path, name, is_item=True)


def _is_same_foreign(old: Any, new: Any) -> bool:
    """Whether two objects of a library hold the same table, as far as the library tells."""
    package = package_of(type(old))
    if package == "pyarrow" and hasattr(type(old), "equals"):
        return bool(old.equals(new))
    if package == "datasets":
        fingerprints = [(node_dict(node) or {}).get("_fingerprint") for node in (old, new)]
        return fingerprints[0] is not None and fingerprints[0] == fingerprints[1]
    return False
