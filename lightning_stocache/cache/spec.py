"""What a sample looks like: the fields of the first one, to which all others are held.

A sample is any nesting of dict, OrderedDict, tuple, list and namedtuple around leaves, which `field` describes.
`encode` checks a sample against the spec and gives its leaves as they are, `contents` their bytes, `flatten` both in
one, uint8 and contiguous; `unflatten` makes the sample anew from such bytes, `split` makes many at once from the memory
of a batch.
What comes out has the structure, types, dtypes and values of what went in; a dict has the key order of the first
sample. So a spec is the codec of fixed rows.

Nothing is ever cast, broadcast or cut to fit: a sample that differs is an error which names the index and the field.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.field import Field, bytes_of, named, type_name
from lightning_stocache.cache.field_rows import FieldRows

__all__ = ["SampleMismatchError", "SampleSpec"]


class SampleMismatchError(ValueError):
    """A sample differs from the spec in structure, type, dtype or shape."""


@dataclass(frozen=True)
class _Branch:
    """A container of a sample, with its keys if it is a dict; children are branches or places in the list of fields."""

    kind: type[Any]
    keys: tuple[Any, ...] | None
    children: tuple[_Branch | int, ...] = ()

    @cached_property
    def is_flat(self) -> bool:
        """Whether only leaves hang below it."""
        return not any(isinstance(child, _Branch) for child in self.children)

    def parts(self, node: Any) -> Sequence[Any]:
        """What hangs below a container of this kind."""
        return node if self.keys is None else [node[key] for key in self.keys]

    def steps(self, parts: int) -> list[str]:
        """How one goes to each of them in Python."""
        if self.keys is not None:
            return [f"[{key!r}]" for key in self.keys]
        names = getattr(self.kind, "_fields", None)
        return [f"[{number}]" for number in range(parts)] if names is None else [f".{name}" for name in names]

    def difference(self, node: Any) -> tuple[str, str] | None:
        """What was expected and what came, unless they agree."""
        if node.__class__ is not self.kind:
            return f"a {type_name(self.kind)} of {len(self.children)}", f"a {type_name(type(node))}"
        if self.keys is not None:
            ordered = self.kind is collections.OrderedDict  # two of them with another order are not equal
            if tuple(node) != self.keys if ordered else node.keys() != set(self.keys):
                return f"a {type_name(self.kind)} with the keys {list(self.keys)}", f"the keys {list(node)}"
        elif len(node) != len(self.children):
            return f"a {type_name(self.kind)} of {len(self.children)}", f"one of {len(node)}"
        return None

    def build(self, children: list[Any]) -> Any:
        if self.keys is not None:
            return self.kind(zip(self.keys, children, strict=True))
        return self.kind(*children) if hasattr(self.kind, "_fields") else self.kind(children)


@dataclass(frozen=True)
class SampleSpec:
    """The structure and fields that all samples of a cached source have. Make it from a sample with `infer`.

    Raises:
        UnsupportedSampleError: (`infer`) a leaf has no fixed size: images of PIL, strings, objects.
        SampleMismatchError: (`flatten`, `encode`) a sample differs; the message names index, field, what was expected
            and what came.

    Example:
        >>> spec = SampleSpec.infer({"image": torch.zeros(3, 8, 8, dtype=torch.uint8), "label": 7})
        >>> spec.nbytes
        200
        >>> spec.unflatten(spec.flatten({"image": torch.ones(3, 8, 8, dtype=torch.uint8), "label": 5}))["label"]
        5
    """

    tree: _Branch | int
    fields: tuple[Field, ...]

    @classmethod
    def infer(cls, sample: Any) -> SampleSpec:
        """The spec of a sample."""
        fields: list[Field] = []

        def grow(node: Any, path: str) -> _Branch | int:
            kind = type(node)
            if kind in (dict, collections.OrderedDict):
                branch = _Branch(kind, tuple(node))
            elif kind in (tuple, list) or (isinstance(node, tuple) and hasattr(kind, "_fields")):
                branch = _Branch(kind, None)
            else:
                branch = None
            if branch is not None:
                children = zip(branch.steps(len(node)), branch.parts(node), strict=True)
                return replace(branch, children=tuple(grow(child, path + step) for step, child in children))
            fields.append(Field.of(path, node))
            return len(fields) - 1

        return cls(grow(sample, ""), tuple(fields))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return sum(self.row_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slot costs: one sample and its state."""
        return self.nbytes + 1

    @property
    def batch_bytes(self) -> int:
        """Bytes that a sample takes in a batch."""
        return self.nbytes

    @property
    def title(self) -> str:
        """The fields, in words that two jobs can compare."""
        return "; ".join(f"{field.path or 'sample'}: {field}" for field in self.fields)

    @property
    def most_slot_bytes(self) -> int:
        """Bytes that suffice for a slot: all cost the same."""
        return self.slot_bytes

    @cached_property  # asked for once per batch
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of one sample in each field."""
        return tuple(field.nbytes for field in self.fields)

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Bytes of the memory for a batch of so many samples, in each field."""
        return tuple(nbytes * samples for nbytes in self.row_bytes)

    def rows(self, memory: Callable[[], Memory], samples: int) -> FieldRows:
        """Open the memory of a batch, uint8 `[samples * nbytes]` per field; it is asked for when it is needed."""
        return FieldRows(self.fields, memory, samples)

    def flatten(self, sample: Any, index: int | None = None) -> list[torch.Tensor]:
        """Check a sample and give the bytes of its leaves, one uint8 tensor per field. `index` is named in errors."""
        return [
            bytes_of(field.plain(leaf)) for field, leaf in zip(self.fields, self.encode(sample, index), strict=True)
        ]

    def encode(self, sample: Any, index: int | None = None) -> list[Any]:
        """Check a sample and give its leaves as they are, in the order of the fields."""
        leaves: list[Any] = []
        self._walk(self.tree, sample, (), index, leaves)
        for field_, leaf in zip(self.fields, leaves, strict=True):
            try:
                if field_.agrees(leaf):
                    continue
                came = str(Field.of(field_.path, leaf))
            except Exception as error:  # also what is raised by the code of a tensor subclass
                came = f"something else: {error}"
            raise SampleMismatchError(_mismatch(index, field_.path, str(field_), came))
        return leaves

    def contents(self, parts: Sequence[Any]) -> list[memoryview]:
        """The bytes of an encoded sample, `[nbytes]` per field; those of a contiguous tensor are its own memory."""
        return [field.content(leaf) for field, leaf in zip(self.fields, parts, strict=True)]

    def least_bytes(self, sample: Any) -> int:
        """Bytes that any sample takes."""
        return self.nbytes

    def is_alike(self, sample: Any) -> bool:
        """Whether a sample has the same containers and types of leaves, of whatever dtypes and shapes."""
        try:
            other = SampleSpec.infer(sample)
        except Exception:  # as in `encode`
            return False
        return other.tree == self.tree and [field.kind for field in other.fields] == [
            field.kind for field in self.fields
        ]

    def unflatten(self, rows: Sequence[torch.Tensor]) -> Any:
        """Make a sample from the bytes of its leaves, which it then owns."""
        return self.split([row.numpy() for row in rows], 1)[0]

    def split(self, memory: Memory, samples: int) -> list[Any]:
        """Make samples from the memory of a batch, uint8 `[samples * nbytes]` per field, which they own together."""
        sized = zip(self.fields, memory, self.row_bytes, strict=True)
        leaves = [field.decode(torch.from_numpy(column).view(samples, nbytes)) for field, column, nbytes in sized]
        return list(map(_maker(self.tree, leaves), range(samples)))

    def _walk(
        self,
        node: _Branch | int,
        sample: Any,
        above: tuple[tuple[_Branch, int], ...],
        index: int | None,
        leaves: list[Any],
    ) -> None:
        """Collect the leaves below a node, which has come by these branches and the numbers of their children."""
        if isinstance(node, int):
            leaves.append(sample)
            return
        if difference := node.difference(sample):
            path = "".join(branch.steps(len(branch.children))[number] for branch, number in above)
            raise SampleMismatchError(_mismatch(index, path, *difference))
        if node.is_flat:
            leaves.extend(node.parts(sample))
            return
        for number, (branch, child) in enumerate(zip(node.children, node.parts(sample), strict=True)):
            self._walk(branch, child, (*above, (node, number)), index, leaves)


def _maker(node: _Branch | int, leaves: Sequence[Any]) -> Callable[[int], Any]:
    """Makes the n-th sample of many from their leaves.

    Not a function inside `split`: one that calls itself would hold the leaves, and the memory of the batch, until the
    garbage collector comes.
    """
    if isinstance(node, int):
        make: Callable[[int], Any] = leaves[node].__getitem__
        return make
    makers = [_maker(child, leaves) for child in node.children]
    if node.kind is tuple and len(makers) == 2:  # (image, label), by far the most common
        first, second = makers
        return lambda i: (first(i), second(i))
    return lambda i: node.build([make(i) for make in makers])


def _mismatch(index: int | None, path: str, expected: str, came: str) -> str:
    sample = "a sample" if index is None else f"sample {index}"
    return (
        f"{sample}: {named(path)} must be {expected}, as in the first sample; got {came}. "
        "Rows have one structure, dtype and shape: convert, resize or pad them in the source, or keep records "
        '(layout="records")'
    )
