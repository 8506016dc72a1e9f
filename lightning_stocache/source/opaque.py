"""Blind reads: the code behind a transform gets objects that nobody can look at, in place of the transform's results.

A cut moves the random steps of a transform behind the cache, so that the code between the transform and the end of
`__getitem__` sees a result without them. Nothing is lost only if that code does not depend on the result. A `BlindRead`
proves this for one sample, by construction:

1. The transform is called as always. Of its result, dicts and tuples stay, and each leaf becomes an `Opaque`. A list is
   a leaf, because its length may be random. A result that is taken apart has a known form (`result_form`), whose leaves
   become opaque.
2. Each operation on an opaque object is noted, and raises a `LookedError`, which the code's own `except Exception` does
   not catch. So does a question for the keys of a dict, and an assignment to one.
3. If nothing was noted, and the opaque objects lie in the sample exactly where the results belong, the code has not
   looked: the same sample would hold any other results at the same places.

`is` and `type()` cannot be noted. Other reads show None in place of the leaves, or of a whole result, so that `is None`
becomes visible; code that asks for the type sees that of a real result in any other read.

Code that looks may be harmless: a check, a log. Then head and tail are compared with the source instead (`proof`).
"""

from __future__ import annotations

import weakref
from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from lightning_stocache.node.errors import description
from lightning_stocache.source.samples import Path, refilled, walk, with_node
from lightning_stocache.source.transform_split import ResultPaths, Tail
from lightning_stocache.source.transforms import UncuttableError, Values, as_result, reading

__all__ = ["LookedAtError", "depends_on_none", "parts_held", "read_blindly"]

_T = TypeVar("_T")
_Shown: TypeAlias = Literal["opaque", "None", "one None"]
"""What the code behind a transform gets: opaque leaves, or None for each leaf or for a whole result."""

_MORE_CALLS = 64  # of transforms than usual: a loop may wait for a result that pleases it
_LIKE = (torch.Tensor, np.ndarray, complex, int, float, str, dict, set)  # classes whose methods an opaque object has
_FURTHER = ("await", "aenter", "buffer", "bytes", "enter", "exit", "fspath", "next")
_OF_CLASSES = ("class", "dict", "init", "module", "new", "subclasshook", "weakref")  # these make a class
_METHODS = {name for kind in _LIKE for name in dir(kind) if name.startswith("__")}
_METHODS |= {f"__{name}__" for name in _FURTHER}
_METHODS -= {f"__{name}__" for name in _OF_CLASSES}
_DICT_METHODS = {name for name in dir(dict) if name in _METHODS or not name.startswith("__")}
_DICT_METHODS -= {"__getattribute__", "__getitem__", "__setattr__", "__delattr__"}
_DICT_METHODS |= {"__copy__", "__missing__"}


class LookedAtError(UncuttableError):
    """The code behind a transform depends on its result, or may depend on it."""


class LookedError(BaseException):
    """Code behind a transform has looked at its result. No `Exception`, which the code might catch."""


class _Notes:
    """What a read has noted. After the read nothing is noted any more."""

    def __init__(self) -> None:
        self.looks: list[str] = []
        self.is_open = True

    def note(self, look: str) -> BaseException:
        if not self.is_open:  # the object has been kept somewhere
            return RuntimeError("this object stood for a result while a sample was read, and has no content")
        self.looks.append(look)
        return LookedError(look)


# ---- objects that nobody can look at ----


def _noting(name: str) -> Callable[..., Any]:

    def method(self: Any, *arguments: Any, **_: Any) -> Any:
        attribute = arguments[0] if name == "__getattribute__" and arguments else name
        raise _notes_of(self).note(str(attribute))

    return method


# A sequence, so that the pattern `case []` asks for its length.
Opaque: Any = ABCMeta(
    "Opaque",
    (Sequence,),
    {"__slots__": ("_notes", "__weakref__"), **{name: _noting(name) for name in _METHODS}},
)
"""The class of objects that note each operation on them."""

_member = vars(Opaque)["_notes"]  # as an attribute it would be noted
_notes_of = _member.__get__
_set_notes = _member.__set__


class _CoveredDict(dict[Any, Any]):
    """A dict of opaque objects, whose items can be taken out by key. Anything else is noted."""

    notes: _Notes


def _noting_in_dict(name: str) -> Callable[..., Any]:
    """A method of `_CoveredDict`. After the read it is that of a dict."""

    def method(self: _CoveredDict, *arguments: Any, **named: Any) -> Any:
        if self.notes.is_open:
            raise self.notes.note(name)
        return dict(self) if name == "__copy__" else getattr(dict, name)(self, *arguments, **named)

    return method


for _name in _DICT_METHODS:
    setattr(_CoveredDict, _name, _noting_in_dict(_name))


# ---- reads ----


class BlindCall(NamedTuple):
    """A call of a transform in a blind read.

    Args:
        head: stands for the transform.
        keys: the keys of its values.
        shown: the objects that it returned in place of its results, keyed as the parts of a `CutCall`.
        has_parts: whether a result is a container, or there are several, and code may expect None in its place.
    """

    head: Any
    keys: tuple[int | str, ...]
    shown: dict[Any, Any]
    has_parts: bool


class BlindRead:
    """One read of one or more samples, in which transforms return other objects in place of their results."""

    def __init__(self, tail: Tail, indices: Sequence[int], shown: _Shown = "opaque") -> None:
        self.calls, self.notes = list[BlindCall](), _Notes()
        self._tail, self._shown = tail, shown
        self._expected = list(map(tail.calls, indices))
        self._most = sum(map(len, self._expected)) + _MORE_CALLS
        self._leaves = dict[int, tuple[Any, Any]]()  # by id: the opaque object and the real one

    def show(self, head: Any, result: Values, is_named: bool) -> Any:
        """What the code behind a transform gets in place of its result.

        Args:
            head: stands for the transform.
            result: the result, by position or keyword.
            is_named: whether the transform was called by keywords, and returns a dict.
        """
        if len(self.calls) >= self._most:
            raise self.notes.note("calls it again and again")
        if head.form is not None:
            leaves = {path: self._leaf(value) for path, value in head.leaves(result).items()}
            self.calls.append(BlindCall(head, tuple(result), leaves, has_parts=False))
            return head.form.filled(leaves)
        has_parts = is_named or len(result) > 1 or isinstance(result[0], dict | tuple)
        if self._shown == "one None":
            self.calls.append(BlindCall(head, tuple(result), dict.fromkeys(result), has_parts))
            return None
        covered = self._covered(result) if is_named else {key: self._covered(value) for key, value in result.items()}
        self.calls.append(BlindCall(head, tuple(result), covered, has_parts))
        return as_result(covered, is_named)

    def read(self, read: Callable[[], _T]) -> _T:
        """The result of a function that reads."""
        try:
            with reading(self._tail.heads, self.show):
                return read()
        finally:
            self.notes.is_open = False

    def objection(self, samples: Sequence[Any]) -> str | None:
        """Why the samples that were read do not hold these objects where the results belong; None if they do.

        Of opaque objects a sample must hold all, each once, but for parts that it never holds. None may lie at other
        places, too.
        """
        expected = self._expected
        if len(self.calls) != sum(map(len, expected)):
            return f"the transform is called {len(self.calls)} times instead of {sum(map(len, expected))}"
        calls, used = iter(self.calls), set[int]()
        for sample, heads in zip(samples, expected, strict=True):
            places = dict[Path, int]()
            for head, cut_call in heads:
                call = next(calls)
                if call.head is not head:
                    return "the transforms are called in another order"
                if head.form is not None:
                    used.update(map(id, call.shown.values()))
                for key, path in cut_call.parts:
                    places |= {(*path, *inner): id(leaf) for inner, leaf in self._shown_in(call.shown.get(key))}
            found = {path: id(leaf) for path, leaf in self._shown_in(sample)}
            if places != found and (self._shown == "opaque" or not places.items() <= found.items()):
                return "the sample does not hold the results of the transform at the usual places"
            used.update(places.values())
        return None if used.issuperset(self._leaves) else "the sample does not hold all results of the transform"

    def uncovered(self, sample: Any) -> Any:
        """The sample with the real results. Containers around them are copied."""
        for path, leaf in self._shown_in(sample):
            sample = with_node(sample, path, self._leaves[id(leaf)][1])
        return sample

    def forget(self) -> bool:
        """Forget the opaque objects. Returns whether anything else still holds one of them."""
        references = [weakref.ref(leaf) for leaf, _ in self._leaves.values()]
        self.calls.clear()
        self._leaves.clear()
        return any(reference() is not None for reference in references)

    def _covered(self, value: Any) -> Any:
        if type(value) is Opaque:  # of another transform, handed on
            return value
        if type(value) is dict and value:
            covered = _CoveredDict({key: self._covered(item) for key, item in value.items()})
            covered.notes = self.notes
            return covered
        if isinstance(value, tuple) and value:
            return refilled(value, [self._covered(item) for item in value])
        return self._leaf(value)

    def _leaf(self, value: Any) -> Any:
        if type(value) is Opaque:
            return value
        if self._shown != "opaque":
            return None
        leaf = object.__new__(Opaque)
        _set_notes(leaf, self.notes)
        self._leaves[id(leaf)] = leaf, value
        return leaf

    def _shown_in(self, node: Any) -> list[tuple[Path, Any]]:
        """The opaque objects in a sample, by path; or where it has None."""
        kind = Opaque if self._shown == "opaque" else type(None)
        return [(path, inner) for path, inner in walk(node) if type(inner) is kind]


def read_blindly(read: Callable[[], Sequence[Any]], indices: Sequence[int], tail: Tail) -> tuple[list[Any], str | None]:
    """Read samples of a copy of a source, whose heads return opaque objects.

    Returns:
        The samples with the results of the heads, and why the tail cannot finish them; None if it can.

    Raises:
        LookedAtError: the code behind a transform looks at its result, or keeps it.
        Exception: the source's own error.
    """
    blind = BlindRead(tail, indices)
    samples = _samples_of(blind, read)
    objection = blind.objection(samples)
    samples = [blind.uncovered(sample) for sample in samples]
    if blind.forget():
        raise LookedAtError("code behind its transform keeps the result")
    return samples, objection


def parts_held(
    read: Callable[[], Any], index: int, tail: Tail
) -> tuple[tuple[tuple[int | str, ...], ResultPaths], ...] | None:
    """The calls of transforms in a sample of a copy: the keys of their values, and where their results' parts lie.

    Of the calls of the tail only the heads count. Returns None if these are not called.

    Raises:
        LookedAtError: the code behind a transform looks at its result.
        Exception: the source's own error.
    """
    blind = BlindRead(tail, [index])
    [sample] = _samples_of(blind, lambda: [read()])
    if [call.head for call in blind.calls] != [head for head, _ in tail.calls(index)]:
        return None
    found = [(path, leaf) for path, leaf in walk(sample) if type(leaf) is Opaque]
    parts = (
        tuple((key, path) for key, leaf in call.shown.items() for path, other in found if other is leaf)
        for call in blind.calls
    )
    return tuple(zip((call.keys for call in blind.calls), parts, strict=True))


def _samples_of(blind: BlindRead, read: Callable[[], Sequence[Any]]) -> list[Any]:
    """The samples of a blind read.

    Raises:
        LookedAtError: the code behind a transform looks at its result.
        Exception: the source's own error.
    """
    looks = blind.notes.looks
    samples: list[Any] = []
    try:
        samples += blind.read(read)
    except LookedError:
        pass
    except Exception as error:
        if not looks and not blind.calls:
            raise
        if not looks:
            raise LookedAtError(f"code behind its transform raises {description(error)}") from error
    if looks:
        raise LookedAtError(f"code behind its transform looks at the result ({', '.join(dict.fromkeys(looks))})")
    return samples


def depends_on_none(read: Callable[[], Any], index: int, tail: Tail) -> bool:
    """Whether code behind a transform asks if its result is None. The copy of the source is read once or twice."""
    ways: list[_Shown] = ["None", "one None"]
    for shown in ways:
        blind = BlindRead(tail, [index], shown)
        try:
            is_held = blind.objection([blind.read(read)]) is None
        except LookedError:
            is_held = False
        except Exception:  # code that takes a part of the result raises if there is none
            is_held = shown == "one None"
        if not is_held:
            return True
        if not any(call.has_parts for call in blind.calls):
            break
    return False
