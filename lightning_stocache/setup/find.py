"""Set-up reads a few samples of a source, to choose their codec and to find the random part of the source.

A `SourceReader` lets a `Reader` read the source. The process keeps the samples until they are stored. Of a stream it
reads the first 16 samples, and of a rolling cache, whose sources are slow, the first two that its fillers draw.
"""

from __future__ import annotations

import hashlib
import logging
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

from torch.utils.data import get_worker_info

from lightning_stocache.cache.codec import Codec
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.node.group import job_ranks
from lightning_stocache.node.named import manifest_of
from lightning_stocache.setup.forms import EncodedForm, choose_codec, look_at_files, why_not_worth
from lightning_stocache.setup.reader import Reader, Subject, start_method
from lightning_stocache.setup.request import CacheRequest, LoaderSettings
from lightning_stocache.source.access import batch_reader, is_own_iterator
from lightning_stocache.source.draws import Draws, EndOfStreamError
from lightning_stocache.source.encoded import access_to
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.probe import FEW, MANY, Probe, Read, attributed, spread, why_random, words_of
from lightning_stocache.source.proof import Proof
from lightning_stocache.source.random_split import Split, split
from lightning_stocache.source.samples import bits, digest_of, mark_of, same_sample, stacked
from lightning_stocache.source.snapshot import MovedNumbers
from lightning_stocache.source.transform_split import Cut, Tail
from lightning_stocache.source.witness import Witness

__all__ = ["WAY_OF_STREAMS", "Finding", "FirstSampleError", "SourceReader", "parts_of", "stream_difference"]

log = logging.getLogger(__name__)

_BY_HAND = (
    "To cache it, give its deterministic part to CachedDataset, and the random rest as transform=, which runs after "
    "the cache; freeze_random=True freezes its first draw."
)
_IN_COLLATE = "To cache it, let __getitems__ load each sample by itself, and pad or normalise batches in collate_fn."
_NO_STACK = (
    "its sampler draws lists of indices, and what it gives for such a list is not the stack of its samples.\nTo cache "
    "it, let the loader make the batches: batch_size= instead of a BatchSampler as sampler"
)
_COUNT = "To cache it, count in transform= of CachedDataset, which runs after the cache"
_BY_SPEC = "To cache it, give CachedDataset a spec=, with which set-up reads nothing"
_COUNTED = 3  # samples that are read of a source that counts its reads
_QUICK = MANY - FEW  # indices that are read after the first four, if reading is fast
MOST_BYTES: float = 64 << 20  # of the samples that the process keeps
_OF_STREAM = 16  # samples that are read of a stream
_OF_POOL = 2  # one would not show that shapes differ
_TRIES = 6  # failed draws after which set-up gives up
_SECONDS = 10.0  # after which two samples are enough
WAY_OF_STREAMS = "Give its deterministic part to CachedStream, and the random rest as transform=; or freeze_random=True"
"""The way to cache a random stream."""

_ANOTHER = (
    "it is random, or another one in every epoch, as batches are that it makes of shuffled samples (make them in the "
    f"loader).\n{WAY_OF_STREAMS}"
)
_AT_ITS_READ = "To cache it, let it open files and start threads at its first read"
_BY_CONTEXT = 'Give multiprocessing_context="forkserver" or "spawn"'
_ONCE = "it is its own iterator, and iterating over it again does not begin with the same samples"


class FirstSampleError(RuntimeError):
    """No sample of a source could be read, or samples cannot be stored."""


class FilesError(ValueError):
    """Samples cannot be stored as their files."""


@dataclass(frozen=True)
class Finding:
    """The facts about a source that set-up has found. It can be sent to other processes.

    Args:
        codec: the codec of the samples; None: nothing is cached.
        cut: where the transform is cut; None if nothing is random.
        reason: why the source passes through uncached.
        reads: number of reads of the source.
        encoded: the costs of samples as their files, if they may be stored in this form.
        as_files: whether samples are stored as their files.
        note: why an option cannot be followed.
        seen: the indices of the samples that the process keeps until they are stored.
        machinery: places of the source's state that reads move.
        serves_lists: whether the source gives, for a list of indices, the stack of their samples.
    """

    codec: Codec | None = None
    cut: Cut | None = None
    reason: str | None = None
    reads: int = 0
    encoded: EncodedForm | None = None
    as_files: bool = False
    note: str | None = None
    seen: tuple[int, ...] = ()
    is_certain: bool = True
    machinery: frozenset[str] = frozenset()
    serves_lists: bool = False

    @property
    def digest(self) -> str:
        """The codec and the cut in 16 characters."""
        form = None if self.codec is None else self.codec.title, self.cut
        return hashlib.sha256(repr(form).encode(errors="replace")).hexdigest()[:16]


class SourceReader:
    """Reads the source of a request, in a process that lives from the first read until `close`.

    Args:
        request: the request with the source. The process starts as a worker of its loader does.
        reader: a process that reads several sources; by default a process of its own.
        number: number of the source in that process.
        found: what is known about the source.
    """

    def __init__(
        self, request: CacheRequest, reader: Reader | None = None, number: int = 0, found: Finding = Finding()
    ) -> None:
        self.request = request
        self.found = found
        """The finding that `look` has returned, with the codec that was chosen since."""
        self._number = number
        self._failed = False
        if reader is None:
            method, init = _way(request)
            reader = Reader([_subject(request)], method, init=init, must=request.writers > 0)
        self._reader = reader

    @classmethod
    def for_all(cls, requests: Sequence[CacheRequest]) -> list[SourceReader]:
        """The readers of sources that open together. One forked process reads all without a `worker_init_fn`."""
        shared = list(filter(_shares_process, requests))
        reader, numbers = Reader(list(map(_subject, shared)), "fork"), count()
        return [
            cls(request, reader, next(numbers)) if _shares_process(request) else cls(request) for request in requests
        ]

    def look(self) -> Finding:
        """Look at the source.

        If a cache of its name exists, and four samples give the finding of the job that made it, no more are read.

        Raises:
            FirstSampleError: (of a rolling cache) no sample could be read, or samples cannot be stored.
            UnsupportedSampleError: (`strict`) a sample cannot be stored as bytes.
            SampleMismatchError: (`strict`, rows) the samples differ in shape, dtype or structure.
            Exception: (`strict`) an error of the source itself.
        """
        if self.request.spec is not None:
            return Finding(self.request.spec)
        manifest = None if self.request.name is None else manifest_of(self.request.name, self.request.dir)
        known = "" if manifest is None else manifest.found
        try:
            found = cast(Finding, self._reader.ask("look", known, number=self._number))
        except Exception as error:  # the source is the user's, and may raise anything
            if self.request.writers:
                title = f"the source of a rolling cache ({type(self.request.source).__name__})"
                raise FirstSampleError(f"{title} cannot be cached: {words_of(error, 'reading it')}") from error
            if self.request.strict and self.request.by_index:
                raise
            log.debug("%s cannot be read", self.request.title, exc_info=True)
            return Finding(reason=words_of(error, "reading it"))
        # Samples under a name are what the next job compares, and each rank of a job has sockets.
        by_reach = self.request.name is not None or job_ranks()[0] > 1
        is_certain = self._reader.is_certain(self._number, by_reach=by_reach)
        return replace(found, seen=found.seen if is_certain else (), is_certain=is_certain)

    def read(self, indices: Sequence[int], again: bool = False) -> dict[int, list[bytes]]:
        """Samples by index, as bytes in a cache. Samples that are random, or cannot be read or stored, are left out.

        Args:
            indices: indices of the samples. Samples that `look` has read are not read again.
            again: whether to read all these samples again, under other seeds.
        """
        if not indices or self._failed or self.found.codec is None:
            return {}
        try:
            answer = self._reader.ask("encoded", self.found, indices, again, number=self._number)
            return cast("dict[int, list[bytes]]", answer)
        except Exception as error:  # as in `look`
            log.debug("%s cannot be read: %s", self.request.title, error)
            self._failed = True
            return {}

    def first(self) -> tuple[list[tuple[int, str]], str]:
        """Marks and digests of the first samples of a stream; and the error that ended it, or ""."""
        return cast("tuple[list[tuple[int, str]], str]", self._reader.ask("first", number=self._number))

    def close(self) -> None:
        """End the process."""
        self._reader.close()


def _way(request: CacheRequest) -> tuple[str | None, Callable[[int], None] | None]:
    """The start method of the process that reads a source, and the user's `worker_init_fn` for it."""
    loader = request.reader
    if loader is None or not _has_workers(request):
        return start_method(None), None
    method = loader.start_method or multiprocessing.get_start_method()
    # If this process read it, a generator would lose samples, which the fillers of a rolling cache draw.
    return (method if request.writers else start_method(method)), loader.worker_init_fn


def _shares_process(request: CacheRequest) -> bool:
    return _way(request) == ("fork", None) and not request.writers


def _has_workers(request: CacheRequest) -> bool:
    return request.reader is not None and request.reader.num_workers > 0


def _subject(request: CacheRequest) -> Subject:
    # What an iterator has given to this process would be missing in training.
    is_iterator = not request.by_index and is_own_iterator(request.source)
    subject = Subject(_Reading(request), request.source, request.title, _has_workers(request), is_iterator)
    if request.writers:
        return subject._replace(way_out=_BY_CONTEXT)
    if request.as_stream:
        return subject._replace(way_out=_AT_ITS_READ)
    return subject if request.reader is not None else subject._replace(way_out=_BY_SPEC)  # no loader is known


class _Reading:
    """Reads the source of a request in this process, and keeps samples, up to 64 MiB."""

    def __init__(self, request: CacheRequest) -> None:
        self.request = request
        self._samples: dict[int, Any] = {}  # as they are to be stored

    def __call__(self, method: str, *arguments: Any) -> Any:
        """The result of a method."""
        return getattr(self, method)(*arguments)

    def look(self, known: str) -> Finding:
        if not self.request.by_index:
            return _look_once(self.request)
        witness = Witness(self.request.source)
        with witness.learning():
            found, samples = _find(self.request, quick=0 if known else _QUICK)
            if known and found.digest != known:
                found, samples = _find(self.request, quick=_QUICK)
        size = 0
        for index, sample in samples.items():
            nbytes = 0 if found.codec is None else found.codec.least_bytes(sample)
            if size + nbytes <= MOST_BYTES:
                self._samples[index] = sample
                size += nbytes
        return replace(found, seen=tuple(self._samples), machinery=witness.machinery)

    def encoded(self, found: Finding, indices: Sequence[int], again: bool) -> dict[int, list[bytes]]:
        assert found.codec is not None
        known = {} if again else {index: self._samples[index] for index in indices if index in self._samples}
        source, tail = parts_of(self.request.source, found)
        encoded = dict[int, list[bytes]]()
        if isinstance(tail, Tail) and tail.cut.is_blind:
            source = Proof(self.request.source, tail)
        are_known = all(index in known for index in indices)
        with nullcontext() if are_known else Probe(source) as probe:  # which looks at all that the source reaches
            for index in indices:
                try:
                    if probe is None or index in known:
                        sample = known[index]
                    else:
                        read = probe.read(source, index, 2 * index + again)
                        if why_random(read, read) is not None:
                            continue
                        sample = read.sample
                    encoded[index] = list(map(bytes, found.codec.contents(found.codec.encode(sample, index))))
                except Exception as error:  # of the source, or of the classes of the sample
                    log.debug("sample %d of %s cannot be kept: %s", index, self.request.title, error)
        return encoded

    def first(self) -> tuple[list[tuple[int, str]], str]:
        _, samples, error = _first_samples(self.request)
        words = "" if error is None else words_of(attributed(error), "reading it")
        return [(mark_of(sample), digest_of(sample)) for sample in samples], words


def stream_difference(source: Any, known: Callable[[int], Iterable[Any]]) -> str | None:
    """Read the first samples of a stream again. Returns why they differ from the stored samples, or None.

    Args:
        source: the stream.
        known: returns the stored samples with a mark.
    """
    loader = None if get_worker_info() is None else LoaderSettings(1, 1)
    try:
        with closing(SourceReader(CacheRequest(source, as_stream=True, reader=loader))) as reader:
            samples, words = reader.first()
    except Exception as error:  # the source is the user's, and may raise anything
        return words_of(error, "reading it again")
    for number, (mark, digest) in enumerate(samples):
        if digest not in map(digest_of, known(mark)):
            return f"sample {number}, when it was read again, was not among those of the epoch before: {_ANOTHER}"
    if words:
        return f"{words} (when it was read again)"
    return None if samples else "it gives no samples when it is read again"


def parts_of(source: Any, found: Finding) -> tuple[Any, Any]:
    """The part of a source that is cached, and the function that finishes a sample after the cache, or None."""
    if found.as_files:
        files = access_to(source)
        return files, files
    if found.cut is None:
        return source, None
    tail = found.cut.apply(source)
    return tail.head, tail


def _find(request: CacheRequest, quick: int) -> tuple[Finding, dict[int, Any]]:
    """Look at a source. Returns the finding, and the samples that can be stored.

    `quick` is the number of indices to read after the first four.
    """
    if request.freeze_random:
        return _look_once(request), {}
    counters = MovedNumbers(request.source)
    try:
        return _find_by(counters, request, quick)
    finally:
        counters.put_shared_back()


def _find_by(counters: MovedNumbers, request: CacheRequest, quick: int) -> tuple[Finding, dict[int, Any]]:
    """Look at a source with the numbers that it may count with."""
    source: Any = request.source
    passes = math.inf if request.reader is None else request.reader.passes
    parts = split(source, quick=quick, domain=request.domain, passes=passes)
    reads, form, note = parts.reads, None, None
    if parts.reason is None and counters.look():
        reads += _COUNTED
        if (place := _counts_reads(parts, len(source))) is not None:
            reason = f"its samples depend on how often it was read: on {place}, which each read moves.\n{_COUNT}"
            return Finding(reason=reason, reads=reads), {}
    if request.store == "encoded" or (request.store == "auto" and request.name is None):
        files = look_at_files(source, parts, request.domain, chosen=request.store == "encoded")
        if isinstance(files, EncodedForm):
            form = files
            reads += files.reads
        elif request.store == "encoded":
            note = f"store='encoded' is not possible: {files}"
            if request.strict:
                raise FilesError(note)
    if form is not None and (request.store == "encoded" or parts.reason is not None):
        kept: Any = access_to(source)
        return Finding(form.codec, reads=reads, as_files=True), {index: kept[index] for index in parts.indices}
    if parts.reason is not None:
        return Finding(reason=f"{parts.reason}\n{_BY_HAND}", reads=parts.reads), {}
    if batch_reader(parts.source) is not None:
        batch_reason, batch_reads = _look_at_batch(parts)
        reads += batch_reads
        if batch_reason is not None:
            return Finding(reason=batch_reason, reads=reads), {}
    draws_lists = request.reader is not None and request.reader.draws_lists
    if draws_lists:
        reads += 1
        if parts.cut is not None or not _stacks(source, parts):
            return Finding(reason=_NO_STACK, reads=reads), {}
        form = None
    codec = choose_codec(parts.indices, parts.samples, request.layout, parts.cut)
    if not codec.is_fixed:
        read_ns = [read.ns for read in parts.probed]
        worthless = why_not_worth(codec, parts.samples, read_ns, request.samples)
        if worthless is not None:
            return Finding(reason=worthless, reads=reads), {}
    return Finding(codec, parts.cut, None, reads, form, note=note, serves_lists=draws_lists), parts.intact


def _stacks(source: Any, parts: Split) -> bool:
    """Whether a source gives the stack of the samples for a list of their indices, one of them twice, backwards."""
    indices = [*parts.indices[::-1], parts.indices[0]]
    samples = [*parts.samples[::-1], parts.samples[0]]
    with Probe(source):
        try:
            return all(bits(source[indices[:n]]) == bits(stacked(samples[:n])) for n in (1, len(indices)))
        except Exception as error:  # of the source, or of leaves that cannot be stacked
            log.debug("%s does not take lists of indices: %s", type(source).__name__, error)
            return False


def _look_at_batch(parts: Split) -> tuple[str | None, int]:
    """Why samples that are loaded in batches by `__getitems__` cannot be cached, or None; and the number of reads."""
    probed, nbytes = list[Read](), 0
    for read in parts.probed:
        nbytes += RecordCodec(0).least_bytes(read.sample)
        if len(probed) < 2 or nbytes <= MOST_BYTES:
            probed.append(read)
    probed = probed if len(probed) > 1 else probed * 2
    with Probe(parts.source) as probe:
        batch = probe.read(parts.source, [read.index for read in probed], 0)
        reads = len(probed)
        if not isinstance(batch.sample, Sequence) or isinstance(batch.sample, str) or len(batch.sample) != reads:
            words = "its __getitems__ gives whole batches, not a list of one sample per index"
            return f"{words}.\n{_IN_COLLATE}", reads
        if batch.moved:
            return f"it is random (its __getitems__ moves the generator of {batch.moved[0]})\n{_BY_HAND}", reads
        for sample, read in zip(batch.sample, probed, strict=True):
            if bits(sample) != read.bits and not same_sample(sample, read.sample):
                reason = f"in a batch its __getitems__ gives another sample {read.index} than it gives alone"
                return f"{reason}.\n{_IN_COLLATE}", reads
    return None, reads


def _counts_reads(parts: Split, length: int) -> str | None:
    """Where a source counts its reads, if its samples depend on that, as on `calls // len(dataset)`; else None."""
    source: Any = parts.source
    index, known, places = parts.indices[0], [parts.probed[0].bits], list[str]()
    counters = MovedNumbers(source)
    with Probe(source) as probe:
        for _ in range(_COUNTED - 1):
            known.append(probe.read(source, index, 2 * index).bits)
            places = counters.look()
        if not places:
            return None
        try:
            with counters.ahead(length):
                known.append(probe.read(source, index, 2 * index).bits)
        except Exception:  # a list of as many entries as epochs, for instance
            return " or ".join(places)
    return " or ".join(places) if any(bits_of_read != known[0] for bits_of_read in known) else None


def _look_once(request: CacheRequest) -> Finding:
    """Choose the codec by the first samples of a stream, of a rolling cache, or of a source with freeze_random.

    Samples that cannot be read are left out.
    """
    indices, samples, error = _first_samples(request)
    if not samples:
        raise FirstSampleError("it gives no samples") if error is None else error
    if request.as_stream and not request.writers and is_own_iterator(request.source):
        _, again, _ = _first_samples(request)
        count = min(len(samples), len(again))
        if not count or list(map(bits, samples[:count])) != list(map(bits, again[:count])):
            raise FirstSampleError(_ONCE)
    codec = choose_codec(indices, samples, request.layout)
    note = None if request.store == "decoded" else f"store={request.store!r} is not for freeze_random=True"
    return Finding(codec, reads=len(samples), note=note)


def _first_samples(request: CacheRequest) -> tuple[list[int], list[Any], Exception | None]:
    """The indices of the first samples, the samples, and the last error. The seed is not the training's."""
    draws, most = request.draws, _OF_POOL
    if draws is None and request.as_stream:
        draws, most = Draws(request.source, shuffle=False, passes=1, as_stream=True), _OF_STREAM
    elif draws is None:
        among = range(request.length) if request.domain is None else request.domain
        draws, most = Draws(request.source, spread(among, FEW)), FEW
    indices, samples, last, failed = list[int](), list[Any](), None, 0
    begun = time.monotonic()
    with Generators(draws.source) as generators:
        generators.seed(random.SystemRandom().getrandbits(31))
        for draw in draws.share(0, 1):
            try:
                samples.append(draw.load())
                indices.append(draw.index if draw.index >= 0 else len(indices))  # of a stream, by number
            except Exception as error:  # the source is the user's, and may raise anything
                last = last if isinstance(error, EndOfStreamError) else error
                failed += 1
            is_late = time.monotonic() - begun > _SECONDS
            if len(samples) == most or failed > _TRIES or (is_late and len(samples) >= _OF_POOL):
                break
    return indices, samples, last
