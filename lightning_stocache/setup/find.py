"""What a source shows when a few of its samples are read: what they look like, and what of the source is random.

`SourceReader` has a `Child` read the source, with a `Reading`, which keeps the samples until they are stored. Where no
process can be started the source is read here, and the attributes and generators that can be reached from it are put
back.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any, cast

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.records import SampleCodec
from lightning_stocache.setup.child import Child, NoAnswerError, Told, start_method
from lightning_stocache.setup.forms import EncodedForm, choose_codec, look_at_files
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.source.access import batch_reader
from lightning_stocache.source.encoded import EncodedSource
from lightning_stocache.source.generators import Generators, reachable
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


class SourceReader:
    """Reads the source of a request, in a process that lives from the first read until this is closed.

    Args:
        request: whose source.
    """

    def __init__(self, request: CacheRequest) -> None:
        self.request = request
        self._child: Child | None = None
        self._here: Reading | None = None  # where no process can be started
        self._given_up = False

    def look(self, known: str = "") -> Finding:
        """Look at the source.

        Args:
            known: what was found by the maker of a cache that lies there, as `Finding.digest`. Four samples do where
                they show the same.

        Raises:
            UnsupportedSampleError: (`strict`) a sample holds something that cannot be kept as bytes.
            SampleMismatchError: (`strict`, rows) the samples differ in shape, dtype or structure.
            Exception: (`strict`) what the source itself raises.
        """
        if self.request.spec is not None:
            return Finding(self.request.spec)
        if not self.request.length:
            return Finding(reason="it has no samples")
        try:
            return cast(Finding, self._ask("find", known))
        except Exception as error:  # the source is the user's, and may raise anything
            if self.request.strict:
                raise
            return Finding(reason=_words(error))

    def read(self, found: Finding, indices: Sequence[int], again: bool = False) -> dict[int, list[bytes]]:
        """Samples as they lie in a cache, encoded, by their index: those that were read, and others, read now.

        Left out is what cannot be read, or not be kept, and what draws random numbers.

        Args:
            found: what was found, with the codec that was chosen since.
            indices: of the samples.
            again: whether all are read, under other seeds than the first time.
        """
        if self._given_up or not indices:
            return {}
        try:
            return cast("dict[int, list[bytes]]", self._ask("contents", found, tuple(indices), again))
        except Exception as error:  # likewise
            log.debug("%s cannot be read: %s", self.request.title, error)
            return {}

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.close()

    def _ask(self, *question: Any) -> Any:
        if self._here is None:
            try:
                return self._reading_child().ask(question)
            except NoAnswerError as error:
                log.debug("%s is read in this process: %s", self.request.title, error)
                self._here = Reading(self.request)
            except BaseException:
                self._given_up = True
                raise
        with _put_back(self.request.source):
            return self._here(question, lambda index: None)

    def _reading_child(self) -> Child:
        if self._child is None:
            request, loader = self.request, self.request.reader
            has_workers = loader is not None and loader.num_workers > 0
            theirs = (loader.start_method or multiprocessing.get_start_method()) if loader and has_workers else None
            if (method := start_method(theirs)) is None:
                raise NoAnswerError("nothing is forked here")
            self._child = Child(Reading(request, in_child=True), request.source, method, request.title)
        return self._child


class Reading:
    """Reads the source of a request in this process, and keeps what was read, up to 64 MiB.

    Args:
        request: whose source.
        in_child: whether this process is one that is started as the loader's workers are.
    """

    def __init__(self, request: CacheRequest, *, in_child: bool = False) -> None:
        self.request, self._is_new_worker = request, in_child
        self._measures = in_child and request.reader is not None and request.reader.num_workers > 0
        self._samples: dict[int, Any] = {}  # as they are to be stored

    def __call__(self, question: tuple[Any, ...], told: Told) -> Any:
        """The answer to a question: `find` or `contents`, and its arguments."""
        loader = self.request.reader
        if self._is_new_worker and loader is not None and loader.worker_init_fn is not None:
            loader.worker_init_fn(0)  # as the user's loader does when a worker starts
        self._is_new_worker = False
        answer, *arguments = question
        return self._find(told, *arguments) if answer == "find" else self._contents(told, *arguments)

    def _find(self, told: Told, known: str) -> Finding:
        found, samples = _find(self.request, told, quick=0 if known else _QUICK)
        if known and found.digest != known:
            found, samples = _find(self.request, told, quick=_QUICK)
        size = 0
        for index, sample in samples.items():
            nbytes = 0 if found.codec is None else found.codec.least_bytes(sample)
            if size + nbytes <= MOST_BYTES:
                self._samples[index] = sample
                size += nbytes
        private = _private_bytes() if self._measures else None  # 13 ms where torch is imported
        worker_bytes = None if private is None else max(private - size, 0)
        return replace(found, seen=tuple(self._samples), worker_bytes=worker_bytes)

    def _contents(self, told: Told, found: Finding, indices: Sequence[int], again: bool) -> dict[int, list[bytes]]:
        assert found.codec is not None
        known = {} if again else {index: self._samples[index] for index in indices if index in self._samples}
        missing = [index for index in indices if index not in known]
        encoded = dict[int, list[bytes]]()
        for index, sample in (known | self._read(told, found, missing, again)).items():
            try:
                encoded[index] = list(map(bytes, found.codec.contents(found.codec.encode(sample, index))))
            except Exception as error:  # of the classes of the sample
                log.debug("sample %d of %s cannot be kept: %s", index, self.request.title, error)
        return encoded

    def _read(self, told: Told, found: Finding, indices: Sequence[int], again: bool) -> dict[int, Any]:
        samples = dict[int, Any]()
        if not indices:
            return samples
        source, _ = parts_of(self.request.source, found)
        with Probe(source, told) as probe:
            for index in indices:
                try:
                    read = probe.read(source, index, 2 * index + again)
                except Exception as error:  # of the source
                    log.debug("sample %d of %s cannot be read: %s", index, self.request.title, error)
                    continue
                if sign(read, read) is None:
                    samples[index] = read.sample
        return samples


def parts_of(source: Any, found: Finding) -> tuple[Any, Any]:
    """What is kept of a source, and what finishes it after the cache; None for nothing."""
    if found.as_files:
        files = EncodedSource(source)
        return files, files
    return (source, None) if found.cut is None else found.cut.apply(source)


def _find(request: CacheRequest, told: Told, quick: int) -> tuple[Finding, dict[int, Any]]:
    """What was found, and the samples that can be kept as they came; `quick`: indices that are read besides four."""
    source: Any = request.source
    if request.allow_random:
        return _look_once(request, told), {}
    parts = split(source, quick=quick, told=told, domain=request.domain)
    files: EncodedForm | str | None = None
    if request.store == "encoded" or (request.store == "auto" and request.name is None):
        files = look_at_files(source, parts.source, parts.indices, told, request.domain, chosen=not quick)
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


def _look_once(request: CacheRequest, told: Told) -> Finding:
    """What samples look like of a source that is cached as it is. Those that cannot be read are left out."""
    source: Any = request.source
    samples, failures = dict[int, Any](), []
    told(0)
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


@contextmanager
def _put_back(source: Any) -> Iterator[None]:
    """Give the objects that can be reached from a source their attributes back, and its generators their state."""
    attributes = [
        (names, dict(names))
        for _, node in reachable(source)
        if not isinstance(node, type | FunctionType) and type(names := getattr(node, "__dict__", None)) is dict
    ]
    try:
        with Generators(source):
            yield
    finally:
        for names, kept in attributes:
            if names != kept:
                names.clear()
                names.update(kept)


def _private_bytes() -> int | None:
    """Memory that this process shares with no other; None where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


def _words(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, UnsupportedSampleError | SampleMismatchError | TimeoutError | ChildProcessError):
        return str(error)
    return f"reading it raised {type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
