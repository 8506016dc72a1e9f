"""Where a source is cut, and how: its transforms end before the cut, and the tail goes on after it.

A source is cut, through any depth of Subset,

- by its transforms (`transforms`), of which the first steps stay in it;
- by parts, if it is a ConcatDataset: each part has a cut of its own;
- by its format, if it is a dataset of Hugging Face with a transform.

A result may be taken apart by the code behind the transform (`result_form`).

A `Cut` holds nothing but numbers and keys, so a process that has read nothing cuts its own source in the same way. The
user's objects are not modified, and the tail works with them: a `worker_init_fn` that seeds the transform's generators
seeds the tail's. `split` finds a cut and proves that it is sound.
"""

from __future__ import annotations

import copy
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch.utils.data import Subset

from lightning_stocache.source.access import unwrap
from lightning_stocache.source.result_form import ResultForm
from lightning_stocache.source.samples import Path, node_at, with_node
from lightning_stocache.source.transforms import (
    Head,
    Site,
    UncuttableError,
    Values,
    as_values,
    reading,
    transform_at,
    with_transforms,
)
from lightning_stocache.source.walk import same_object

__all__ = ["OTHER_FORM", "Cut", "CutCall", "ResultPaths", "Tail", "format_of", "reads_as_library"]

ValuePaths: TypeAlias = tuple[tuple[int | str, Path], ...]
"""Where the values of one call lie in a sample."""

ResultPaths: TypeAlias = tuple[tuple[Any, Path], ...]
"""Where the results of one call lie in a sample: `ValuePaths`, or of one that is taken apart its parts, by path."""

OTHER_FORM = "the result of its transform, which the code behind takes apart, has another form from sample to sample"


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

    def apply(self, source: Any) -> Tail:
        """Cut `source`, without a read. The tail's `head` is the deterministic copy of `source`.

        Raises:
            ValueError: `source` holds no transform that could be cut.
        """
        clone: Any
        if type(source) is Subset:
            tail = self.apply(source.dataset)
            clone = copy.copy(source)
            clone.dataset = tail.head
            tail.head = clone
            tail.subsets.insert(0, source.indices)
            return tail
        if self.parts:
            tails = [
                None if cut is None else cut.apply(part) for cut, part in zip(self.parts, source.datasets, strict=True)
            ]
            parts = zip(tails, source.datasets, strict=True)
            clone = copy.copy(source)
            clone.datasets = [part if tail is None else tail.head for tail, part in parts]
            return Tail(self, clone, parts=tails, ends=source.cumulative_sizes)
        if (transform := format_of(source)) is not None:
            clone = copy.copy(source)
            clone.set_transform(same_object, source.format["columns"], source.format["output_all_columns"])
            return _FormatTail(self, clone, transform, source.format["columns"])
        heads = {call.site: Head(transform_at(source, call.site), call.end, call.form) for call in self.calls}
        clone = with_transforms(source, heads, lambda site, _: heads[site])
        return Tail(self, clone, [(heads[call.site], call) for call in self.calls])


class Tail:
    """The random rest of a source. The given samples keep their containers.

    The copy of the source has the `heads` of the transforms. It calls them as `calls` says for a sample like those that
    `split` has read; any other sample cannot be finished.

    Args:
        cut: where the source was cut.
        head: the copy of the source.
        calls: the heads that the copy calls for each sample, in that order, and the call that each head replaces.
        parts: the tails of the parts of a ConcatDataset; None for a deterministic part.
        ends: the number of samples up to the end of each part.

    Attributes:
        heads: the heads of all transforms in the copy.
        steps: the steps that follow the heads.
        subsets: the indices of the Subsets around the dataset that was cut, the outermost first.
    """

    def __init__(
        self,
        cut: Cut,
        head: Any,
        calls: Sequence[tuple[Head, CutCall]] = (),
        parts: Sequence[Tail | None] = (),
        ends: Sequence[int] = (),
    ) -> None:
        self.cut = cut
        self.head = head
        self._calls = calls
        self._parts = parts
        self._ends = ends
        self.heads = list(dict.fromkeys(head for head, _ in calls))
        self.steps = [step for head in self.heads for step in head.steps[head.end :]]
        self.subsets = list[Sequence[int]]()
        for part in parts:
            if part is not None:
                self.heads += part.heads
                self.steps += part.steps

    def __str__(self) -> str:
        return ", ".join(str(getattr(step, "__name__", type(step).__name__)) for step in self.steps)

    @property
    def all_steps(self) -> list[int]:
        """Which steps the heads and this tail have."""
        heads = [step for head in self.heads for step in head.steps]
        return list(map(id, heads or self.steps))

    @property
    def takes_apart(self) -> bool:
        """Whether the copy returns a part of a result, which code behind a transform would not find in its head's."""
        return any(head.form is not None for head in self.heads)

    def __call__(self, sample: Any, index: int, *, has_usual_form: bool = False) -> Any:
        """Finish a sample of the split source.

        The source may take the result of a transform apart. If such a result has an unusual form, the sample is read
        again with the results so far in the place of its transforms.

        Args:
            sample: the sample of the split source.
            index: its index.
            has_usual_form: refuse results of an unusual form, and read nothing.

        Raises:
            UncuttableError: (`has_usual_form`) a result has an unusual form.
        """
        if self._parts:
            part, inner = self._part(index)
            return sample if part is None else part(sample, inner, has_usual_form=has_usual_form)
        results = list[Any]()
        for head, call in self._calls:
            given = {key: node_at(sample, path) for key, path in call.values}
            results.append(head.result(given))
            if head.form is None:
                named = as_values(results[-1], given)
                found = [(path, named[key]) for key, path in call.parts]
            elif head.form.fits(results[-1]):
                found = [(path, node_at(results[-1], key)) for key, path in call.parts]
            elif has_usual_form:
                raise UncuttableError(OTHER_FORM)
            else:
                return self._read_around(results, index)
            for path, part in found:
                sample = with_node(sample, path, part)
        return sample

    def _read_around(self, results: list[Any], index: int) -> Any:
        """The sample of an index for the results that its transforms have returned so far, and those to come."""

        def show(head: Head, values: Values, _: bool) -> Any:
            return results.pop(0) if results else head.result(values)

        with reading(self.heads, show):
            return self.head[index]

    def finish_batch(self, samples: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """Finish samples that the source loads in one call."""
        return list(map(self, samples, indices))

    def calls(self, index: int) -> Sequence[tuple[Head, CutCall]]:
        """The heads that the copy calls for a sample, in that order, and the call that each head replaces."""
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


# ---- by a format of Hugging Face ----


class _FormatTail(Tail):
    """Calls the transform as `__getitems__` does, for one sample with a batch of one. It gets only these columns."""

    def __init__(self, cut: Cut, head: Any, transform: Any, columns: Sequence[str]) -> None:
        super().__init__(cut, head)
        self.steps = [transform]
        self._columns = frozenset(columns)

    def finish_batch(self, samples: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """Finish the rows of a batch."""
        batch = {name: [row[name] for row in samples] for name in samples[0]}
        others = {name: batch.pop(name) for name in samples[0] if name not in self._columns}
        batch = self.steps[0](batch)
        if others:
            batch.update(others)
        count = len(batch[next(iter(batch))])
        return [{name: values[number] for name, values in batch.items()} for number in range(count)]

    def __call__(self, sample: Any, index: int, *, has_usual_form: bool = False) -> Any:
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
