"""Caches with a name: they stay in memory, or on a disk, when their job ends, and the next job starts warm.

The manifest in the header of a named segment has a fingerprint and a geometry. The fingerprint describes the data: the
class of the source, its length, the fields of a sample, and a text of the user. A job with another fingerprint is
refused. The geometry is the arc of the ring. Samples cannot move, so the geometry wins over the budget and the order of
nodes of a job that joins, with a warning. A job that joins a half filled cache continues to fill it.

A rolling cache on a disk has one job at a time. Its leader has the exclusive lock of the file once
(`named`), which shows that no process of another job has the file open, and then keeps the lock of one byte.
"""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections.abc import Mapping

from lightning_stocache.cache.codec import Codec
from lightning_stocache.cache.head import ROLLING
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.store import Store
from lightning_stocache.node.files import Manifest, ManifestError, printable
from lightning_stocache.node.named import clean, join_named, open_named, way_out
from lightning_stocache.node.processes import poll
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup.find import Finding
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.setup.same_data import FingerprintError
from lightning_stocache.source.access import identity

__all__ = ["CacheInUseError", "fingerprint", "open_named_cache"]

log = logging.getLogger(__name__)

_LONGEST = 400  # bytes of an entry: three of them, the title and the geometry fit in the header
_TITLE = 100  # characters
_JOB = 1 << 41  # the byte of a rolling cache that the leader of its job locks


class CacheInUseError(RuntimeError):
    """Another job has the rolling cache of this name open."""


def fingerprint(request: CacheRequest, codec: Codec) -> dict[str, str | int]:
    """The facts that must be equal in two jobs that share a named cache, as plain values.

    Example:
        >>> from lightning_stocache.cache.rows import SampleSpec
        >>> numbers = CacheRequest([1, 2, 3], name="numbers", fingerprint="v2")
        >>> fingerprint(numbers, SampleSpec.infer(1))
        {'dataset': 'builtins.list', 'length': 3, 'spec': 'sample: int', 'fingerprint': 'v2'}
    """
    # The first draw is kept, unlike that of a split source.
    frozen = " (freeze_random)" if request.freeze_random else ""
    domain = request.domain
    part = "" if domain is None else f"{len(domain)} indices {domain.digest} of "
    return {
        "dataset": _short(part + identity(request.source) + frozen),
        "length": request.length,
        "spec": _short(codec.title),
        "fingerprint": _short(str(request.fingerprint)),
    }


def open_named_cache(
    request: CacheRequest, found: Finding, state: str, arc: Arc | None = None, granted: int = 0
) -> Store | None:
    """Open the cache of the request's name, or make it if `arc` has slots. Returns None if neither is possible.

    A rolling cache may be in use by workers of a job that was killed, which end after a few seconds.

    Args:
        request: the request with the name.
        found: the finding about its source, with a codec.
        state: digest of the state of the dataset.
        arc: for a new cache: the samples with a slot on this node.
        granted: bytes that a new cache may take.

    Raises:
        CacheInUseError: it is a rolling cache, and another job has it open.
        FingerprintError: it has other data, or (strict) was made with another budget.
        ManifestError: it is damaged, or has another version.
        PermissionError: the name belongs to another user's file.
        OSError: there is no memory for the states of the slots.
    """
    for seconds in poll(pause=0.1):
        try:
            return _open(request, found, state, arc, granted)
        except CacheInUseError:
            if seconds:
                raise
    return None


def _open(request: CacheRequest, found: Finding, state: str, arc: Arc | None, granted: int) -> Store | None:
    codec, name, directory, rolls = found.codec, request.name, request.dir, request.writers > 0
    assert codec is not None
    assert name is not None
    kind = RollingStore if rolls else Store
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
            "budget": str(request.budget),
            "fingerprint": ours,
            "found": found.digest,
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
    _check_budget(request, cache, manifest.budget)
    return cache


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


def _check_budget(request: CacheRequest, cache: Store, made: str) -> None:
    """Warn if the cache was made with another budget and has no room for all samples: its slots stay as they are.

    Raises:
        FingerprintError: in the same case, if the request is strict.
    """
    if made == str(request.budget) or cache.capacity >= request.samples:
        return
    words = (
        f"the cache {request.name!r} was made with budget={made!r} and keeps its {cache.capacity:,} slots; "
        f"budget={request.budget.written!r} is ignored"
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
