"""What can be a source, and how it is read.

A source is a map-style dataset that is not cached already, or a stream: any object with `__iter__`, or a function that
makes an iterator. A stream is read once per epoch, from its beginning.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, IterDataPipe, Subset

from lightning_stocache.source.walk import class_name, reachable

__all__ = [
    "Odd",
    "batch_reader",
    "check_source",
    "check_stream",
    "draws_shards",
    "identity",
    "is_own_iterator",
    "iterate",
    "load_one",
    "one_per_index",
    "position_of",
    "positions_of",
    "unwrap",
    "warn_of_odd",
]

log = logging.getLogger(__name__)


# ---- map-style sources ----


def check_source(source: Any, cached: type, *, strict: bool = True) -> None:
    """Refuse what cannot be cached, without a read.

    Args:
        source: the user's argument.
        cached: the class of cached datasets; one inside a Subset or ConcatDataset is found too.
        strict: whether an empty source is an error, not only a warning.

    Raises:
        TypeError: it is a path, iterable-style, has no length, or is cached already.
        ValueError: it is empty, and `strict`.

    Example:
        >>> check_source([], cached=dict)
        Traceback (most recent call last):
            ...
        ValueError: source must have at least one sample, got an empty list: check the path or filter it is made from
    """
    kind = type(source).__name__
    if _holds(source, cached):
        raise TypeError(f"source must be the dataset itself, got a {kind} that is cached already")
    has_indices = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if not has_indices or isinstance(source, IterableDataset | type | str | bytes):
        raise TypeError(
            f"source must be a map-style dataset with __getitem__ and __len__, got {kind}. What has no index can be "
            "given to CachedStream"
        )
    if len(source) == 0:
        if strict:
            words = f"got an empty {kind}: check the path or filter it is made from"
            raise ValueError(f"source must have at least one sample, {words}")
        log.warning("%s is empty: there is nothing to cache", kind)


def _holds(dataset: Any, kind: type) -> bool:
    if issubclass(type(dataset), kind):  # a stand-in for a Subset or ConcatDataset is an instance of both
        return True
    if isinstance(dataset, ConcatDataset):
        return any(_holds(part, kind) for part in dataset.datasets)
    return isinstance(dataset, Subset) and _holds(dataset.dataset, kind)


def unwrap(source: Any) -> Any:
    """The dataset inside a Subset, through any depth of them."""
    while type(source) is Subset:
        source = source.dataset
    return source


def identity(source: Dataset[Any]) -> str:
    """The class of a source; for a Subset also a digest of its indices, which tells two random splits apart.

    Example:
        >>> identity(Subset("abc", [2, 0]))
        'Subset b1535c7783ea8829 of builtins.str'
    """
    if type(source) is Subset:
        if isinstance(source.indices, range):  # perhaps a long one
            content = str(source.indices).encode()
        else:
            content = torch.as_tensor(list(source.indices), dtype=torch.int64, device="cpu").numpy().tobytes()
        digest = hashlib.sha256(content).hexdigest()[:16]
        return f"Subset {digest} of {identity(source.dataset)}"
    return class_name(type(source))


def batch_reader(source: Any) -> Callable[[list[int]], Any] | None:
    """The source's `__getitems__`, if it has one; of a Subset, if its dataset has one."""
    return getattr(source, "__getitems__", None) if getattr(unwrap(source), "__getitems__", None) else None


def one_per_index(samples: Any, count: int, source: Any) -> list[Any]:
    """The result of a source's `__getitems__`, as a list.

    Raises:
        TypeError: the result is no sequence of `count` samples.
    """
    if isinstance(samples, Sequence) and len(samples) == count:
        return list(samples)
    got = f"{len(samples)}" if isinstance(samples, Sequence) else f"a {type(samples).__name__}"
    raise TypeError(
        f"{type(source).__name__}.__getitems__ must return a list of one sample per index, here {count}; got {got}. "
        "Batches cannot be cached: make them in collate_fn"
    )


def load_one(source: Any, index: int) -> Any:
    """A sample, loaded as if it were missing from a batch."""
    read = batch_reader(source)
    return source[index] if read is None else one_per_index(read([index]), 1, source)[0]


def position_of(key: Any) -> int | None:
    """The index of a sampler's key, to look it up; None if it is none. The source itself always gets the key.

    Numbers of Python and numpy are indices. A bool, a mask, an array or tensor without dimensions, and an object of
    another class may mean something else to the source.

    Example:
        >>> position_of(3), position_of(np.int64(3)), position_of(True), position_of(torch.tensor(3)), position_of("3")
        (3, 3, None, None, None)
    """
    kind = type(key)
    if kind is int:
        return int(key)
    return int(key) if issubclass(kind, np.integer) else None


def positions_of(keys: Any, length: int) -> list[int] | None:
    """The indices in a sampler's key that is a list of indices of the dataset; None for any other key.

    Example:
        >>> positions_of([2, 0], 3), positions_of([2, 3], 3), positions_of([True], 3), positions_of((0, 1), 3)
        ([2, 0], None, None, None)
    """
    if type(keys) is not list or not keys:
        return None
    positions = [position for position in map(position_of, keys) if position is not None and 0 <= position < length]
    return positions if len(positions) == len(keys) else None


@dataclass(frozen=True)
class Odd:
    """A sample that does not fit the cache's spec. It is loaded every time.

    Args:
        index: of the sample, as the source got it.
        sample: as the source gave it.
        has_all_places: whether only its dtypes and shapes differ.
    """

    index: Any
    sample: Any
    has_all_places: bool = True


def warn_of_odd(source: Any, words: str) -> None:
    """Say that some samples of a source are not cached, and why."""
    log.warning(
        "%s: some samples are not cached, but loaded every time. %s (strict=True makes it an error)",
        type(source).__name__,
        words,
    )


# ---- streams ----


def check_stream(source: Any, cached: type, *, in_pipe: bool = False) -> None:
    """Refuse what is no stream, without a read.

    Args:
        source: the user's argument.
        cached: the class of cached streams.
        in_pipe: whether an IterDataPipe takes the place of the stream in its DataLoader.

    Raises:
        TypeError: it is a generator or another iterator of Python's, which ends after one epoch, an IterDataPipe, which
            DataLoader divides among workers (not `in_pipe`), or no stream of samples at all.
    """
    kinds = (cached, type, str, bytes, torch.Tensor, np.ndarray, Mapping)
    ends_once = is_own_iterator(source) and not isinstance(type(source).__iter__, FunctionType)
    is_divided = isinstance(source, IterDataPipe) and not in_pipe
    if isinstance(source, kinds) or ends_once or is_divided or not (hasattr(source, "__iter__") or callable(source)):
        raise TypeError(
            "iterable must be a stream that gives its samples anew in every epoch: an object with __iter__, or a "
            f"function that makes an iterator; got {source!r:.80}. A dataset with indices can be given to CachedDataset"
        )


def is_own_iterator(source: Any) -> bool:
    """Whether a stream has `__next__`, so that its `__iter__` may return itself. Only reading shows if it begins anew.

    Example:
        >>> is_own_iterator(iter([1])), is_own_iterator([1])
        (True, False)
    """
    return isinstance(source, Iterator)


def iterate(source: Any) -> Iterator[Any]:
    """A stream from its beginning."""
    return iter(source if hasattr(source, "__iter__") else source())


def draws_shards(source: Any) -> bool:
    """Whether a stream draws its next shard at random and never ends, as WebDataset's `resampled=True` does."""
    kinds = (type(node) for _, node in reachable(source))
    return any(kind.__module__.startswith("webdataset") and "Resampled" in kind.__name__ for kind in kinds)
