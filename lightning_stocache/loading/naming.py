"""Caches with a name: they stay in memory when their job ends, and the next job starts warm.

The manifest in the header of a named segment says two things. Its fingerprint is what lies there: the class of the
source, its length, the fields of a sample, and what the user adds; a job with another one is refused. Its geometry is
where it lies: the arc of the ring; it wins over the budget and the order of nodes of the job that joins, because the
samples are where they are. Slots that are READY stay so; a cache that is half full goes on filling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from lightning_stocache.cache.cache import SharedCache
from lightning_stocache.cache.placement import Arc, Ring
from lightning_stocache.cache.slots import FieldSlots
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.loading.allocation import Request
from lightning_stocache.node.named import clean, join_named, open_named
from lightning_stocache.node.segment import Segment

__all__ = ["FingerprintError", "fingerprint", "join_cache", "join_caches", "open_cache", "rings_as_they_are"]

_LONGEST = 400  # characters that are kept of an entry: the three of them and the geometry fit in the header


class FingerprintError(ValueError):
    """What lies under the name of a cache is not what is to be cached."""


def fingerprint(request: Request, spec: SampleSpec) -> dict[str, Any]:
    """What must be the same in two jobs that share a named cache, as plain values.

    Example:
        >>> numbers = Request([1, 2, 3], name="numbers", fingerprint="v2")
        >>> fingerprint(numbers, SampleSpec.infer(1))
        {'dataset': 'builtins.list', 'length': 3, 'spec': 'sample: int', 'fingerprint': 'v2'}
    """
    fields = (f"{field.path or 'sample'}: {field}" for field in spec.fields)
    frozen = " (allow_random)" if request.allow_random else ""  # its first draw is kept, which a split source's is not
    return {
        "dataset": _short(_identity(request.source) + frozen),
        "length": request.length,
        "spec": _short("; ".join(fields)),
        "fingerprint": _short(str(request.fingerprint)),
    }


def join_cache(request: Request, spec: SampleSpec) -> SharedCache | None:
    """The cache that lies under the request's name, or None if there is none.

    Raises:
        FingerprintError: it is the cache of something else.
        PermissionError: the name belongs to another user's file.
    """
    assert request.name is not None
    joined = join_named(request.name)
    return None if joined is None else _over(request, spec, *joined)


def open_cache(request: Request, spec: SampleSpec, arc: Arc) -> SharedCache:
    """Make the cache of the request's name, with an arc; or join it, if another job has just made it.

    Raises:
        FingerprintError: that is the cache of something else.
        OSError: there is no memory for the states of the slots.
    """
    assert request.name is not None
    manifest = {"fingerprint": fingerprint(request, spec), "geometry": asdict(arc)}
    size = FieldSlots.bytes_for(spec.row_bytes, arc.slots)
    try:
        return _over(request, spec, *open_named(request.name, size, manifest))
    except OSError:
        clean(request.name)  # unless another job uses it: an empty cache of this size is no use to the next one
        raise


def join_caches(requests: Sequence[Request], specs: Sequence[SampleSpec | None]) -> dict[int, SharedCache]:
    """The named caches that exist, by the number of their request; errors as in `join_cache`, and none stays open."""
    joined: dict[int, SharedCache] = {}
    try:
        for number, (request, spec) in enumerate(zip(requests, specs, strict=True)):
            if request.name is None or spec is None:
                continue
            if (cache := join_cache(request, spec)) is not None:
                joined[number] = cache
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
        Ring(tuple(own[number] or replace(planned, slots=0) for own, planned in zip(arcs, ring.arcs, strict=True)))
        for number, ring in enumerate(rings)
    ]


def _over(request: Request, spec: SampleSpec, segment: Segment, manifest: dict[str, Any]) -> SharedCache:
    try:
        its, ours = manifest.get("fingerprint"), fingerprint(request, spec)
        if its != ours:
            raise FingerprintError(_refusal(request, its if isinstance(its, dict) else {}, ours))
        arc = Arc(**manifest["geometry"])
        if arc.size != request.length or segment.size != FieldSlots.bytes_for(spec.row_bytes, arc.slots):
            raise FingerprintError(
                f"the cache {request.name!r} is damaged: {arc} in {segment.size} bytes. {_way_out(request)}"
            )
        segment.reserve(0, arc.slots)  # also by who joins: the maker may have been killed before it came to this
        return SharedCache.over(segment, spec, arc)
    except BaseException:
        segment.close()
        raise


def _refusal(request: Request, its: dict[str, Any], ours: dict[str, Any]) -> str:
    differ = ", ".join(key for key in ours if its.get(key) != ours[key])
    return (
        f"the cache {request.name!r} holds something else than {request.title} ({differ} differ). "
        f"It holds {its}; this job has {ours}. {_way_out(request)}"
    )


def _way_out(request: Request) -> str:
    return f"Give another name, or remove it: python -m lightning_stocache clean {request.name}"


def _identity(source: Dataset[Any]) -> str:
    """The class of a source. Of a Subset also which indices it has: two random splits are alike in all else."""
    if type(source) is Subset:
        indices = torch.as_tensor(list(source.indices), dtype=torch.int64)
        digest = hashlib.sha256(indices.numpy().tobytes()).hexdigest()[:16]
        return f"Subset {digest} of {_identity(source.dataset)}"
    return f"{type(source).__module__}.{type(source).__qualname__}"


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... sha256 {hashlib.sha256(text.encode()).hexdigest()}"
