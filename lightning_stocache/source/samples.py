"""A sample as a tree: dicts, lists and tuples, and the leaves in them.

`walk` gives every container and leaf with its path; `rebuilt` makes the same containers around other leaves. Samples
are compared in three ways:

- `bits`: values by path that `==` compares bit for bit, of large leaves a digest; `where_different` compares two.
- `same_sample`: by value, for another job: sets and dicts have no order, and floating-point numbers may differ in
  their last bits.
- `digest_of`: all bits in one text, for another process of the job.
- `mark_of`: 64 bits made of the sums and the ends of the leaves, to find a sample among many.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from operator import getitem
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.codec import memory_of
from lightning_stocache.cache.records import canonical_bytes, is_image, written
from lightning_stocache.torch_internals import default_collate_fn_map

__all__ = [
    "Bits",
    "Path",
    "bits",
    "where_different",
    "digest_of",
    "is_masked",
    "is_namedtuple",
    "is_plain",
    "mark_of",
    "node_at",
    "parts_of_tensor",
    "rebuilt",
    "refilled",
    "same_sample",
    "stacked",
    "walk",
    "with_node",
]

Path: TypeAlias = tuple[Any, ...]
"""Where an object lies in a sample: one key or position per level, () for the sample itself."""

Bits: TypeAlias = dict[Path, Any]
"""The result of `bits`: a comparable value by path."""

_PLAIN = (str, bytes, int, bool, type(None))
_DICTS = (dict, UserDict)  # other mappings may not be iterated, or make their values anew
_SCALARS = frozenset((int, float, bool, str, bytes, type(None)))
_NUMBERS = (int, float, bool, type(None))
_LARGE = 1 << 20  # bytes of a leaf of which a digest is kept: set-up holds the bits of several samples
_MAKERS = ("__new__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__", "__setstate__")
_DEEP = 16  # containers or objects inside each other that are looked into


# ---- the tree ----


def walk(node: Any, path: Path = (), above: tuple[int, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """Every container and leaf of a sample with its path.

    `path` says where the node lies. `above` has the ids of the containers around it: none is entered inside itself.
    """
    yield path, node
    kind = type(node)  # never isinstance, which asks the object
    if issubclass(kind, (*_DICTS, list, tuple)) and id(node) not in above:
        inside = (*above, id(node))
        for key in node if issubclass(kind, _DICTS) else range(len(node)):
            yield from walk(node[key], (*path, key), inside)


def node_at(sample: Any, path: Path) -> Any:
    """The object at a path."""
    return reduce(getitem, path, sample)


def with_node(node: Any, path: Path, part: Any) -> Any:
    """The sample with another object at a path; containers on the way are copied."""
    if not path:
        return part
    key, part = path[0], with_node(node[path[0]], path[1:], part)
    if isinstance(node, tuple):
        return refilled(node, (*node[:key], part, *node[key + 1 :]))
    node = copy.copy(node)
    node[key] = part
    return node


def is_plain(node: Any) -> bool:
    """Whether a sample, and so the batch that is collated from it, can be walked by `rebuilt`."""
    kind = type(node)
    if kind in (dict, OrderedDict):
        return all(map(is_plain, node.values()))
    if node is None or isinstance(node, torch.Tensor | np.ndarray | np.generic | int | float | str | bytes):
        return kind is torch.Tensor or not isinstance(node, torch.Tensor) or kind not in default_collate_fn_map
    if kind in (list, tuple) and _is_flat(node):
        return True
    walked = kind in (list, tuple) or is_namedtuple(kind)
    return walked and kind not in default_collate_fn_map and all(map(is_plain, node))


def is_namedtuple(kind: type) -> bool:
    """Whether a class makes and pickles its objects as `collections.namedtuple` does, whatever their items are.

    Example:
        >>> from collections import namedtuple
        >>> is_namedtuple(namedtuple("Pair", "left right")), is_namedtuple(torch.nn.utils.rnn.PackedSequence)
        (True, False)
    """
    named: Any = next((parent for parent in kind.__mro__ if "_field_defaults" in vars(parent)), None)
    return named is not None and all(getattr(kind, name, None) is getattr(named, name, None) for name in _MAKERS)


def rebuilt(node: Any, leaf: Callable[[Any], Any]) -> Any:
    """A sample or batch with each leaf replaced by `leaf(value)`, in containers of the same types."""
    if type(node) in (dict, OrderedDict):
        return type(node)((key, rebuilt(value, leaf)) for key, value in node.items())
    if type(node) is list or isinstance(node, tuple):
        if _is_flat(node):
            return node
        return refilled(node, [rebuilt(value, leaf) for value in node])
    return leaf(node)


def stacked(samples: Sequence[Any]) -> Any:
    """The samples of a list of indices as a source gives them that takes a list: stacked, leaf by leaf.

    Raises:
        TypeError: (also ValueError, RuntimeError) the samples cannot be stacked.

    Example:
        >>> stacked([(np.array([1, 2]), np.int64(0)), (np.array([3, 4]), np.int64(1))])[0].tolist()
        [[1, 2], [3, 4]]
    """
    first = samples[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(list(samples))
    if isinstance(first, np.ndarray | np.generic):
        return np.stack(samples)
    if type(first) is dict:
        return {key: stacked([sample[key] for sample in samples]) for key in first}
    if type(first) in (list, tuple) or is_namedtuple(type(first)):
        return refilled(first, [stacked(parts) for parts in zip(*samples, strict=True)])
    raise TypeError(f"a {type(first).__name__} cannot be stacked")


def _is_flat(node: Any) -> bool:
    """Whether a list or tuple holds numbers and strings alone: there is nothing to be done with each of them."""
    return _SCALARS.issuperset(map(type, node))


def refilled(node: list[Any] | tuple[Any, ...], items: Sequence[Any]) -> Any:
    """A list or tuple of the same class with other items."""
    kind: Any = type(node)
    if kind in (list, tuple):
        return kind(items)
    try:
        refilled = tuple.__new__(kind, items)  # a constructor may change its arguments
    except TypeError:  # a class written in C, such as torch.Size
        return kind(items)
    if hasattr(node, "__dict__"):
        vars(refilled).update(vars(node))
    return refilled


# ---- bits ----


def bits(sample: Any) -> Bits:
    """A sample as values that `==` compares bit for bit, by path; copies, which no later read can overwrite.

    Of leaves of more than 1 MiB it has a digest of 128 bits.
    """
    return {path: _leaf_bits(node) for path, node in walk(sample)}


def _leaf_bits(node: Any) -> Any:
    kind: Any = type(node)
    if isinstance(node, _DICTS):
        return kind, tuple(node)
    if isinstance(node, list | tuple):
        return kind, len(node)
    parts = parts_of_tensor(node)
    if parts is not None:
        form, tensors = parts
        return kind, form, tuple(map(_leaf_bits, tensors)), _attribute_bits(node) if node.layout in _SPARSE else None
    if is_masked(kind):
        return kind, _leaf_bits(np.ma.getdata(node)), _leaf_bits(np.ma.getmaskarray(node))
    if (array := _array_of(node)) is not None:  # by bits: NaN equals itself, 0.0 is not -0.0
        form, content = array
        return kind, form, _content(content), _attribute_bits(node) if isinstance(node, torch.Tensor) else None
    if is_image(type(node)):
        return kind, node.mode, node.size, node.getpalette(), _content(node.tobytes())
    if kind is bytes:
        return kind, len(node), _content(node)
    if kind in _PLAIN:
        return kind, node
    if isinstance(node, set | frozenset):  # without order: that of strings differs between processes
        return kind, sorted(repr(bits(item)) for item in node)
    pickled = canonical_bytes(node)
    return kind, None if pickled is None else _content(pickled)  # if it cannot be pickled, only its type counts


def is_masked(kind: type) -> bool:
    """Whether a class is NumPy's masked array. To ask NumPy for that class imports `numpy.ma`, which takes 16 ms."""
    return issubclass(kind, np.ndarray) and kind is not np.ndarray and issubclass(kind, np.ma.MaskedArray)


def _content(buffer: Any) -> bytes:
    """The bytes of a leaf, or their digest if they are many."""
    if len(buffer) > _LARGE:
        return hashlib.blake2b(buffer, digest_size=16).digest()
    return bytes(buffer)


def _array_of(node: Any) -> tuple[tuple[Any, ...], npt.NDArray[np.uint8]] | None:
    """Dtype and shape of a tensor, array or floating-point number, and its bytes in row order, uint8 `[nbytes]`."""
    if isinstance(node, torch.Tensor):
        if node.is_meta:
            return (node.dtype, tuple(node.shape)), np.empty(0, np.uint8)
        if not _is_dense(node):
            return None
        plain = node.as_subclass(torch.Tensor).detach().cpu().resolve_conj().resolve_neg()
        return (plain.dtype, tuple(plain.shape)), memory_of(plain)
    if isinstance(node, np.ndarray | np.generic | float | complex):
        array = np.asarray(node)
        if not array.dtype.hasobject:
            rows = array if array.nbytes else np.empty(0, np.uint8)
            return (array.dtype, array.shape), np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    return None


_SPARSE: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def parts_of_tensor(tensor: Any) -> tuple[tuple[Any, ...], list[torch.Tensor]] | None:
    """A sparse, nested, jagged or quantised tensor as its form and dense tensors; None for any other object."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or _is_dense(tensor):
        return None
    form: tuple[Any, ...] = tensor.dtype, tensor.layout
    if tensor.is_nested:
        ragged: Any = tensor
        if tensor.layout is torch.strided:
            return form, list(ragged.unbind())
        lengths = [] if ragged.lengths() is None else [ragged.lengths()]
        return form, [ragged.values(), ragged.offsets(), *lengths]
    form = *form, tuple(tensor.shape)
    if tensor.layout in _SPARSE:
        whole = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
        return form, [getattr(whole, name)() for name in _SPARSE[tensor.layout]]
    if not tensor.is_quantized:
        return form, [tensor.to_dense()]
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return (*form, tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()), [tensor.int_repr()]
    scales = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return (*form, tensor.qscheme(), tensor.q_per_channel_axis()), [tensor.int_repr(), *scales]


def _attribute_bits(tensor: torch.Tensor) -> Bits:
    """The bits of a tensor's attributes, without the ids of transforms that MONAI notes there: they differ per read."""
    return {
        path: content
        for path, content in bits(vars(tensor)).items()
        if path[:1] != ("_applied_operations",) or path[-1] != "id"
    }


def where_different(left: Bits, right: Bits) -> str | None:
    """Where the bits of two samples differ, written as in Python; None if they are equal."""
    for path in {**left, **right}:
        if path not in left or path not in right or left[path] != right[path]:
            return written(path)
    return None


# ---- the same ----

_LAST_BITS = 16 * 2**-23  # of the largest number, in 32 bits: a number of 64 bits may have been computed from such


def same_sample(left: Any, right: Any) -> bool:
    """Whether two samples are the same, but for the last bits of floating-point numbers.

    Example:
        >>> same_sample({"x": 0.1 + 0.2, "tags": {"a", "b"}}, {"x": 0.3, "tags": {"b", "a"}}), same_sample([1], [2])
        (True, False)
    """
    ours, theirs = bits(left), bits(right)
    if ours.keys() != theirs.keys():
        return False
    differing = (path for path in ours if ours[path] != theirs[path])
    return all(_is_near(node_at(left, path), node_at(right, path)) for path in differing)


def _is_near(left: Any, right: Any) -> bool:
    """Whether two objects at one path differ in the last bits of floating-point numbers or the order of keys alone."""
    if type(left) is not type(right):
        return False
    if isinstance(left, _DICTS):  # they have the same keys, because there are the same paths
        return True
    parts = parts_of_tensor(left)
    if parts is not None:
        others = parts_of_tensor(right)
        if others is None or parts[0] != others[0] or len(parts[1]) != len(others[1]):
            return False
        pairs = zip(parts[1], others[1], strict=True)
        return all(_leaf_bits(ours) == _leaf_bits(theirs) or _is_near(ours, theirs) for ours, theirs in pairs)
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or not (left.is_floating_point() or left.is_complex()):
            return False
        eps = torch.finfo(left.dtype).eps
        tensors = (node.detach().as_subclass(torch.Tensor).cpu() for node in (left, right))
        left, right = (node.to(torch.complex128).numpy() for node in tensors)
    else:
        if is_masked(type(left)) and not np.array_equal(np.ma.getmaskarray(left), np.ma.getmaskarray(right)):
            return False
        left, right = np.asarray(left), np.asarray(right)
        if left.dtype != right.dtype or left.dtype.kind not in "fc":
            return False
        eps = float(np.finfo(left.dtype).eps)
    largest = np.abs(left[np.isfinite(left)]).max(initial=0)
    allowed = largest * max(_LAST_BITS, 2 * eps)
    return left.shape == right.shape and np.allclose(left, right, rtol=0, atol=allowed, equal_nan=True)


# ---- digests and marks ----


def digest_of(sample: Any) -> str:
    """A digest of a sample that is equal in other processes; of objects that cannot be compared, of their class.

    Example:
        >>> digest_of({"tags": {"a", "b"}}) == digest_of({"tags": {"b", "a"}}), digest_of(1) == digest_of(2)
        (True, False)
    """
    return hashlib.blake2b(repr(bits(sample)).encode(errors="replace"), digest_size=16).hexdigest()


_ENDS = 64  # bytes of either end of a leaf


def mark_of(sample: Any) -> int:
    """64 bits of a sample, which are equal for samples of the same content.

    Example:
        >>> mark_of({"x": torch.ones(3)}) == mark_of({"x": torch.ones(3)}) != mark_of({"x": torch.zeros(3)})
        True
    """
    digest = hashlib.blake2b(digest_size=8)
    with suppress(Exception):  # an object of the user's that only looks like one of these: the rest tells it apart
        _feed(digest, sample, _DEEP)
    return int.from_bytes(digest.digest(), "little")


def _feed(digest: Any, node: Any, deep: int) -> None:
    kind = type(node)
    digest.update(kind.__name__.encode())
    if isinstance(node, dict):
        digest.update(repr(list(node)).encode(errors="replace"))
        node = list(node.values())
    is_sequence = isinstance(node, list | tuple)
    if kind in _NUMBERS or (is_sequence and all(type(item) in _NUMBERS for item in node)):
        digest.update(repr(node).encode())
    elif is_sequence and deep:
        for item in node:
            _feed(digest, item, deep - 1)
    elif isinstance(node, bytes | bytearray | str):
        text = node.encode(errors="replace") if isinstance(node, str) else node
        digest.update(_digested(np.frombuffer(text, dtype=np.uint8)))
    elif (parts := parts_of_tensor(node)) is not None:
        digest.update(repr(parts[0]).encode())
        for part in parts[1]:
            _feed(digest, part, deep)
    elif (array := _array_of(node)) is not None:
        digest.update(repr(array[0]).encode() + _digested(array[1]))
    elif is_image(type(node)):  # a row of it: the bytes of all would take half a millisecond
        middle = node.crop((0, node.height // 2, node.width, node.height // 2 + 1))
        digest.update(f"{node.mode}{node.size}".encode() + middle.tobytes())


def _digested(content: npt.NDArray[np.uint8]) -> bytes:
    """A short digest of bytes: their number, their sum as 64-bit words (0.1 us per KB), and their ends."""
    words = content[: len(content) // 8 * 8].view(np.uint64)
    ends = content[:_ENDS].tobytes() + content[-_ENDS:].tobytes()
    return len(content).to_bytes(8, "little") + int(words.sum(dtype=np.uint64)).to_bytes(8, "little") + ends
