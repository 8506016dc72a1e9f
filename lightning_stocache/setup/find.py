"""What a source shows when a few of its samples are read: what they look like, and what of the source is random.

`SourceReader` has a `Child` read the source, which keeps the samples until they are stored.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.records import SampleCodec
from lightning_stocache.setup.child import Child, Subject, start_method
from lightning_stocache.setup.first_samples import FirstSampleError, codec_of
from lightning_stocache.setup.forms import EncodedForm, choose_codec, look_at_files
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.source.access import batch_reader
from lightning_stocache.source.draws import Draws
from lightning_stocache.source.encoded import EncodedSource
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.random_split import Probe, sign, split, spread
from lightning_stocache.source.transform_split import Cut

__all__ = ["Finding", "SourceReader", "parts_of"]

log = logging.getLogger(__name__)

_BY_HAND = (
    "To cache it, give its deterministic part to CachedDataset, and the random rest as transform=, which runs after "
    "the cache; allow_random=True freezes its first draw."
)
_FROZEN = 4  # samples that are read of a source which is to be cached as it is
_QUICK = 28  # indices that are read besides the first four, where that is quick
MOST_BYTES: float = 64 << 20  # of samples that are kept to be stored


@dataclass(frozen=True)
class Finding:
    """What is known of a source; it can be sent to other processes. Without a codec, nothing is cached.

    Args:
        codec: between its samples and bytes.
        cut: where its transform is cut; None if nothing is random.
        reason: why it passes through uncached.
        odd: what is wrong with a sample that cannot be kept where most can; it will pass through.
        reads: how many samples were read.
        encoded: what is known of its samples as files, where they may be kept so.
        as_files: whether they are kept so.
        note: why an option cannot be had.
        seen: the indices of samples that were read, and wait to be stored.
    """

    codec: SampleCodec | None = None
    cut: Cut | None = None
    reason: str | None = None
    odd: str | None = None
    reads: int = 0
    encoded: EncodedForm | None = None
    as_files: bool = False
    note: str | None = None
    seen: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """The codec and the cut in 16 characters."""
        form = None if self.codec is None else self.codec.title, self.cut
        return hashlib.sha256(repr(form).encode(errors="replace")).hexdigest()[:16]


class SourceReader:
    """Reads the source of a request, in a process that lives from the first read until this is closed.

    Args:
        request: whose source.
        child: a process that reads other sources too; by default one of its own.
        number: of the source there.
    """

    def __init__(self, request: CacheRequest, child: Child | None = None, number: int = 0) -> None:
        self.request, self._number, self._failed = request, number, False
        self._child = _child_for([request]) if child is None else child

    @classmethod
    def of(cls, requests: Sequence[CacheRequest]) -> list[SourceReader]:
        """The readers of sources that open together. One process reads all for which it is just forked."""
        shared = [request for request in requests if _way(request) == ("fork", None)]
        child, numbers = _child_for(shared) if shared else None, count()
        return [
            cls(request, child, next(numbers)) if _way(request) == ("fork", None) else cls(request)
            for request in requests
        ]

    def look(self, known: str = "") -> Finding:
        """Look at the source.

        Args:
            known: `Finding.digest` of an existing cache's maker. If four samples show the same, no more are read.

        Raises:
            UnsupportedSampleError: (`strict`) a sample holds something that cannot be kept as bytes.
            SampleMismatchError: (`strict`, rows) the samples differ in shape, dtype or structure.
            Exception: (`strict`) what the source itself raises.
        """
        if self.request.as_stream:
            try:
                draws = Draws(self.request.source, shuffle=False, passes=1, as_stream=True)
                return Finding(codec_of(draws, self.request.layout))
            except FirstSampleError as error:
                return Finding(reason=str(error))
        if self.request.spec is not None:
            return Finding(self.request.spec)
        if not self.request.length:
            return Finding(reason="it has no samples: check the path or filter it is made from")
        try:
            return cast(Finding, self._child.ask("look", known, number=self._number))
        except Exception as error:  # the source is the user's, and may raise anything
            if self.request.strict:
                raise
            return Finding(reason=_words(error))

    def read(self, found: Finding, indices: Sequence[int], again: bool = False) -> dict[int, list[bytes]]:
        """Samples by their index, as bytes in a cache. Those that cannot be read or kept, or are random, are left out.

        Args:
            found: what was found, with the codec that was chosen since.
            indices: of the samples; those that were read by `look` are not read again.
            again: whether all are read again, under other seeds than the first time.
        """
        if not indices or self._failed:
            return {}
        try:
            answer = self._child.ask("encoded", found, indices, again, number=self._number)
            return cast("dict[int, list[bytes]]", answer)
        except Exception as error:  # likewise
            log.debug("%s cannot be read: %s", self.request.title, error)
            self._failed = True
            return {}

    def close(self) -> None:
        """End the process."""
        self._child.close()


def _way(request: CacheRequest) -> tuple[str | None, Callable[[int], None] | None]:
    """How a process starts that reads a source, and the function of the user's that it calls first."""
    loader = request.reader
    if loader is None or not loader.num_workers:
        return start_method(None), None
    return start_method(loader.start_method or multiprocessing.get_start_method()), loader.worker_init_fn


def _child_for(requests: Sequence[CacheRequest]) -> Child:
    """A process that reads the sources of requests which have one way."""
    method, init = _way(requests[0])
    return Child([Subject(_Reading(request), request.source, request.title) for request in requests], method, init=init)


class _Reading:
    """Reads the source of a request in this process, and keeps what was read, up to 64 MiB."""

    def __init__(self, request: CacheRequest) -> None:
        self.request = request
        self._samples: dict[int, Any] = {}  # as they are to be stored

    def __call__(self, method: str, *arguments: Any) -> Any:
        """The result of a method."""
        return getattr(self, method)(*arguments)

    def look(self, known: str) -> Finding:
        found, samples = _find(self.request, quick=0 if known else _QUICK)
        if known and found.digest != known:
            found, samples = _find(self.request, quick=_QUICK)
        size = 0
        for index, sample in samples.items():
            nbytes = 0 if found.codec is None else found.codec.least_bytes(sample)
            if size + nbytes <= MOST_BYTES:
                self._samples[index] = sample
                size += nbytes
        return replace(found, seen=tuple(self._samples))

    def encoded(self, found: Finding, indices: Sequence[int], again: bool) -> dict[int, list[bytes]]:
        assert found.codec is not None
        known = {} if again else {index: self._samples[index] for index in indices if index in self._samples}
        source, encoded = parts_of(self.request.source, found)[0], dict[int, list[bytes]]()
        with Probe(source) as probe:
            for index in indices:
                try:
                    if index in known:
                        sample = known[index]
                    else:
                        read = probe.read(source, index, 2 * index + again)
                        if sign(read, read) is not None:
                            continue
                        sample = read.sample
                    encoded[index] = list(map(bytes, found.codec.contents(found.codec.encode(sample, index))))
                except Exception as error:  # of the source, or of the classes of the sample
                    log.debug("sample %d of %s cannot be kept: %s", index, self.request.title, error)
        return encoded


def parts_of(source: Any, found: Finding) -> tuple[Any, Any]:
    """The part of a source that is kept, and the function that finishes a sample after the cache, or None."""
    if found.as_files:
        files = EncodedSource(source)
        return files, files
    return (source, None) if found.cut is None else found.cut.apply(source)


def _find(request: CacheRequest, quick: int) -> tuple[Finding, dict[int, Any]]:
    """What is found, and the samples that can be stored; `quick`: indices that are read besides four."""
    source: Any = request.source
    if request.allow_random:
        return _look_once(request), {}
    parts = split(source, quick=quick, domain=request.domain)
    files: EncodedForm | str | None = None
    if request.store == "encoded" or (request.store == "auto" and request.name is None):
        files = look_at_files(source, parts.source, parts.indices, request.domain, chosen=not quick)
    form, reads = None, parts.reads
    if isinstance(files, EncodedForm):
        finished = sum(map(files.codec.least_bytes, parts.samples)) // len(parts.samples)
        form = replace(files, codec=replace(files.codec, finished_bytes=finished))
        reads += form.reads
    if form is not None and (request.store == "encoded" or parts.reason is not None):
        kept = EncodedSource(source)
        return Finding(form.codec, reads=reads, as_files=True), {index: kept[index] for index in parts.indices}
    note = f"store='encoded' cannot be had: {files}" if request.store == "encoded" else None
    if request.strict and note is not None:
        raise ValueError(note)
    if parts.reason is not None:
        return Finding(reason=f"{parts.reason}\n{_BY_HAND}", reads=parts.reads), {}
    if (fetch := batch_reader(source)) is not None:
        came = fetch([parts.indices[0]] * 2)
        reads += 2
        if not isinstance(came, Sequence) or isinstance(came, str) or len(came) != 2:
            reason = "its __getitems__ gives whole batches, not a list of one sample per index"
            return Finding(reason=reason, reads=reads), {}
    choice = choose_codec(parts.indices, parts.samples, request.layout, parts.cut)
    return Finding(choice.codec, parts.cut, odd=choice.odd, reads=reads, encoded=form, note=note), parts.intact


def _look_once(request: CacheRequest) -> Finding:
    """What samples look like of a source that is cached as it is. Those that cannot be read are left out."""
    source: Any = request.source
    samples, failures = dict[int, Any](), []
    with Generators(source):
        for index in spread(request.length, _FROZEN, request.domain):
            try:
                samples[index] = source[index]
            except Exception as error:  # the source is the user's, and may raise anything
                failures.append(error)
        if not samples:
            raise failures[0]
        choice = choose_codec(list(samples), list(samples.values()), request.layout)
    note = None if request.store == "decoded" else f"store={request.store!r} is not for allow_random=True"
    return Finding(choice.codec, odd=choice.odd, reads=len(samples), note=note)


def _words(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, UnsupportedSampleError | SampleMismatchError | ChildProcessError):
        return str(error)
    return f"reading it raised {type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
