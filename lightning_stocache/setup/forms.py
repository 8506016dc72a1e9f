"""The form in which samples are stored: rows or records, decoded or as their files; and whether records are worth it.

Samples of one shape that hold only numbers are rows: a batch of rows is one copy per field. Other samples are records,
which hold any object that survives pickling. Set-up tries this with each sample that it reads.

A sample stored as its file saves the reading. A decoded sample saves the decoding too, and takes more memory. Set-up
measures the seconds and bytes of both forms; the granted memory decides.

A record can be larger than its sample: the pickle of a view (a slice of an Arrow table, rows of a frame with a
MultiIndex, cells of AnnData) may hold the data that it was cut from. Then the records of all samples have most of their
bytes in common, and a dataset of 2 MB takes gigabytes. And a hit can cost more than a load, where a sample is quickly
read and slowly made from its bytes. Rows are copied as they are, which no load can beat by much.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, islice
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import Dataset

from lightning_stocache.cache.codec import Codec, SampleMismatchError, UnsupportedSampleError, named
from lightning_stocache.cache.placement import Domain
from lightning_stocache.cache.records import RecordCodec, Required
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.node.errors import description
from lightning_stocache.setup.request import Layout
from lightning_stocache.source.access import unwrap
from lightning_stocache.source.encoded import EncodedSource, access_to
from lightning_stocache.source.probe import FEW, Probe, attributed, words_of
from lightning_stocache.source.random_split import Split
from lightning_stocache.source.samples import bits, node_at, where_different
from lightning_stocache.source.transform_split import Cut

__all__ = ["EncodedForm", "choose_codec", "keeps_files", "look_at_files", "why_not_worth"]

_ODD = 0.25  # share of the samples that may differ and then pass through
_TIMED = 12  # files of other samples that are read for the first time, if there are so many

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

_Failure: TypeAlias = UnsupportedSampleError | SampleMismatchError


# ---- rows or records ----


def choose_codec(
    indices: Sequence[int], samples: Sequence[Any], layout: Layout = "auto", cut: Cut | None = None
) -> Codec:
    """Choose the codec for a source. It may be unable to store a few of the samples, which then pass through.

    Args:
        indices: indices of the samples, for messages.
        samples: some samples of the source.
        layout: "rows", "records", or "auto": rows if all of the samples allow it.
        cut: where the source was cut. Every sample must have the fields that the tail works on.

    Raises:
        UnsupportedSampleError: the samples cannot be stored; the message names the field.
        SampleMismatchError: ("rows") more than a few differ in shape, dtype or structure.

    Example:
        >>> choose_codec([0, 1], [(1, 2.0), (3, 4.0)]).nbytes
        16
        >>> type(choose_codec([0, 1], ["a", "bc"])).__name__
        'RecordCodec'
    """
    if layout != "records":
        try:
            spec = SampleSpec.infer(samples[0])
            failures = _failures(lambda sample, index: _check_row(spec, sample, index), indices, samples)
            if len(failures) <= (len(samples) * _ODD if layout == "rows" else 0):
                return spec
            raise next(iter(failures.values()))
        except SampleMismatchError:
            if layout == "rows":
                raise
        except UnsupportedSampleError as error:
            if layout == "rows":
                raise UnsupportedSampleError(f'{error}. layout="records" keeps what can be pickled') from None
    codec = RecordCodec(0, required=_required(samples, cut))
    failures = _failures(lambda sample, index: _check_record(codec, sample, index), indices, samples)
    if len(failures) > len(samples) * _ODD:
        raise next(iter(failures.values()))
    kept = [sample for number, sample in enumerate(samples) if number not in failures]
    return RecordCodec.infer(kept, codec.required)


def _failures(
    check: Callable[[Any, int], object], indices: Sequence[int], samples: Sequence[Any]
) -> dict[int, _Failure]:
    """The errors of samples that cannot be stored, by their position."""
    failures = dict[int, _Failure]()
    for position, (index, sample) in enumerate(zip(indices, samples, strict=True)):
        try:
            check(sample, index)
        except (UnsupportedSampleError, SampleMismatchError) as error:
            failures[position] = type(error)(str(error))  # its traceback would keep all callers alive
    return failures


def _check_row(spec: SampleSpec, sample: Any, index: int) -> None:
    """Refuse a sample whose fields change on the way to bytes and back; a `numpy.memmap` may become an array."""
    leaves = spec.encode(sample, index)
    copied = spec.encode(spec.decoded(spec.contents(leaves)), index)
    for field, leaf, copy in zip(spec.fields, leaves, copied, strict=True):
        if bits(np.asarray(leaf) if isinstance(leaf, np.memmap) else leaf) != bits(copy):
            raise UnsupportedSampleError(f"sample {index}: {named(field.path)} does not come back from bytes as it was")


def _check_record(codec: RecordCodec, sample: Any, index: int) -> None:
    """Refuse a sample that changes on the way to bytes and back."""
    record = memoryview(b"".join(codec.encode(sample, index)))
    try:
        copy = codec.decode(record)
    except Exception as error:  # of the code of the sample's classes
        raise UnsupportedSampleError(f"sample {index} cannot be read back from bytes: {description(error)}") from error
    if (path := where_different(bits(sample), bits(copy))) is not None:
        raise UnsupportedSampleError(f"sample {index}: {named(path)} does not come back from bytes as it was")


def _required(samples: Sequence[Any], cut: Cut | None) -> Required:
    """The fields that the tail of a cut source works on, with their types in most of the samples."""
    paths = () if cut is None else cut.paths
    found: Counter[Required] = Counter()
    for sample in samples:
        with suppress(KeyError, IndexError, TypeError):
            found[tuple(dict.fromkeys((path, type(node_at(sample, path))) for path in paths))] += 1
    return max(found, key=found.__getitem__)


# ---- records that are worth their memory and their time ----


def why_not_worth(codec: Codec, samples: Sequence[Any], read_ns: Sequence[int], length: int) -> str | None:
    """Why the samples of a source are not worth a cache; None if they are.

    Args:
        codec: of these samples.
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
        record = b"".join(codec.contents(codec.encode(sample)))
        begun = time.perf_counter_ns()
        codec.decoded([record])
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


# ---- decoded or as files ----


@dataclass(frozen=True)
class EncodedForm:
    """The costs of samples as their files.

    Args:
        codec: stores the files as records.
        read_seconds: time of the first read of a file.
        decode_seconds: time to decode a file.
        reads: number of reads of samples and files that the comparison and the measurement took.
    """

    codec: RecordCodec
    read_seconds: float
    decode_seconds: float
    reads: int = 0


def look_at_files(
    source: Dataset[Any], parts: Split, domain: Domain | None = None, *, chosen: bool = False
) -> EncodedForm | str:
    """Divide a source into its files and their decoding. Returns the measured costs, or why this is impossible.

    Args:
        source: the user's dataset.
        parts: its deterministic part, and samples of it. The files of these samples are tried.
        domain: the indices that may be read; by default all.
        chosen: whether the user has chosen this form. Then no files of other indices are timed.
    """
    files = access_to(source)
    if files is None:
        return (
            f"the files of a {type(unwrap(source)).__name__} are not known. Give it two methods: read(index), which "
            "returns what is to be kept (bytes), and decode(content, index), which makes the sample of it"
        )
    with Probe(source) as probe:
        try:
            for index in parts.indices[:FEW]:
                original = probe.read(source, index, 2 * index)
                again = probe.read(_Decoded(files), index, 2 * index)
                if again.bits != original.bits or probe.generators.moved(original.after, again.after):
                    return f"sample {index}, decoded from its file, is not the sample that the source returns"
            among: Any = range(len(files)) if domain is None else domain
            later = () if chosen else (among[rank] for rank in range(len(among) // 2, len(among)))
            known = set(parts.indices)
            fresh = islice((index for index in later if index not in known), _TIMED)
            form = _timed(files, parts.source, list(fresh) or parts.indices)
            finished = sum(map(form.codec.least_bytes, parts.samples)) // len(parts.samples)
            return replace(form, codec=replace(form.codec, finished_bytes=finished), reads=form.reads + probe.reads)
        except Exception as error:  # methods of these names with another meaning, or a file that cannot be opened
            return words_of(attributed(error), "reading its files, and decoding them apart,")


class _Decoded(Dataset[Any]):
    """Samples that are read as files, and decoded."""

    def __init__(self, files: EncodedSource) -> None:
        self._files = files

    def __getitem__(self, index: int) -> Any:
        return self._files(self._files[index], index)


def _timed(files: EncodedSource, head: Any, indices: Sequence[int]) -> EncodedForm:
    """Measure the costs of some files, with three reads per sample."""
    contents, reads, decodes = [], [], []
    for index in indices:
        try:
            begin = time.perf_counter()
            content = files[index]
            read = time.perf_counter()
            files[index]
            again = time.perf_counter()
            head[index]
        except Exception:  # a broken file: the batch that asks for it raises
            continue
        contents.append(content)
        reads.append(read - begin)
        decodes.append(max(time.perf_counter() - again - (again - read), 0.0))
    codec = replace(RecordCodec.infer(contents), form="encoded")
    return EncodedForm(codec, median(reads), median(decodes), 3 * len(indices))


def keeps_files(granted: int, length: int, decoded: Codec, encoded: EncodedForm) -> bool:
    """Whether later epochs are faster with samples stored as their files than with decoded samples.

    Args:
        granted: bytes that the cache may take.
        length: number of samples.
        decoded: codec of decoded samples.
        encoded: costs of the files.

    Example:
        >>> files = EncodedForm(RecordCodec(1000 - 16), read_seconds=2e-3, decode_seconds=1e-3)
        >>> [keeps_files(size, 100, RecordCodec(10_000 - 16), files) for size in (10**6, 700_000, 600_000, 10**4)]
        [False, False, True, True]
    """
    read, decode = encoded.read_seconds, encoded.decode_seconds
    as_files, as_samples = (min(granted // codec.slot_bytes, length) for codec in (encoded.codec, decoded))
    return length * decode + (length - as_files) * read < (length - as_samples) * (read + decode)
