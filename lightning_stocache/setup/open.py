"""How caches open: look at the sources, divide the memory, make the segments, hand them round.

All requests of one call open together, because they share budgets. The steps, each one collective over the job's ranks:

1. The leader of each node looks at every source (`look`): the fields of a sample are the spec, and the random part is
   found. The other ranks read nothing; they cut their own copy of the source at the same place. What cannot be cached
   passes through, with one warning.
2. Each leader joins the named caches that lie in its node's memory (`named_cache`).
3. Each leader divides the memory of its node among the others (`allocate`).
4. The leaders tell each other their slots, and every rank lays the same ring.
5. Each leader makes the segments of its node; the other ranks attach. Where they cannot (another pid namespace), named
   files are tried, whose names go again as soon as all are attached.
6. The leaders tell each other the arcs that they have: a named cache keeps its own, and the ring is made of those.

What fails on one rank is raised on all. Nothing is kept here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.placement import Arc, Ring
from lightning_stocache.cache.record_store import slots_for
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.segment_store import SegmentStore, StoreHandle
from lightning_stocache.cache.stores import attach_store, store_for
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import Backend
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.manifest import printable
from lightning_stocache.node.segment import Segment, SegmentHandle
from lightning_stocache.setup.agreement import check_lengths, ranks_apart
from lightning_stocache.setup.allocation import allocate
from lightning_stocache.setup.look import Finding, look
from lightning_stocache.setup.named_cache import join_cache, join_caches, open_cache, rings_as_they_are
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import BackendChoice, CacheRequest
from lightning_stocache.source.odd import warn_of_odd

__all__ = ["CacheMemoryError", "open_caches"]

log = logging.getLogger(__name__)

_APART = (
    "the ranks hold different data of it under the same index.\nGive every rank the whole dataset, in the same order, "
    "and let a DistributedSampler divide it"
)
_LONGEST = 200  # characters of a source's title that its segment tells


class CacheMemoryError(OSError):
    """The memory for a cache cannot be had, or not be reached by all ranks of a node."""


def open_caches(
    requests: Sequence[CacheRequest],
    budgets: Mapping[str, Budget],
    group: NodeGroup,
    backend: BackendChoice = "auto",
    *,
    disable: bool = False,
    later_bytes: int = 0,
    kept_back: int = 0,
) -> list[OpenCache]:
    """Open a cache for every request. Collective: all ranks pass the same requests in the same order.

    Args:
        requests: what is to be cached.
        budgets: the budget of every pot, per node.
        group: which ranks share memory.
        backend: where segments lie, see `allocate`.
        disable: whether to go on uncached, with a warning, where the memory cannot be had.
        later_bytes: memory that each rank's training will take and does not hold yet.
        kept_back: bytes of this node's free memory that are for something else.

    Raises:
        UnsupportedSampleError: (`strict`) a sample holds something that has no fixed size.
        SampleMismatchError: (`strict`) the samples read at set-up differ in shape, dtype or structure.
        ValueError: the ranks have sources of different lengths.
        CacheMemoryError: a segment could not be made or reached, not even by name; on all ranks alike. Not with
            `disable`, nor where nothing is to be cached.
        FingerprintError: what lies under a name is the cache of something else; a RuntimeError on the other ranks.
        Exception: (`strict`) what a source itself raises; on the other ranks a RuntimeError that names it.
    """
    if sys.platform == "win32":
        log.warning("Windows has no memory that processes could share: all samples pass through uncached")
        return [OpenCache.without(request) for request in requests]
    check_lengths(requests, group)
    if not requests:
        return []
    apart = ranks_apart(requests, group)
    findings = group.lead(
        lambda: [
            _look(request, budgets[request.pot], same=not other) for request, other in zip(requests, apart, strict=True)
        ]
    )
    parts = group.together(
        lambda: [
            (request.source, None) if found.cut is None else found.cut.apply(request.source)
            for request, found in zip(requests, findings, strict=True)
        ]
    )
    ranks = len(group.nodes[group.node])
    joined = group.together(
        lambda: join_caches(requests, [found.codec for found in findings], budgets) if group.is_leader else {}
    )
    promised = sum(cache.promised_bytes for cache in joined.values())
    codecs = [None if number in joined else found.codec for number, found in enumerate(findings)]
    if named := any(request.name is not None for request in requests):
        backend = "tmpfile"  # where names are
    worker_bytes = max((found.worker_bytes or 0 for found in findings), default=0)
    plan = group.lead(
        lambda: allocate(
            requests,
            codecs,
            budgets,
            ranks,
            backend,
            promised + kept_back,
            worker_bytes=worker_bytes,
            later_bytes=later_bytes,
        )
    )
    slots = group.exchange(plan.slots)
    rings = [
        Ring.cut(request.length, group.shares, [slots[ranks[0]][number] for ranks in group.nodes])
        for number, request in enumerate(requests)
    ]
    if group.is_leader:
        for warning in plan.warnings:
            log.warning(warning)

    def make(kind: Backend | None) -> list[_Segments]:
        made = []
        for number, (request, found, ring) in enumerate(zip(requests, findings, rings, strict=True)):
            cache, budget, arc = joined.pop(number, None), budgets[request.pot], ring.arcs[group.node]
            granted = plan.granted[number]
            if isinstance(found.codec, RecordCodec) and len(group.nodes) == 1 and arc.slots:
                arc = replace(arc, slots=slots_for(granted, found.codec, request.length))
            made.append(_Segments.make(request, found.codec, arc, group, kind, cache, budget, granted))
        for segments, nbytes in zip(made, plan.keep_free, strict=True):
            if segments.cache is not None:
                segments.cache.keep_free(nbytes)
        return made

    try:
        segments = _make_and_attach(make, plan.backend, group)
    except CacheMemoryError as error:
        wanted = named or any(arc.slots for ring in rings for arc in ring.arcs)
        if wanted and not disable:
            raise
        if group.rank == 0:
            log.warning("the cache is off, all samples are loaded from their source, uncounted: %s", error)
        if wanted:
            return [OpenCache.without(request, group) for request in requests]
        segments = [_Segments(None, None) for _ in requests]
    for request, found, made in zip(requests, findings, segments, strict=True):
        told = found.odd if group.is_leader and not request.strict else None
        if told and made.counters is not None and made.counters.is_first("odd sample"):
            warn_of_odd(request.source, told)
    if named:
        arcs = group.exchange([None if made.cache is None else made.cache.handle.arc for made in segments])
        rings = rings_as_they_are(rings, [arcs[ranks[0]] for ranks in group.nodes])
    return [
        OpenCache(
            replace(request, reader=None),
            source,
            tail,
            made.cache,
            made.counters,
            ring,
            group,
            made.bytes_of(granted),
            off=budgets[request.pot].off,
        )
        for (source, tail), made, ring, granted, request in zip(
            parts, segments, rings, plan.granted, requests, strict=True
        )
    ]


def _look(request: CacheRequest, budget: Budget, same: bool) -> Finding:
    """What the leader of a node has seen of a source, told to people."""
    if budget.off or (not request.length and not request.strict):
        return Finding()
    finding = look(request) if same else Finding(reason=_APART)
    if request.strict and not same:
        raise ValueError(f"{request.title} cannot be cached: {_APART}")
    if finding.reads:
        log.info("%s: %d samples read at set-up, to learn what they are", request.title, finding.reads)
    if finding.reason is not None:
        log.warning("%s passes through uncached: %s", request.title, finding.reason)
    return finding


@dataclass(frozen=True)
class _Address:
    """Where the segments of one request are, for the other ranks of the node."""

    counters: SegmentHandle
    cache: StoreHandle | None
    keeps_name: bool

    def attach(self, rank: int) -> _Segments:
        counters = Counters(Segment.attach(self.counters), rank)
        if self.cache is None:
            return _Segments(counters, None)
        return _Segments(counters, attach_store(self.cache), self.keeps_name)


@dataclass(frozen=True)
class _Segments:
    """The segments of one request, open in this process."""

    counters: Counters | None
    cache: SegmentStore[Any] | None
    keeps_name: bool = False

    @classmethod
    def make(
        cls,
        request: CacheRequest,
        codec: SampleCodec | None,
        arc: Arc,
        group: NodeGroup,
        backend: Backend | None,
        joined: SegmentStore[Any] | None,
        budget: Budget,
        granted: int,
    ) -> _Segments:
        cache = joined
        if codec is not None and request.name is not None:
            if cache is None:  # it may have come since, or this is the second try
                cache = open_cache(request, codec, arc, budget, granted) if arc.slots else join_cache(request, codec)
        elif codec is not None and arc.slots:
            whose = {"dataset": printable(request.title, _LONGEST), "node": group.node, "nodes": len(group.nodes)}
            cache = store_for(codec).create(codec, arc, backend, whose, granted=granted)
        return cls(Counters.create(group.rank, backend), cache, request.name is not None)

    @property
    def address(self) -> _Address:
        assert self.counters is not None
        return _Address(self.counters.handle, None if self.cache is None else self.cache.handle, self.keeps_name)

    def bytes_of(self, granted: int) -> int:
        """The memory that the cache may take: what was granted, or what a named one was made with."""
        return granted if self.cache is None or not self.keeps_name else self.cache.granted_bytes

    def unlink(self) -> None:
        for part in (self.counters, None if self.keeps_name else self.cache):
            if part is not None:
                part.unlink()

    def close(self) -> None:
        for part in (self.counters, self.cache):
            if part is not None:
                part.close()


def _make_and_attach(
    make: Callable[[Backend | None], list[_Segments]], backend: Backend | None, group: NodeGroup
) -> list[_Segments]:
    """Make the segments on every leader and attach elsewhere; by name, where they cannot be reached without one."""
    troubles: list[str | None] = []
    failure: Exception | None = None
    for kind in dict.fromkeys((backend, "file")):
        segments: list[_Segments] = []
        addresses: list[_Address] = []
        failure = None
        try:
            if group.is_leader:
                segments += make(kind)
                addresses = [made.address for made in segments]
        except Exception as error:  # whatever it is, the others are waiting for the addresses
            failure = error
        addresses = group.exchange(addresses)[group.leader]
        try:
            if not group.is_leader:
                segments += [address.attach(group.rank) for address in addresses]
        except Exception as error:  # likewise
            failure = error
        troubles = group.exchange(repr(failure) if failure else None)  # by now everybody has attached, or will not
        for made in segments:
            made.unlink()
        if not any(troubles):
            return segments
        for made in segments:
            made.close()
    rank, words = next((rank, words) for rank, words in enumerate(troubles) if words)
    raise CacheMemoryError(
        f"rank {rank} could not make or reach the shared memory of its node: {words}. To go on uncached: "
        "on_error='disable', or budget=0"
    ) from failure
