"""How the samples of a source are to lie in memory: as rows or as records, found from those that were looked at.

Rows where all of them have one shape and hold nothing but numbers: a batch of them is one copy per field. Else records,
which hold anything that can be pickled and comes out as it went in; that is tried with each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError, named
from lightning_stocache.cache.records import RecordCodec, Required, SampleCodec, is_opened, written
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.setup.request import Layout
from lightning_stocache.source.samples import bits, difference, part_at, walk
from lightning_stocache.source.transform_split import Cut

__all__ = ["Choice", "choose_codec"]

_DEEP = 4  # objects inside each other that are looked into
_ODD = 0.25  # share of the samples that may differ: one by one they pass through


@dataclass(frozen=True)
class Choice:
    """A codec, and what of the samples it cannot keep.

    Args:
        codec: between samples and bytes.
        odd: of a sample that will pass through, where most do not, in words.
    """

    codec: SampleCodec
    odd: str | None = None


def choose_codec(
    indices: Sequence[int], samples: Sequence[Any], layout: Layout = "auto", cut: Cut | None = None
) -> Choice:
    """The codec for a source.

    Args:
        indices: of the samples, for messages.
        samples: some of the source's.
        layout: "rows", "records", or "auto": rows where all of the samples allow it.
        cut: where the source was cut; the places on which its tail works have to be there in every sample.

    Raises:
        UnsupportedSampleError: they hold something that cannot be kept; the message names the field.
        SampleMismatchError: ("rows") more than a few differ in shape, dtype or structure.

    Example:
        >>> choose_codec([0, 1], [(1, 2.0), (3, 4.0)]).codec.nbytes
        16
        >>> type(choose_codec([0, 1], ["a", "bc"]).codec).__name__
        'RecordCodec'
    """
    if layout != "records":
        try:
            choice = _rows(indices, samples)
        except SampleMismatchError:
            if layout == "rows":
                raise
        except UnsupportedSampleError as error:
            if layout == "rows":
                raise UnsupportedSampleError(f'{error}. layout="records" keeps what can be pickled') from error
        else:
            if layout == "rows" or choice.odd is None:
                return choice
    return _records(indices, samples, _required(samples, cut))


def _rows(indices: Sequence[int], samples: Sequence[Any]) -> Choice:
    """Rows that are like the first sample, or like a later one where the first is odd itself."""
    failure: UnsupportedSampleError | SampleMismatchError | None = None
    for like in samples[: int(len(samples) * _ODD) + 1]:
        odd: list[SampleMismatchError] = []
        try:
            spec = SampleSpec.infer(like)
        except UnsupportedSampleError as error:
            failure = failure or error
            continue
        for index, sample in zip(indices, samples, strict=True):
            try:
                spec.encode(sample, index)
            except SampleMismatchError as error:
                odd.append(error)
        if len(odd) <= len(samples) * _ODD:
            return Choice(spec, str(odd[0]) if odd else None)
        failure = failure or odd[0]
    assert failure is not None
    raise failure


def _records(indices: Sequence[int], samples: Sequence[Any], required: Required) -> Choice:
    codec, kept = RecordCodec(0, required=required), []
    odd: list[UnsupportedSampleError | SampleMismatchError] = []
    for index, sample in zip(indices, samples, strict=True):
        try:
            record = memoryview(b"".join(codec.encode(sample, index)))
            if (path := _difference(sample, _read_back(codec, record, index))) is not None:
                raise UnsupportedSampleError(f"sample {index}: {named(path)} does not come back from bytes as it was")
            kept.append(sample)
        except (UnsupportedSampleError, SampleMismatchError) as error:
            odd.append(error)
    if len(odd) > len(samples) * _ODD:
        raise odd[0]
    return Choice(RecordCodec.infer(kept, required), str(odd[0]) if odd else None)


def _read_back(codec: RecordCodec, record: memoryview, index: int) -> Any:
    try:
        return codec.decode(record)
    except Exception as error:  # of the code of the sample's classes
        raise UnsupportedSampleError(f"sample {index} cannot be read back from bytes: {error!r}") from error


def _difference(sample: Any, other: Any) -> str | None:
    """Where two samples differ; None if they are equal, bit for bit, and have the same attributes."""
    if (where := difference(bits(sample), bits(other))) is not None:
        return where
    for (path, node), (_, again) in zip(walk(sample), walk(other), strict=True):
        if (lost := _lost(node, again, _DEEP)) is not None:
            return written(path) + lost
    return None


def _lost(node: Any, again: Any, deep: int) -> str | None:
    """Which attribute a copy lacks, also of the objects inside it: `bits` sees what a pickle sees, and no more."""
    if isinstance(node, torch.Tensor | type) or is_opened(type(node)):
        return None
    names = getattr(node, "__dict__", None)
    if not deep or not isinstance(names, dict):
        return None
    found = getattr(again, "__dict__", {})
    for name, value in names.items():
        if name not in found:
            if name[0] == "_":  # what a library keeps for itself
                continue
            return f".{name}"
        if (lost := _lost(value, found[name], deep - 1)) is not None:
            return f".{name}{lost}"
    return None


def _required(samples: Sequence[Any], cut: Cut | None) -> Required:
    """What the tail of a cut source works on, of the types that most samples have there."""
    paths = [path for places in (cut.places if cut is not None else ()) for _, path in places]
    found: Counter[Required] = Counter()
    for sample in samples:
        with suppress(KeyError, IndexError, TypeError):
            found[tuple(dict.fromkeys((path, type(part_at(sample, path))) for path in paths))] += 1
    return max(found, key=found.__getitem__)
