"""Caches with a name: they stay in memory, or on a disk, when their job ends, and the next job starts warm.

The manifest in the header of a named segment has a fingerprint and a geometry. The fingerprint describes the data: the
class of the source, its length, the fields of a sample, and a text of the user. A job with another fingerprint is
refused. The geometry is the arc of the ring. Samples cannot move, so the geometry wins over the budget and the order of
nodes of a job that joins, with a warning. A job that joins a half filled cache continues to fill it.

A rolling cache on a disk (`open_pool`) has one job at a time. Its leader has the exclusive lock of the file once
(`named`), which shows that no process of another job has the file open, and then keeps the lock of one byte.
"""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections.abc import Mapping
from contextlib import closing
from typing import cast

from lightning_stocache.cache.checksums import checksum
from lightning_stocache.cache.layout import ROLLING
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.records import SampleCodec
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.store import Store
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import Manifest, ManifestError, printable
from lightning_stocache.node.named import clean, join_named, manifest_of, open_named, way_out
from lightning_stocache.node.processes import poll
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup.allocation import allocate_pool, roomy_bytes
from lightning_stocache.setup.find import SourceReader
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.setup.same_data import FingerprintError, check_pool
from lightning_stocache.source.access import identity

__all__ = ["CacheInUseError", "fingerprint", "found_before", "has_state_of", "open_named_cache", "open_pool"]

log = logging.getLogger(__name__)

_LONGEST = 400  # bytes of an entry: three of them, the title and the geometry fit in the header
_TITLE = 100  # characters
_JOB = 1 << 41  # the byte in the lock file of a rolling cache that the leader of its job locks


class CacheInUseError(RuntimeError):
    """Another job has the rolling cache of this name open."""


def fingerprint(request: CacheRequest, codec: SampleCodec) -> dict[str, str | int]:
    """The facts that must be equal in two jobs that share a named cache, as plain values.

    Example:
        >>> from lightning_stocache import SampleSpec
        >>> numbers = CacheRequest([1, 2, 3], name="numbers", fingerprint="v2")
        >>> fingerprint(numbers, SampleSpec.infer(1))
        {'dataset': 'builtins.list', 'length': 3, 'spec': 'sample: int', 'fingerprint': 'v2'}
    """
    frozen = " (allow_random)" if request.allow_random else ""  # its first draw is kept, unlike that of a split source
    domain = request.domain
    part = "" if domain is None else f"{len(domain)} indices {domain.digest} of "
    return {
        "dataset": _short(part + identity(request.source) + frozen),
        "length": request.length,
        "spec": _short(codec.title),
        "fingerprint": _short(str(request.fingerprint)),
    }


def found_before(request: CacheRequest) -> str:
    """The `Finding.digest` of the job that made an existing cache; "" if there is no cache."""
    manifest = None if request.name is None else manifest_of(request.name, request.dir)
    return "" if manifest is None else manifest.found


def has_state_of(request: CacheRequest, state: str) -> bool:
    """Whether the dataset of the job that made an existing cache had this state."""
    manifest = None if request.name is None else manifest_of(request.name, request.dir)
    return manifest is not None and manifest.state == state


def open_named_cache(
    request: CacheRequest,
    codec: SampleCodec,
    budget: Budget,
    arc: Arc | None = None,
    granted: int = 0,
    found: str = "",
    kind: type[Store] = Store,
    state: str = "",
) -> Store | None:
    """Open the cache of the request's name, or make it if `arc` has slots. Returns None if neither is possible.

    Args:
        request: the request with the name.
        codec: codec of the samples.
        budget: budget of this job.
        arc: for a new cache: the samples with a slot on this node.
        granted: bytes that a new cache may take.
        found: the `Finding.digest` of the samples.
        kind: the class of the store.
        state: digest of the state of the dataset.

    Raises:
        CacheInUseError: it is a rolling cache, and another job has it open.
        FingerprintError: it has other data, or (strict) was made with another budget.
        ManifestError: it is damaged, or has another version.
        PermissionError: the name belongs to another user's file.
        OSError: there is no memory for the states of the slots.
    """
    assert request.name is not None
    name, directory, rolls = request.name, request.dir, issubclass(kind, RollingStore)
    ours = {**fingerprint(request, codec), **(ROLLING if rolls else {})}
    alone = False

    def mend(segment: Segment, manifest: Manifest) -> None:
        """Repair what a crash may have left on a disk."""
        nonlocal alone
        _check(request, ours, manifest)
        kind.mend(codec, segment, manifest, request.domain)
        alone = True

    made: Manifest | None = None
    if arc is None or not arc.slots:
        if (joined := join_named(name, directory, mend)) is None:
            return None
        segment, manifest = joined
    else:
        whose = {
            "dataset": printable(request.title, _TITLE),
            "budget": str(budget),
            "fingerprint": ours,
            "found": found,
            "state": state,
        }
        size, made = kind.plan(codec, arc, whose, granted=granted, on_disk=directory is not None)
        segment, manifest = open_named(name, size, made, directory, mend)
    if rolls and not ((alone or manifest is made) and segment.lock(_JOB)):
        segment.close()
        raise CacheInUseError(
            f"the cache {name!r} is in use, and a rolling cache on a disk has one job at a time. Wait until that job "
            "and its RollingWriters end, or give another name"
        )
    try:
        _check(request, ours, manifest)
        length = manifest.geometry.size if rolls else request.length
        cache = kind.open(segment, codec, manifest.geometry, length, request.domain)
    except (ValueError, OSError) as error:
        traceback.clear_frames(error.__traceback__)  # they hold a part of the segment
        segment.close()
        if isinstance(error, OSError) and manifest is made:
            clean(name, directory)  # it is empty
        if isinstance(error, FingerprintError | OSError):
            raise
        raise ManifestError(f"the cache {name!r} is damaged: {error}. {way_out(name, directory)}") from None
    _check_budget(request, cache, manifest.budget, budget)
    return cache


def open_pool(request: CacheRequest, codec: SampleCodec, length: int | None, writers: int) -> tuple[RollingStore, bool]:
    """Open the rolling cache of the request's name and directory, or make it.

    Args:
        request: the request with the name.
        codec: codec of the samples.
        length: number of samples that are drawn before one comes again, if it is known.
        writers: number of processes that append at the same time.

    Returns:
        The store, and whether the whole source has room.

    Raises:
        CacheInUseError: another job has it open.
        FingerprintError: it has other data.
        ValueError: the budget has no room for the least number of samples.
        ImportError: xxhash is not installed.
        ManifestError, PermissionError, OSError: as `open_named_cache`.
    """
    checksum()
    store: Store | None = None
    for seconds in poll(pause=0.1):  # workers of a job that was killed end after a few seconds
        try:
            store = open_named_cache(request, codec, request.budget, kind=RollingStore)
            break
        except CacheInUseError:
            if seconds:
                raise
    if store is None:
        given, _ = allocate_pool(request.budget, codec, length, writers, 1, request.dir)
        arc = Arc(given.slots[0], given.slots[0])
        store = open_named_cache(request, codec, request.budget, arc, given.granted[0], kind=RollingStore)
        assert store is not None
        store.keep_free(given.keep_free[0])
    pool = cast(RollingStore, store)
    try:
        with closing(SourceReader(request)) as reader:
            check_pool(request, reader.read, pool)
    except BaseException:
        pool.close()
        raise
    return pool, length is not None and pool.granted_bytes >= length * roomy_bytes(codec, on_disk=True)


def _check(request: CacheRequest, ours: Mapping[str, str | int], manifest: Manifest) -> None:
    """Refuse a cache with another fingerprint."""
    theirs = manifest.fingerprint
    if theirs != ours:
        differ = [
            f"{key}: {theirs.get(key)!r}, not {ours.get(key)!r}"
            for key in {**ours, **theirs}
            if theirs.get(key) != ours.get(key)
        ]
        raise FingerprintError(
            f"the cache {request.name!r} holds something else than {request.title} ({'; '.join(differ)}). "
            f"{way_out(str(request.name), request.dir)}"
        )


def _check_budget(request: CacheRequest, cache: Store, made: str, budget: Budget) -> None:
    """Warn if the cache was made with another budget and has no room for all samples: its slots stay as they are.

    Raises:
        FingerprintError: in the same case, if the request is strict.
    """
    if made == str(budget) or cache.capacity >= request.samples:
        return
    words = (
        f"the cache {request.name!r} was made with budget={made!r} and keeps its {cache.capacity:,} slots; "
        f"budget={str(budget)!r} is ignored"
    )
    ways = way_out(str(request.name), request.dir)
    if request.strict:
        cache.close()
        raise FingerprintError(f"{words}. {ways}")
    log.warning("%s.\n%s", words, ways)


def _short(text: str) -> str:
    """A text that fits in a header: the text itself if it is short and printable, else its beginning and a digest."""
    if text.isprintable() and len(text.encode()) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{ascii(text)[1:-1][:_LONGEST]}... sha256 {digest}"
