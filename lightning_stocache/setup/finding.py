"""What a source shows when a few of its samples are read: how they can be kept, and what of it is random.

Who calls `find` sees to it that it reads in a process where that does no harm (`look`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.setup.codec_choice import choose_codec
from lightning_stocache.setup.form_choice import EncodedForm, look_at_files
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.source.access import batch_reader
from lightning_stocache.source.encoded import taken_apart
from lightning_stocache.source.generators import Generators, owned_generators
from lightning_stocache.source.random_split import split, spread
from lightning_stocache.source.transform_split import Cut

__all__ = ["Finding", "find"]

_BY_HAND = (
    "To cache it, give its deterministic part to CachedDataset, and the random rest as transform=, which runs after "
    "the cache; allow_random=True freezes its first draw."
)
_FROZEN = 4  # samples that are read of a source which is to be cached as it is
_QUICK = 28  # indices that are read besides the first four, where that is quick


@dataclass(frozen=True)
class Finding:
    """What has been seen of a source; it can be sent to other processes. Without a codec, nothing is cached.

    Args:
        codec: between its samples and bytes.
        cut: where the transform is cut; None if nothing is random.
        reason: why the source passes through uncached, in words.
        odd: of a sample that cannot be kept where most can, in words; it will pass through.
        reads: how many samples were read.
        worker_bytes: memory that the process which read them had for itself; None if it was this one.
        encoded: what is known of its samples as files, where they may be kept so.
        as_files: whether they are kept so.
        note: what cannot be done as it was asked for, in words.
    """

    codec: SampleCodec | None = None
    cut: Cut | None = None
    reason: str | None = None
    odd: str | None = None
    reads: int = 0
    worker_bytes: int | None = None
    encoded: EncodedForm | None = None
    as_files: bool = False
    note: str | None = None


def find(request: CacheRequest, told: Callable[[int], None] = lambda index: None) -> Finding:
    """Read some samples of the request's source in this process; `told` is called with each index before."""
    source: Any = request.source
    if request.allow_random:
        generators = Generators(owned_generators(source))
        before = generators.state()
        told(0)
        try:
            indices = spread(request.length, _FROZEN, request.domain)
            samples = [source[index] for index in indices]
            choice = choose_codec(indices, samples, request.layout)
            note = None if request.store == "decoded" else f"store={request.store!r} is not for allow_random=True"
            codec = _admitting(request, choice.codec, samples)
            return Finding(codec, odd=choice.odd, reads=len(indices), note=note)
        finally:
            generators.restore(before)
    parts = split(source, quick=_QUICK, told=told, domain=request.domain)
    files: EncodedForm | str | None = None
    if request.store == "encoded" or (request.store == "auto" and request.name is None):
        files = look_at_files(source, parts.source, parts.indices, told)
    if isinstance(files, EncodedForm):
        finished = sum(map(files.codec.least_bytes, parts.samples)) // len(parts.samples)
        files = replace(files, codec=replace(files.codec, finished_bytes=finished))
    if isinstance(files, EncodedForm) and (request.store == "encoded" or parts.reason is not None):
        kept = taken_apart(source)[0]
        codec = _admitting(request, files.codec, [kept[index] for index in parts.indices])
        return Finding(codec, reads=parts.reads + files.reads, as_files=True)
    if request.strict and request.store == "encoded":
        raise ValueError(f"store='encoded' cannot be had: {files}")
    if parts.reason is not None:
        return Finding(reason=f"{parts.reason}\n{_BY_HAND}", reads=parts.reads)
    reads = parts.reads
    if (fetch := batch_reader(source)) is not None:
        came = fetch([parts.indices[0]] * 2)
        reads += 2
        if not isinstance(came, Sequence) or isinstance(came, str) or len(came) != 2:
            reason = "its __getitems__ gives whole batches, not a list of one sample per index"
            return Finding(reason=reason, reads=reads)
    choice = choose_codec(parts.indices, parts.samples, request.layout, parts.cut)
    codec = _admitting(request, choice.codec, parts.samples)
    note = f"store='encoded' cannot be had: {files}" if request.store == "encoded" else None
    form = files if isinstance(files, EncodedForm) else None
    reads += 0 if form is None else form.reads
    return Finding(codec, parts.cut, odd=choice.odd, reads=reads, encoded=form, note=note)


def _admitting(request: CacheRequest, codec: SampleCodec, samples: Sequence[Any]) -> SampleCodec:
    """The codec for a cache with a name, where others may write: it reads back what this job's samples are made of."""
    return codec.admitting(samples) if request.name is not None and isinstance(codec, RecordCodec) else codec
