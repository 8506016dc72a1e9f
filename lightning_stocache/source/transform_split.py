"""Where a source is cut, and how: its transforms end before the cut, and the tail goes on after it.

A source is cut, through any depth of Subset,

- by its transforms: whatever its `__getitem__` calls that it holds in an attribute, in a list or dict, as a method of
  its own, or in a dataset inside it;
- by parts, if it is a ConcatDataset: each part has a cut of its own;
- by its format, if it is a dataset of Hugging Face with a transform.

Nested Composes and Sequentials of torchvision are one flat list of steps; a Compose of albumentations or MONAI has the
steps that it holds itself. Steps are called as the whole transform is: with one value, with several, or by keywords.
A result may be taken apart by the code behind the transform (`result_form`).

A `Cut` holds nothing but numbers and keys, so a process that has read nothing cuts its own source in the same way. The
user's objects are not modified, and the tail works with them: a `worker_init_fn` that seeds the transform's generators
seeds the tail's. `split` finds a cut and proves that it is sound.
"""

from __future__ import annotations

import copy
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from inspect import getattr_static
from typing import Any, NamedTuple, TypeAlias, cast

from torch import nn
from torch.utils.data import Dataset, Subset

from lightning_stocache.node.errors import description
from lightning_stocache.source.access import unwrap
from lightning_stocache.source.result_form import ResultForm
from lightning_stocache.source.samples import Path, node_at, with_node
from lightning_stocache.source.walk import same_object

__all__ = [
    "Cut",
    "CutCall",
    "Head",
    "NOT_HELD",
    "OTHER_FORM",
    "ResultPaths",
    "Site",
    "Tail",
    "TailCall",
    "UncuttableError",
    "Values",
    "draws_by_itself",
    "format_of",
    "has_names",
    "as_values",
    "transform_at",
    "reading",
    "reads_as_library",
    "sites_of",
    "steps_of",
    "as_result",
    "with_transforms",
]

Values: TypeAlias = dict[int | str, Any]
"""The arguments of a transform, or its results: by position, or by keyword."""

ValuePaths: TypeAlias = tuple[tuple[int | str, Path], ...]
"""Where the values of one call lie in a sample."""

ResultPaths: TypeAlias = tuple[tuple[Any, Path], ...]
"""Where the results of one call lie in a sample: `ValuePaths`, or of one that is taken apart its parts, by path."""

Site: TypeAlias = tuple[Any, ...]
"""Where a dataset holds a transform: attributes, and keys of lists and dicts."""

_MOST_ITEMS = 64  # of a list that may hold transforms: a longer one holds data
_DEEP = 6  # attributes and keys that lead to a transform
NOT_HELD = "the sample does not hold what its transform returns, but something made of it"
OTHER_FORM = "the result of its transform, which the code behind takes apart, has another form from sample to sample"


class UncuttableError(ValueError):
    """The source cannot be split; the message says why."""


class MisfitError(UncuttableError):
    """The result of a transform has another form than those that set-up has seen.

    Args:
        replay: makes the sample of this result.
    """

    def __init__(self, replay: Callable[[], Any]) -> None:
        super().__init__(OTHER_FORM)
        self.replay = replay


class CutCall(NamedTuple):
    """A call of a cut transform.

    Args:
        site: where the source holds the transform.
        end: how many of its steps stay there.
        values: where the values of the call lie in the sample without the other steps.
        parts: where the results lie in the finished sample.
        form: the form of the result if it is taken apart; None if the sample holds it whole.
    """

    site: Site
    end: int
    values: ValuePaths
    parts: ResultPaths
    form: ResultForm | None = None


@dataclass(frozen=True)
class Cut:
    """Where a source is cut. Found by `split` in one process, it can be applied to the same source in another.

    Args:
        calls: the calls of cut transforms for a sample, in order.
        parts: the cuts of the parts of a ConcatDataset; None for a deterministic part.
        is_blind: whether the code behind the transforms looks at none of their results (`opaque`).
        unproved: how many samples of head and tail have still to be compared with the source's.
    """

    calls: tuple[CutCall, ...] = ()
    parts: tuple[Cut | None, ...] = ()
    is_blind: bool = field(default=False, compare=False, repr=False)
    unproved: int = field(default=0, compare=False, repr=False)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where the values that the tail works on lie in every sample; of parts, if it is the same in all."""
        of_parts = {() if part is None else part.paths for part in self.parts}
        if len(of_parts) == 1:
            return of_parts.pop()
        return tuple(dict.fromkeys(path for call in self.calls for _, path in call.values))

    def apply(self, source: Any) -> tuple[Any, Tail]:
        """The deterministic copy of `source` and the tail, without a read.

        Raises:
            ValueError: `source` holds no transform that could be cut.
        """
        clone: Any
        tail: Tail
        if type(source) is Subset:
            clone = copy.copy(source)
            clone.dataset, tail = self.apply(source.dataset)
            tail.subsets.insert(0, source.indices)
        elif self.parts:
            parts = zip(self.parts, source.datasets, strict=True)
            heads, tails = zip(*[(part, None) if cut is None else cut.apply(part) for cut, part in parts], strict=True)
            clone = copy.copy(source)
            clone.datasets = list(heads)
            tail = Tail(parts=tails, ends=source.cumulative_sizes)
        elif (transform := format_of(source)) is not None:
            clone = copy.copy(source)
            clone.set_transform(same_object, source.format["columns"], source.format["output_all_columns"])
            tail = _FormatTail(transform, source.format["columns"])
        else:
            first = {call.site: Head(transform_at(source, call.site), call.end, call.form) for call in self.calls}
            clone = with_transforms(source, first, lambda site, _: first[site])
            tail = Tail([TailCall(first[call.site], call.values, call.parts) for call in self.calls])
        tail.head = clone
        tail.is_blind = self.is_blind
        tail.unproved = self.unproved
        return clone, tail


class TailCall(NamedTuple):
    """A call of a head for a sample: `CutCall.values` and `CutCall.parts`."""

    head: Head
    values: ValuePaths
    parts: ResultPaths


class Tail:
    """The random rest of a source. The given samples keep their containers.

    The copy of the source has the `heads` of the transforms. It calls them as `calls` says for a sample like those that
    `split` has read; any other sample cannot be finished.

    Args:
        calls: the calls of heads for each sample, in their order.
        parts: the tails of the parts of a ConcatDataset; None for a deterministic part.
        ends: the number of samples up to the end of each part.

    Attributes:
        head: the copy of the source.
        heads: the heads of all transforms in it.
        steps: the steps that follow the heads.
        subsets: the indices of the Subsets around the dataset that was cut, the outermost first.
        is_blind: `Cut.is_blind`.
        unproved: `Cut.unproved`.
    """

    head: Any = None
    is_blind = False
    unproved = 0

    def __init__(
        self,
        calls: Sequence[TailCall] = (),
        parts: Sequence[Tail | None] = (),
        ends: Sequence[int] = (),
    ) -> None:
        self._calls = calls
        self._parts = parts
        self._ends = ends
        self.heads = list(dict.fromkeys(call.head for call in calls))
        self.steps = [step for head in self.heads for step in head.steps[head.end :]]
        self.subsets = list[Sequence[int]]()
        for part in parts:
            if part is not None:
                self.heads += part.heads
                self.steps += part.steps

    def __str__(self) -> str:
        return ", ".join(str(getattr(step, "__name__", type(step).__name__)) for step in self.steps)

    @property
    def takes_apart(self) -> bool:
        """Whether the copy returns a part of a result, which code behind a transform would not find in its head's."""
        return any(head.form is not None for head in self.heads)

    def __call__(self, sample: Any, index: int) -> Any:
        """Finish a sample of the split source."""
        try:
            return self.finish(sample, index)
        except MisfitError as misfit:
            return misfit.replay()

    def finish(self, sample: Any, index: int) -> Any:
        """Finish a sample of the split source.

        Raises:
            MisfitError: a result has another form than usual.
        """
        if self._parts:
            part, inner = self._part(index)
            return sample if part is None else part.finish(sample, inner)
        results = list[Any]()
        for head, values, parts in self._calls:
            given = {key: node_at(sample, path) for key, path in values}
            results.append(head.result(given))
            if head.form is None:
                named = as_values(results[-1], given)
                found = [(path, named[key]) for key, path in parts]
            elif head.form.fits(results[-1]):
                found = [(path, node_at(results[-1], key)) for key, path in parts]
            else:
                raise MisfitError(partial(self._replayed, results, index))
            for path, part in found:
                sample = with_node(sample, path, part)
        return sample

    def _replayed(self, results: list[Any], index: int) -> Any:
        """The sample of an index for the results that its transforms have returned so far, and those to come."""

        def show(head: Head, values: Values, _: bool) -> Any:
            return results.pop(0) if results else head.result(values)

        with reading(self.heads, show):
            return self.head[index]

    def finish_batch(self, samples: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """Finish samples that the source loads in one call."""
        return list(map(self, samples, indices))

    def calls(self, index: int) -> Sequence[TailCall]:
        """The calls of heads for a sample, in their order."""
        if self._parts:
            part, inner = self._part(index)
            return () if part is None else part.calls(inner)
        return self._calls

    def _part(self, index: int) -> tuple[Tail | None, int]:
        """The tail of the part in which an index lies, and the index in that part."""
        for indices in self.subsets:
            index = int(indices[index])
        index %= self._ends[-1]
        part = bisect_right(self._ends, index)
        return self._parts[part], index - (self._ends[part - 1] if part else 0)


# ---- by transforms ----


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
        return {path: as_result(values, has_names(values)) if path == form.place else None for path in form.leaves}

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


# ---- by a format of Hugging Face ----


class _FormatTail(Tail):
    """Calls the transform as `__getitems__` does, for one sample with a batch of one. It gets only these columns."""

    def __init__(self, transform: Any, columns: Sequence[str]) -> None:
        super().__init__()
        self.steps, self._columns = [transform], frozenset(columns)

    def finish_batch(self, samples: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """Finish the rows of a batch."""
        batch = {name: [row[name] for row in samples] for name in samples[0]}
        others = {name: batch.pop(name) for name in samples[0] if name not in self._columns}
        batch = self.steps[0](batch)
        if others:
            batch.update(others)
        count = len(batch[next(iter(batch))])
        return [{name: values[number] for name, values in batch.items()} for number in range(count)]

    def finish(self, sample: Any, index: int) -> Any:
        """Finish a row."""
        return self.finish_batch([sample], [index])[0]


def format_of(source: Any) -> Any:
    """The transform of a dataset of Hugging Face; None for any other source."""
    library = sys.modules.get("datasets")  # not imported: then nobody made one
    if library is None or not isinstance(source, library.Dataset) or source.format["type"] != "custom":
        return None
    return source.format["format_kwargs"]["transform"]


def reads_as_library(source: Any) -> bool:
    """Whether a dataset of Hugging Face, or a Subset of one, reads its samples as the library does."""
    kind, library = type(unwrap(source)), sys.modules.get("datasets")
    names = ("__getitem__", "__getitems__")
    return library is not None and all(getattr(kind, name, 0) is getattr(library.Dataset, name, 1) for name in names)


# ---- the transforms of a dataset ----


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

    Args:
        source: the dataset.
        sites: which transforms are replaced.
        make: called with a site and the transform there; returns its replacement.
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

    Args:
        transform: any callable.
        inside: whether it is a step itself: a Compose of albumentations or MONAI then stays whole.
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
