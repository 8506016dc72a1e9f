"""Whether records are worth their memory and their time, by a few samples that set-up has read.

A record can be larger than its sample: the pickle of a view (a slice of an Arrow table, rows of a frame with a
MultiIndex, cells of AnnData) may hold the data that it was cut from. Then the records of all samples have most of their
bytes in common, and a dataset of 2 MB takes gigabytes. And a hit can cost more than a load, where a sample is quickly
read and slowly made from its bytes. Rows are copied as they are, which no load can beat by much.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Any

from lightning_stocache.cache.records import RecordCodec

__all__ = ["why_not_worth"]

_COMPARED = 4  # samples whose records are compared
_PIECES, _PIECE = 64, 32  # bytes of a record that are looked for in another one
_LEAST_TELLING = 8  # pieces
_LEAST_VALUES = 9  # of the bytes of a piece: numbers that repeat are common to all kinds of samples
_LEAST_COMMON = 4096  # bytes: a text or a grid that samples share costs less than it takes to explain
_FACTOR = 2  # by which a hit must be slower than a read
_LOST_SECONDS = 1.0  # by hits, in an epoch
_TIMED_SECONDS = 1.0  # for the hits that are timed

_COMMON = (
    "the records of two samples have most of their bytes in common, as those of views that carry the data that they "
    "were cut from.\nTo cache it, return data of the sample alone: a copy, arrays, or plain objects"
)
_SLOW = (
    "a sample is read in %s, and made from its bytes in %s: an epoch from the cache would take longer.\nTo cache it, "
    "return arrays, tensors or plain objects"
)


def why_not_worth(codec: RecordCodec, samples: Sequence[Any], read_ns: Sequence[int], length: int) -> str | None:
    """Why the samples of a source are not worth a cache; None if they are.

    Args:
        codec: the codec of their records.
        samples: a few samples.
        read_ns: nanoseconds that reads of the source took.
        length: number of samples that an epoch serves.

    Raises:
        UnsupportedSampleError: a sample cannot be stored as bytes.
    """
    records = [b"".join(codec.contents(codec.encode(sample))) for sample in samples[:_COMPARED]]
    pairs = [(one, other) for one, other in combinations(records, 2) if one != other]
    if pairs and all(_has_most_of(*pair) for pair in pairs):
        return _COMMON
    if not read_ns:
        return None
    hits = list[int]()
    for sample in samples:
        record = memoryview(b"".join(codec.contents(codec.encode(sample))))
        begun = time.perf_counter_ns()
        codec.decode(record)
        hits.append(time.perf_counter_ns() - begun)
        if sum(hits) > _TIMED_SECONDS * 1e9:
            break
    hit, read = median(hits), median(read_ns)
    if hit > _FACTOR * read and (hit - read) * length > _LOST_SECONDS * 1e9:
        return _SLOW % (_words(read), _words(hit))
    return None


def _has_most_of(record: bytes, other: bytes) -> bool:
    """Whether another record has most bytes of a record, by pieces of it that are no mere repetition of few numbers."""
    begins = range(0, max(len(record) - _PIECE, 1), max(len(record) // _PIECES, 1))
    pieces = [record[begin : begin + _PIECE] for begin in begins]
    telling = [piece for piece in pieces if len(set(piece)) >= _LEAST_VALUES]
    found = sum(piece in other for piece in telling)
    is_large = found * len(record) > _LEAST_COMMON * len(telling)
    return len(telling) >= _LEAST_TELLING and 2 * found > len(telling) and is_large


def _words(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3g} ms" if nanoseconds > 1e5 else f"{nanoseconds / 1e3:.3g} us"
