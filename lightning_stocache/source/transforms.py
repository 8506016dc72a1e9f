"""The transforms of a dataset: where it holds them, and their steps, which can be run one by one.

A transform is whatever the `__getitem__` of a dataset calls that it holds in an attribute, in a list or dict, as a
method of its own, or in a dataset inside it.

Nested Composes and Sequentials of torchvision are one flat list of steps; a Compose of albumentations or MONAI has the
steps that it holds itself. Steps are called as the whole transform is: with one value, with several, or by keywords.
A `Head` runs the first of them, in the place of the transform.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from inspect import getattr_static
from typing import Any, TypeAlias, cast

from torch import nn
from torch.utils.data import Dataset

from lightning_stocache.node.errors import description
from lightning_stocache.source.result_form import ResultForm
from lightning_stocache.source.samples import Path

__all__ = [
    "NOT_HELD",
    "Head",
    "Site",
    "UncuttableError",
    "Values",
    "as_result",
    "as_values",
    "draws_by_itself",
    "has_names",
    "reading",
    "sites_of",
    "steps_of",
    "transform_at",
    "with_transforms",
]

Values: TypeAlias = dict[int | str, Any]
"""The arguments of a transform, or its results: by position, or by keyword."""

Site: TypeAlias = tuple[Any, ...]
"""Where a dataset holds a transform: attributes, and keys of lists and dicts."""

_MOST_ITEMS = 64  # of a list that may hold transforms: a longer one holds data
_DEEP = 6  # attributes and keys that lead to a transform
NOT_HELD = "the sample does not hold what its transform returns, but something made of it"


class UncuttableError(ValueError):
    """The source cannot be split; the message says why."""


class ThreadState(threading.local):
    """How this thread reads the source of a head now, and how often it has called the head. A copy begins anew."""

    calls = 0
    is_reading = False
    show: Callable[[Any, Values, bool], Any] | None = None
    """What a head returns instead of its result: given the head, the result, and if it has names."""

    def __reduce__(self) -> tuple[type[ThreadState], tuple[()]]:
        return ThreadState, ()


class Head:
    """The first `end` steps of a transform, called as the transform is.

    Args:
        transform: the transform.
        end: the number of its steps.
        form: the form of the transform's result if it is taken apart: then the head returns one of this form.

    Attributes:
        steps: all steps of the transform.
        thread: the state of the thread that asks.
        is_strayed: whether another thread has called it than one that reads: nobody can tell for which sample.
    """

    def __init__(self, transform: Callable[..., Any], end: int, form: ResultForm | None = None) -> None:
        self.transform: Any = transform
        self.end = end
        self.steps = steps_of(transform)
        self.form = form
        self.thread = ThreadState()
        self.is_strayed = False

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Run the steps. Several values come back as a tuple, named ones as a dict."""
        self.thread.calls += 1
        self.is_strayed |= not self.thread.is_reading
        given = self.given(values, named)
        result, is_named = self.run(given, 0, self.end), has_names(given)
        if self.thread.show is not None:
            return self.thread.show(self, result, is_named)
        return as_result(result, is_named) if self.form is None else self.form.filled(self.leaves(result))

    def given(self, values: Sequence[Any], named: Mapping[str, Any]) -> Values:
        """The arguments of a call. A keyword may be that of a whole list of steps, which know none."""
        is_list = not _is_compose(self.transform) and all(step is not self.transform for step in self.steps)
        given: Values = dict(enumerate((*values, *named.values()) if is_list else values))
        if not is_list:
            given.update(named)
        return given

    def leaves(self, values: Values) -> dict[Path, Any]:
        """What the head returns for these values of a call, of a result that is taken apart: its leaves by path."""
        form = cast(ResultForm, self.form)
        return {path: as_result(values, has_names(values)) if path == form.carrier else None for path in form.leaves}

    def run(self, values: Values, begin: int, end: int | None = None) -> Values:
        """Run some consecutive steps of the transform on the values of a call; to the last one if there is no `end`."""
        if begin == end:
            return values
        for step in self._sections(begin, end):
            values = as_values(_called(step, values), values)
        return values

    def result(self, values: Values) -> Any:
        """The result of the transform, as its caller gets it, for values that the head's steps have returned."""
        result = as_result(values, has_names(values))
        for number, step in enumerate(self._sections(self.end, None)):
            if number:
                values = as_values(result, values)
            result = _called(step, values)
        return result

    def _sections(self, begin: int, end: int | None) -> Sequence[Callable[..., Any]]:
        """Some consecutive steps; of a Compose that calls its steps in a way of its own, one Compose of these."""
        # A copy for each call: new generators of the whole transform reach the copy.
        if _is_compose(self.transform) and not (draws_by_itself(self.transform) and end is not None):
            section: Any = copy.copy(self.transform)
            section.transforms = self.transform.transforms[begin:end]
            return [section]
        return self.steps[begin:end]


def as_result(result: Values, is_named: bool) -> Any:
    """The result of a call as its caller gets it: several values as a tuple, named ones as a dict."""
    if is_named:
        return result
    return tuple(result.values()) if len(result) > 1 else result[0]


@contextmanager
def reading(heads: Sequence[Head], show: Callable[[Any, Values, bool], Any] | None = None) -> Iterator[None]:
    """Read the source of these heads in this thread. `show` gives what they return in place of their results."""
    before = [(head.thread.is_reading, head.thread.show) for head in heads]
    for head in heads:
        head.thread.is_reading, head.thread.show = True, show
    try:
        yield
    finally:
        for head, (is_reading, outer) in zip(heads, before, strict=True):
            head.thread.is_reading, head.thread.show = is_reading, outer


def _called(step: Callable[..., Any], values: Values) -> Any:
    named: Any = values
    return step(**named) if has_names(values) else step(*values.values())


def as_values(result: Any, values: Values) -> Values:
    """The result of a transform for these values, by position or keyword.

    Raises:
        UncuttableError: it was called by keywords, and has returned no dict.
    """
    if not has_names(values):
        return dict(enumerate(result if len(values) > 1 else (result,)))
    if isinstance(result, dict):
        return result
    raise UncuttableError(NOT_HELD)


def has_names(values: Values) -> bool:
    """Whether some values of a call have keywords: then its results have them, too."""
    return any(isinstance(key, str) for key in values)


# ---- where a dataset holds them ----


def sites_of(node: Any, site: Site = ()) -> Iterator[Site]:
    """Where a dataset, and datasets inside it, hold callables: attributes, methods, items of containers."""
    for key, value in _entries(node).items():
        # A StandardTransform is torchvision's, and holds the transforms of image and target.
        if isinstance(value, Dataset) or type(value).__name__ == "StandardTransform" or _holds_transforms(value):
            if len(site) < _DEEP:
                yield from sites_of(value, (*site, key))
        elif callable(value) and not isinstance(value, type):
            yield *site, key


def _holds_transforms(value: Any) -> bool:
    if not isinstance(value, dict | list | tuple) or len(value) > _MOST_ITEMS:
        return False
    return any(callable(item) or isinstance(item, Dataset) for item in _entries(value).values())


def _entries(node: Any) -> dict[Any, Any]:
    if isinstance(node, dict | list | tuple):
        return node if isinstance(node, dict) else dict(enumerate(node[:_MOST_ITEMS]))
    names = (name for name in dir(type(node)) if not name.startswith("__"))
    methods = {name: getattr(node, name) for name in names if callable(getattr_static(type(node), name))}
    return methods | getattr(node, "__dict__", {})


def transform_at(source: Any, site: Site) -> Any:
    """The transform that a source holds at a site.

    Raises:
        UncuttableError: there is none.
    """
    with suppress(AttributeError, LookupError, TypeError):
        if callable(transform := reduce(_held, site, source)):
            return transform
    raise UncuttableError(f"{type(source).__name__} has no transform at {'.'.join(map(str, site))}")


def with_transforms(source: Any, sites: Iterable[Site], make: Callable[[Site, Any], Any]) -> Any:
    """A shallow copy of a source, and of the objects on the way to its transforms, with other transforms.

    `make` is called with a site and the transform there, and returns its replacement.
    """
    copies: dict[Site, Any] = {(): _copied(source)}
    for site in sites:
        for depth, key in enumerate(site, start=1):
            path, parent = site[:depth], copies[site[: depth - 1]]
            if path in copies:
                continue
            value = _held(parent, key)
            if path == site:
                copies[path] = make(site, value)
            else:
                copies[path] = list(value) if isinstance(value, tuple) else _copied(value)
            if isinstance(parent, dict | list):
                parent[key] = copies[path]
            else:
                setattr(parent, key, copies[path])
    return copies[()]


def _copied(node: Any) -> Any:
    try:
        return copy.copy(node)
    except Exception as error:  # a `__getattr__` that asks for an attribute before there is one, for instance
        raise UncuttableError(
            f"a {type(node).__name__} cannot be copied: copy.copy raises {description(error)}"
        ) from error


def _held(node: Any, key: Any) -> Any:
    return node[key] if isinstance(node, dict | list | tuple) else getattr(node, key)


# ---- their steps ----


def steps_of(transform: Any, *, inside: bool = False) -> list[Callable[..., Any]]:
    """The steps of a transform. A subclass that runs its steps in its own way is one step.

    A Compose of albumentations or MONAI that is a step itself (`inside`) stays whole.
    """
    if _is_compose(transform):
        prepares = getattr(transform, "processors", None)  # boxes and key points, before albumentations' first step
        return [transform] if inside or prepares else list(transform.transforms)
    modules = (sys.modules.get(name) for name in ("torchvision.transforms", "torchvision.transforms.v2"))
    for kind in (nn.Sequential, *(module.Compose for module in modules if module is not None)):
        same = (getattr(type(transform), way, 0) is getattr(kind, way, 0) for way in ("__call__", "forward"))
        if isinstance(transform, kind) and all(same):
            steps = transform if isinstance(transform, nn.Sequential) else transform.transforms
            return [inner for step in steps for inner in steps_of(step, inside=True)]
    return [transform]


def draws_by_itself(transform: Any) -> bool:
    """Whether it is a Compose of albumentations that always runs: it draws whether to run at all, even then."""
    return _is_of(transform, "albumentations") and transform.p >= 1


def _is_compose(transform: Any) -> bool:
    """Whether it is a Compose of albumentations that always runs, or one of MONAI that is not lazy."""
    return draws_by_itself(transform) or (_is_of(transform, "monai.transforms") and not transform.lazy)


def _is_of(transform: Any, module: str) -> bool:
    library = sys.modules.get(module)  # not imported: then nobody made one
    return library is not None and type(transform) is getattr(library, "Compose", None)
