"""Caches with a name: they stay in memory, or on a disk, when their job ends, and the next job starts warm.

The manifest in the header of a named segment says two things. Its fingerprint is what lies there: the class of the
source, its length, the fields of a sample, and what the user adds; a job with another one is refused. Its geometry is
where it lies: the arc of the ring; it wins over the budget and the order of nodes of the job that joins, because the
samples are where they are. A job whose own budget would have given another number of slots is told so. Slots that are
READY stay so; a cache that is half full goes on filling.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_stocache.cache.placement import Arc, Ring
from lightning_stocache.cache.records import SampleCodec
from lightning_stocache.cache.store import Store, gathers
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.header import Manifest, ManifestError, printable
from lightning_stocache.node.named import Mend, clean, join_named, manifest_of, open_named, way_out
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup.disk_cache import free_on
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.source.identity import identity

__all__ = [
    "FingerprintError",
    "fingerprint",
    "found_before",
    "join_cache",
    "join_caches",
    "open_cache",
    "rings_as_they_are",
]

log = logging.getLogger(__name__)

_LONGEST = 400  # bytes that are kept of an entry: the three of them, the title and the geometry fit in the header
_TITLE = 100  # characters


class FingerprintError(ValueError):
    """What lies under the name of a cache is not what is to be cached."""


def fingerprint(request: CacheRequest, codec: SampleCodec) -> dict[str, str | int]:
    """What must be the same in two jobs that share a named cache, as plain values.

    Example:
        >>> from lightning_stocache import SampleSpec
        >>> numbers = CacheRequest([1, 2, 3], name="numbers", fingerprint="v2")
        >>> fingerprint(numbers, SampleSpec.infer(1))
        {'dataset': 'builtins.list', 'length': 3, 'spec': 'sample: int', 'fingerprint': 'v2'}
    """
    frozen = " (allow_random)" if request.allow_random else ""  # its first draw is kept, which a split source's is not
    domain = request.domain
    part = "" if domain is None else f"{len(domain)} indices {domain.digest} of "
    return {
        "dataset": _short(part + identity(request.source) + frozen),
        "length": request.length,
        "spec": _short(codec.title),
        "fingerprint": _short(str(request.fingerprint)),
    }


def found_before(request: CacheRequest) -> str:
    """What the maker of the cache with the request's name has found of its source, as `Finding.digest`; "" if none."""
    manifest = None if request.name is None else manifest_of(request.name, request.dir)
    return "" if manifest is None else manifest.found


def join_cache(request: CacheRequest, codec: SampleCodec) -> Store | None:
    """The cache that lies under the request's name, or None if there is none.

    Raises:
        FingerprintError: it is the cache of something else.
        ManifestError: it is damaged, or of another version.
        PermissionError: the name belongs to another user's file.
    """
    assert request.name is not None
    joined = join_named(request.name, request.dir, _mender(request, codec))
    return None if joined is None else _over(request, codec, *joined)


def open_cache(
    request: CacheRequest, codec: SampleCodec, arc: Arc, budget: Budget, granted: int = 0, found: str = ""
) -> Store:
    """Make the cache of the request's name, with an arc; or join it, if another job has just made it.

    Args:
        request: what is to be cached.
        codec: what its samples look like.
        arc: which of them have a slot on this node.
        budget: what the job was given to spend.
        granted: bytes that the cache may take.
        found: what was found out about the samples, as `Finding.digest`.

    Raises:
        FingerprintError: that is the cache of something else, or (strict) of another budget.
        ManifestError: it is damaged, or of another version.
        OSError: there is no memory for the states of the slots.
    """
    assert request.name is not None
    whose = {
        "dataset": printable(request.title, _TITLE),
        "budget": str(budget),
        "fingerprint": fingerprint(request, codec),
        "found": found,
    }
    size, manifest = Store.plan(codec, arc, whose, granted=granted, on_disk=request.dir is not None)
    segment, there = open_named(request.name, size, manifest, request.dir, _mender(request, codec))
    try:
        cache = _over(request, codec, segment, there)
    except OSError:
        if there is manifest:  # made here, and unless another job uses it: empty, and of this size, it is no use
            clean(request.name, request.dir)
        raise
    try:
        _compare(request, cache, budget, arc.slots)
    except BaseException:
        cache.close()
        raise
    return cache


def join_caches(
    requests: Sequence[CacheRequest], codecs: Sequence[SampleCodec | None], budgets: Mapping[str, Budget]
) -> dict[int, Store]:
    """The named caches that exist, by the number of their request; errors as in `open_cache`, and none stays open."""
    joined: dict[int, Store] = {}
    try:
        for number, (request, codec) in enumerate(zip(requests, codecs, strict=True)):
            if request.name is None or codec is None:
                continue
            if (cache := join_cache(request, codec)) is not None:
                joined[number] = cache
        if joined:
            held = sum(cache.memory_bytes + cache.disk_bytes for cache in joined.values())
            asked = _asked_for(requests, codecs, budgets, held)
            for number, cache in joined.items():
                _compare(requests[number], cache, budgets[requests[number].pot], asked[number])
    except BaseException:
        for cache in joined.values():
            cache.close()
        raise
    return joined


def rings_as_they_are(rings: Sequence[Ring], arcs: Sequence[Sequence[Arc | None]]) -> list[Ring]:
    """The rings that were planned, with the arcs that named caches brought along.

    Args:
        rings: one per request, as the budgets would have them.
        arcs: per node, the arc that it has for each request; None for nothing.
    """
    return [
        Ring(tuple(held[number] or replace(planned, slots=0) for held, planned in zip(arcs, ring.arcs, strict=True)))
        for number, ring in enumerate(rings)
    ]


def _over(request: CacheRequest, codec: SampleCodec, segment: Segment, manifest: Manifest) -> Store:
    try:
        _check(request, codec, manifest)
        try:
            return Store.open(segment, codec, manifest.geometry, request.length, request.domain)
        except ValueError as error:
            raise ManifestError(f"the cache {request.name!r} is damaged: {error}. {_way_out(request)}") from None
    except BaseException:
        segment.close()
        raise


def _mender(request: CacheRequest, codec: SampleCodec) -> Mend:
    """Mends what a crash may have left of the request's cache on a disk, if it is that."""

    def mend(segment: Segment, manifest: Manifest) -> None:
        _check(request, codec, manifest)
        Store.mend(codec, segment, manifest, request.domain)

    return mend


def _check(request: CacheRequest, codec: SampleCodec, manifest: Manifest) -> None:
    """Refuse the cache of something else (FingerprintError)."""
    ours = fingerprint(request, codec)
    if manifest.fingerprint != ours:
        raise FingerprintError(_refusal(request, manifest.fingerprint, ours))


def _way_out(request: CacheRequest) -> str:
    assert request.name is not None
    return way_out(request.name, request.dir)


def _asked_for(
    requests: Sequence[CacheRequest], codecs: Sequence[SampleCodec | None], budgets: Mapping[str, Budget], held: int
) -> list[int]:
    """The slots per request that the budgets ask for, if the caches that exist were made anew.

    Args:
        requests: what is to be cached.
        codecs: what the samples of each look like; None for what is not to be cached.
        budgets: per pot.
        held: bytes that the caches hold, and which a new one would find free.
    """
    sizes = [
        0 if codec is None else request.samples * codec.slot_bytes
        for request, codec in zip(requests, codecs, strict=True)
    ]
    directory = requests[0].dir
    free = (
        (FreeMemory.measure(memory_directory()).bytes + held) if directory is None else free_on(directory, held).bytes
    )
    slots = []
    for request, codec, size in zip(requests, codecs, sizes, strict=True):
        pot = sum(other for other, member in zip(sizes, requests, strict=True) if member.pot == request.pot)
        wanted = min(budgets[request.pot].wanted(pot, free), pot)
        slots.append(0 if codec is None else wanted * size // max(pot, 1) // codec.slot_bytes)
    return slots


def _compare(request: CacheRequest, cache: Store, budget: Budget, slots: int) -> None:
    """Tell a job that its budget does not count, where that makes a difference.

    A cache that was made under the same words may have found less memory than they asked for.

    Raises:
        FingerprintError: it makes one, and the request is strict.
    """
    assert request.name is not None
    made, held, rounding = cache.manifest.budget, len(cache), 1
    if not gathers(cache):  # of records, their bytes are what was granted
        held = min(cache.granted_bytes // cache.codec.slot_bytes, len(cache))
        rounding += held // 20
    if made == str(budget) or abs(held - slots) <= rounding:
        return
    words = (
        f"the cache {request.name!r} was made with budget={made!r} and keeps its {held:,} slots; "
        f"budget={str(budget)!r} would give {slots:,} and is not looked at."
    )
    if request.strict:
        raise FingerprintError(f"{words} {_way_out(request)}")
    log.warning("%s\n%s", words, _way_out(request))


def _refusal(request: CacheRequest, theirs: Mapping[str, str | int], ours: Mapping[str, str | int]) -> str:
    assert request.name is not None
    differ = ", ".join(key for key in ours if theirs.get(key) != ours[key])
    return (
        f"the cache {request.name!r} holds something else than {request.title} ({differ} differ). "
        f"It holds {theirs}; this job has {ours}. {_way_out(request)}"
    )


def _short(text: str) -> str:
    """The text as a header can hold it: printable, and of what is long or not printable the beginning and a digest."""
    if text.isprintable() and len(text.encode()) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{ascii(text)[1:-1][:_LONGEST]}... sha256 {digest}"
