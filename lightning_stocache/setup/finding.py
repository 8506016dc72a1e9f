"""What a source shows when a few of its samples are read: how they can be kept, and what of it is random.

Who uses a `Reading` sees to it that it reads in a process where that does no harm (`look`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_stocache.cache.records import SampleCodec
from lightning_stocache.setup.codec_choice import choose_codec
from lightning_stocache.setup.form_choice import EncodedForm, look_at_files
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.source.access import batch_reader
from lightning_stocache.source.encoded import taken_apart
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.probe import Probe, sign
from lightning_stocache.source.random_split import split, spread
from lightning_stocache.source.transform_split import Cut

__all__ = ["Finding", "Reading"]

log = logging.getLogger(__name__)

_BY_HAND = (
    "To cache it, give its deterministic part to CachedDataset, and the random rest as transform=, which runs after "
    "the cache; allow_random=True freezes its first draw."
)
_FROZEN = 4  # samples that are read of a source which is to be cached as it is
_QUICK = 28  # indices that are read besides the first four, where that is quick
MOST_BYTES: float = 64 << 20  # of samples that were read to find out what they are, and are stored


@dataclass(frozen=True)
class Finding:
    """What has been seen of a source; it can be sent to other processes. Without a codec, nothing is cached.

    Args:
        codec: between its samples and bytes.
        cut: where the transform is cut; None if nothing is random.
        reason: why the source passes through uncached, in words.
        odd: of a sample that cannot be kept where most can, in words; it will pass through.
        reads: how many samples were read.
        worker_bytes: memory that the process which read them had for itself; None if it was this one, or if no
            loader has workers.
        encoded: what is known of its samples as files, where they may be kept so.
        as_files: whether they are kept so.
        note: what cannot be done as it was asked for, in words.
        seen: the indices of samples that were read, and are at hand as they are to be kept.
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
    seen: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """The codec and the cut in a few characters, the same where another look finds the same."""
        form = None if self.codec is None else self.codec.title, self.cut
        return hashlib.sha256(repr(form).encode(errors="replace")).hexdigest()[:16]


class Reading:
    """Reads the source of a request in this process.

    Args:
        request: whose source.
        told: is called with each index before it is read.
    """

    def __init__(self, request: CacheRequest, told: Callable[[int], None] = lambda index: None) -> None:
        self.request, self._told = request, told
        self._kept: dict[int, Any] = {}  # samples as they are to be kept
        self.kept_bytes = 0
        """Bytes that the samples take which it keeps, at most 64 MiB."""

    def find(self, known: str = "") -> Finding:
        """Read some samples, to learn what they are.

        Args:
            known: what was found by who made a cache that lies there, see `Finding.digest`. Four samples do where they
                show the same.
        """
        found, samples = _find(self.request, self._told, quick=0 if known else _QUICK)
        if known and found.digest != known:
            found, samples = _find(self.request, self._told, quick=_QUICK)
        for index, sample in samples.items():
            nbytes = 0 if found.codec is None else found.codec.least_bytes(sample)
            if self.kept_bytes + nbytes <= MOST_BYTES:
                self._kept[index] = sample
                self.kept_bytes += nbytes
        return replace(found, seen=tuple(self._kept))

    def contents(self, found: Finding, indices: Sequence[int], again: bool = False) -> dict[int, list[bytes]]:
        """Samples as they lie in a cache, encoded, by their index: those that were read, and others, read now.

        Left out is what cannot be read, or not be kept, and what draws random numbers.

        Args:
            found: what was found, with the codec that was chosen since.
            indices: of the samples.
            again: whether all are read, under other seeds than the first time.
        """
        assert found.codec is not None
        known = {} if again else {index: self._kept[index] for index in indices if index in self._kept}
        missing = [index for index in indices if index not in known]
        encoded = dict[int, list[bytes]]()
        for index, sample in (known | self._read(found, missing, again)).items():
            try:
                encoded[index] = list(map(bytes, found.codec.contents(found.codec.encode(sample, index))))
            except Exception as error:  # of the classes of the sample
                log.debug("sample %d of %s cannot be kept: %s", index, self.request.title, error)
        return encoded

    def _read(self, found: Finding, indices: Sequence[int], again: bool) -> dict[int, Any]:
        if not indices:
            return {}
        source: Any = self.request.source
        if found.as_files:
            source = taken_apart(source)[0]
        elif found.cut is not None:
            source = found.cut.apply(source)[0]
        samples = dict[int, Any]()
        with Probe(source, (), self._told) as probe:
            for index in indices:
                try:
                    read = probe.read(source, index, 2 * index + again)
                except Exception as error:  # of the source
                    log.debug("sample %d of %s cannot be read: %s", index, self.request.title, error)
                    continue
                if sign(read, read) is None:
                    samples[index] = read.sample
        return samples


def _find(request: CacheRequest, told: Callable[[int], None], quick: int) -> tuple[Finding, dict[int, Any]]:
    """What was found, and the samples that can be kept as they came; `quick`: indices that are read besides four."""
    source: Any = request.source
    if request.allow_random:
        told(0)
        with Generators(source):
            indices, samples = _readable(source, spread(request.length, _FROZEN, request.domain))
            choice = choose_codec(indices, samples, request.layout)
            note = None if request.store == "decoded" else f"store={request.store!r} is not for allow_random=True"
            return Finding(choice.codec, odd=choice.odd, reads=len(indices), note=note), {}
    parts = split(source, quick=quick, told=told, domain=request.domain)
    files: EncodedForm | str | None = None
    if request.store == "encoded" or (request.store == "auto" and request.name is None):
        files = look_at_files(source, parts.source, parts.indices, told, request.domain, chosen=not quick)
    if isinstance(files, EncodedForm):
        finished = sum(map(files.codec.least_bytes, parts.samples)) // len(parts.samples)
        files = replace(files, codec=replace(files.codec, finished_bytes=finished))
    if isinstance(files, EncodedForm) and (request.store == "encoded" or parts.reason is not None):
        kept = taken_apart(source)[0]
        contents = {index: kept[index] for index in parts.indices}
        return Finding(files.codec, reads=parts.reads + files.reads, as_files=True), contents
    if request.strict and request.store == "encoded":
        raise ValueError(f"store='encoded' cannot be had: {files}")
    if parts.reason is not None:
        return Finding(reason=f"{parts.reason}\n{_BY_HAND}", reads=parts.reads), {}
    reads = parts.reads
    if (fetch := batch_reader(source)) is not None:
        came = fetch([parts.indices[0]] * 2)
        reads += 2
        if not isinstance(came, Sequence) or isinstance(came, str) or len(came) != 2:
            reason = "its __getitems__ gives whole batches, not a list of one sample per index"
            return Finding(reason=reason, reads=reads), {}
    choice = choose_codec(parts.indices, parts.samples, request.layout, parts.cut)
    note = f"store='encoded' cannot be had: {files}" if request.store == "encoded" else None
    form = files if isinstance(files, EncodedForm) else None
    reads += 0 if form is None else form.reads
    return Finding(choice.codec, parts.cut, odd=choice.odd, reads=reads, encoded=form, note=note), parts.intact


def _readable(source: Any, indices: Sequence[int]) -> tuple[list[int], list[Any]]:
    """The indices whose samples can be read, and these; where none can, what the first raises."""
    samples, failures = {}, []
    for index in indices:
        try:
            samples[index] = source[index]
        except Exception as error:  # the source is the user's, and may raise anything
            failures.append(error)
    if not samples:
        raise failures[0]
    return list(samples), list(samples.values())
