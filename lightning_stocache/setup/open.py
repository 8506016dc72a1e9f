"""How caches open: look at the sources, divide the memory, make the segments, hand them round.

All requests of one call open together, because they share budgets. The steps, each one collective over the job's ranks:

1. The leader of each node looks at every source (`find`): what its samples look like gives the codec, and the random
   part is found. The other ranks read nothing; they cut their own copy of the source at the same place. What cannot be
   cached passes through, with one warning.
2. Each leader joins the named caches that lie in its node's memory (`named_cache`).
3. Each leader divides the memory of its node among the others (`allocate`). Where samples may be kept as their files,
   what was granted decides whether they are (`form_choice`). For a cache that later calls will read, it decides whether
   all indices get slots or only those that are drawn now.
4. The leaders tell each other their slots, and every rank lays the same rings: who is the home of which index, and how
   many are expected to find room.
5. Each leader makes the segments of its node; the other ranks attach (`segments`). What lies under a name is compared
   with the source, and what was read at set-up is stored (`same_data`).
6. The leaders tell each other the arcs that they have: a named cache keeps its own, and the ring is made of those.

What fails on one rank is raised on all. Nothing is kept here.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from lightning_stocache.cache.placement import Ring
from lightning_stocache.cache.records import RecordCodec, SampleCodec
from lightning_stocache.cache.store import slots_for
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import Backend
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.agreement import check_lengths, drawn_by_any, ranks_apart, with_directories
from lightning_stocache.setup.allocation import Allocation, allocate, allocate_on_disk
from lightning_stocache.setup.find import Finding, SourceReader, parts_of
from lightning_stocache.setup.form_choice import keeps_files, told_form
from lightning_stocache.setup.named_cache import FingerprintError, found_before, join_caches, rings_as_they_are
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import BackendChoice, CacheRequest
from lightning_stocache.setup.same_data import store_or_refuse
from lightning_stocache.setup.segments import CacheMemoryError, Segments, make_and_attach
from lightning_stocache.source.access import warn_of_odd

__all__ = ["open_caches"]

log = logging.getLogger(__name__)

_APART = (
    "the ranks hold different data of it under the same index.\nGive every rank the whole dataset, in the same order, "
    "and let a DistributedSampler divide it"
)


def open_caches(
    requests: Sequence[CacheRequest],
    budgets: Mapping[str, Budget],
    group: NodeGroup,
    backend: BackendChoice = "auto",
    *,
    later_bytes: int = 0,
    kept_back: int = 0,
) -> list[OpenCache]:
    """Open a cache for every request. Collective: all ranks pass the same requests in the same order.

    Args:
        requests: what is to be cached.
        budgets: the budget of every pot, per node.
        group: which ranks share memory.
        backend: where segments lie, see `allocate`.
        later_bytes: memory that each rank's training will take and does not hold yet.
        kept_back: bytes of this node's free memory that are for something else.

    Raises:
        UnsupportedSampleError: (`strict`) a sample holds something that cannot be kept as bytes.
        SampleMismatchError: (`strict`) the samples read at set-up differ in shape, dtype or structure.
        ValueError: the ranks have sources of different lengths; (`strict`) a source is random and cannot be split.
        CacheMemoryError: (`strict`) a segment could not be made or reached, not even by name; on all ranks alike.
        FingerprintError: what lies under a name is the cache of something else; a RuntimeError on the other ranks.
        Exception: (`strict`) what a source itself raises; on the other ranks a RuntimeError that names it.
    """
    if sys.platform == "win32":
        log.warning("Windows has no memory that processes could share: all samples pass through uncached")
        return [OpenCache.without(request) for request in requests]
    check_lengths(requests, group)
    if not requests:
        return []
    domains = drawn_by_any([request.domain for request in requests], group)
    requests = [replace(request, domain=domain) for request, domain in zip(requests, domains, strict=True)]
    try:
        requests = with_directories(requests, group)
    except (OSError, ImportError, RuntimeError) as error:
        return _without(requests, group, error)
    on_disk = any(request.dir is not None for request in requests)
    if named := any(request.name is not None for request in requests):
        backend = "tmpfile"  # where names are
    with ExitStack() as stack:
        readers = [stack.enter_context(closing(SourceReader(request))) for request in requests]
        findings = _find(requests, budgets, group, readers)
        joined = group.together(
            lambda: join_caches(requests, [found.codec for found in findings], budgets) if group.is_leader else {}
        )
        codecs = [None if number in joined else found.codec for number, found in enumerate(findings)]
        kept_back += sum(cache.promised_bytes for cache in joined.values())
        worker_bytes = max((found.worker_bytes or 0 for found in findings), default=0)

        def divide(requests: Sequence[CacheRequest]) -> Allocation:
            if all(found.codec is None for found in findings):  # to measure what is free would take its time
                nothing = (0,) * len(requests)
                return Allocation(nothing, nothing, None, (), nothing)
            if on_disk:
                return allocate_on_disk(requests, codecs, budgets)
            more = {"worker_bytes": worker_bytes, "later_bytes": later_bytes}
            return allocate(requests, codecs, budgets, len(group.nodes[group.node]), backend, kept_back, **more)

        requests = _whole_where_there_is_room(requests, divide, group)
        plan = group.lead(lambda: divide(requests))
        if backend != "auto":
            plan = replace(plan, backend=backend)
        planned = list(plan.slots)
        for number, (request, found) in enumerate(zip(requests, findings, strict=True)):
            if found.codec is not None and number not in joined:
                wanted = budgets[request.pot].part_of(request.samples)
                findings[number] = _in_its_form(request, found, plan.granted[number], wanted, group)
                if (codec := findings[number].codec) is not found.codec and codec is not None:
                    planned[number] = min(plan.granted[number] // codec.slot_bytes, wanted)
        parts = group.together(
            lambda: [parts_of(request.source, found) for request, found in zip(requests, findings, strict=True)]
        )
        homes = [
            _homes(found.codec, count, granted, budgets[request.pot].part_of(request.samples), group)
            for found, count, granted, request in zip(findings, planned, plan.granted, requests, strict=True)
        ]
        expected, rings = _rings(requests, [planned, homes], group)
        if named:
            arcs = group.exchange({number: cache.handle.arc for number, cache in joined.items()})
            rings = [
                ring.beside([arcs[ranks[0]].get(number) for ranks in group.nodes]) for number, ring in enumerate(rings)
            ]
        if group.is_leader and any(
            count < request.samples for count, request in zip(planned, requests, strict=True)
        ):  # files, or packed images, may fit where decoded ones do not
            for warning in plan.warnings:
                log.warning(warning)

        def make(kind: Backend | None) -> list[Segments]:
            made = []
            for number, (request, found, ring) in enumerate(zip(requests, findings, rings, strict=True)):
                cache, budget, arc = joined.pop(number, None), budgets[request.pot], ring.arcs[group.node]
                bounds = plan.granted[number], plan.keep_free[number]
                refuse = partial(store_or_refuse, request, found, readers[number].read)
                made.append(Segments.make(request, found, arc, group, kind, cache, budget, *bounds, refuse))
            return made

        try:
            segments = make_and_attach(make, plan.backend, group)
        except CacheMemoryError as error:
            wanted_any = named or any(arc.slots for ring in rings for arc in ring.arcs)
            return _without(requests, group, error, wanted=wanted_any)
    _tell(requests, findings, segments, group)
    if named:
        held = group.exchange([None if made.cache is None else made.cache.handle.arc for made in segments])
        rings = rings_as_they_are(rings, [held[ranks[0]] for ranks in group.nodes])
        expected = [
            likely if request.name is None else ring
            for ring, request, likely in zip(rings, requests, expected, strict=True)
        ]
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
            expected_ring=likely,
        )
        for (source, tail), made, ring, likely, granted, request in zip(
            parts, segments, rings, expected, plan.granted, requests, strict=True
        )
    ]


def _find(
    requests: Sequence[CacheRequest], budgets: Mapping[str, Budget], group: NodeGroup, readers: Sequence[SourceReader]
) -> list[Finding]:
    """What the leader of each node has seen of the sources. Collective."""
    apart = ranks_apart(requests, group)
    return group.lead(
        lambda: [
            _look(
                request, partial(readers[number].look, found_before(request)), budgets[request.pot], not apart[number]
            )
            for number, request in enumerate(requests)
        ]
    )


def _whole_where_there_is_room(
    requests: Sequence[CacheRequest], divide: Callable[[Sequence[CacheRequest]], Allocation], group: NodeGroup
) -> list[CacheRequest]:
    """Requests with slots for all indices, where they say so and the memory of all nodes is for so many. Collective."""
    if not any(request.whole_if_room and request.domain is not None for request in requests):
        return list(requests)
    whole = [replace(request, domain=None) if request.whole_if_room else request for request in requests]
    room = group.exchange(group.lead(lambda: divide(whole)).slots)
    totals = [sum(room[ranks[0]][number] for ranks in group.nodes) for number in range(len(requests))]
    return [every if total >= part.length else part for every, part, total in zip(whole, requests, totals, strict=True)]


def _in_its_form(request: CacheRequest, found: Finding, granted: int, wanted: int, group: NodeGroup) -> Finding:
    """What was found, with the codec that what was granted decides: decoded or as files, with what room for records."""
    codec, as_files = found.codec, found.as_files
    assert codec is not None
    if isinstance(codec, RecordCodec):
        codec = codec.for_bytes(granted, wanted)
    if found.encoded is not None:
        as_files = keeps_files(granted, wanted, codec, found.encoded)
        if group.is_leader:
            log.info(told_form(request.title, as_files, codec, found.encoded))
        codec = found.encoded.codec if as_files else codec
    if codec is found.codec:
        return found
    return replace(found, codec=codec, as_files=as_files, seen=found.seen if as_files == found.as_files else ())


def _rings(
    requests: Sequence[CacheRequest], slots: Sequence[Sequence[int]], group: NodeGroup
) -> tuple[list[Ring], list[Ring]]:
    """The rings of two kinds of slots, per request: as many as are expected to find room, and homes. Collective."""
    told = group.exchange(slots)

    def ring(number: int, request: CacheRequest, which: int) -> Ring:
        counts = [told[ranks[0]][which][number] for ranks in group.nodes]
        return Ring.cut(request.samples, group.shares, counts, request.domain)

    expected, homes = ([ring(*item, which) for item in enumerate(requests)] for which in (0, 1))
    return expected, homes


def _tell(
    requests: Sequence[CacheRequest], findings: Sequence[Finding], segments: Sequence[Segments], group: NodeGroup
) -> None:
    """Say which samples are not cached, and which caches are not used: what lies under their names is other data.

    Raises:
        FingerprintError: a request for one of these is strict; on the other ranks a RuntimeError. All are closed then.
    """

    def tell_refusals() -> None:
        for request, made in zip(requests, segments, strict=True):
            if made.refusal is not None and request.strict:
                raise FingerprintError(f"{request.title} cannot be cached: {made.refusal}")
            if made.refusal is not None and group.is_leader:
                log.warning("%s passes through uncached: %s", request.title, made.refusal)

    if any(request.name is not None for request in requests):
        try:
            group.together(tell_refusals)
        except BaseException:
            for made in segments:
                made.close()
            raise
    for request, found, made in zip(requests, findings, segments, strict=True):
        told = found.odd if group.is_leader and not request.strict else None
        if told and made.counters is not None and made.counters.is_first("odd sample"):
            warn_of_odd(request.source, told)


def _without(
    requests: Sequence[CacheRequest], group: NodeGroup, error: Exception, *, wanted: bool = True
) -> list[OpenCache]:
    """Go on without the caches, for want of memory or disk, with one warning; `strict`, an error if any is wanted."""
    if wanted and any(request.strict for request in requests):
        raise error
    if group.rank == 0:
        log.warning("the cache is off, all samples are loaded from their source, uncounted: %s", error)
    return [OpenCache.without(request, group) for request in requests]


def _homes(codec: SampleCodec | None, expected: int, granted: int, length: int, group: NodeGroup) -> int:
    """How many indices get a slot on this node.

    Of records, all that the node trains on, where its memory is for fewer: who comes first finds room, and a mean that
    was misjudged costs nothing. Beyond its share an index has several homes, and may be stored twice: there it is as
    many as are expected to find room.
    """
    if not isinstance(codec, RecordCodec) or not expected:
        return expected
    share = math.ceil(group.shares[group.node] * length)
    return min(max(expected, share), max(slots_for(granted, codec, length), expected), length)


def _look(request: CacheRequest, look: Callable[[], Finding], budget: Budget, same: bool) -> Finding:
    """What the leader of a node has seen of a source, told to people."""
    if budget.off or (not request.length and not request.strict):
        return Finding()
    finding = look() if same else Finding(reason=_APART)
    if request.strict and finding.reason is not None:
        raise ValueError(f"{request.title} cannot be cached: {finding.reason}")
    if finding.reads:
        log.info("%s: %d samples read at set-up, to learn what they are", request.title, finding.reads)
    if finding.note is not None:
        log.warning("%s: %s", request.title, finding.note)
    if finding.reason is not None:
        log.warning("%s passes through uncached: %s", request.title, finding.reason)
    return finding
