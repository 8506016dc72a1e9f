"""How caches open: look at the sources, divide the memory, make the segments, hand them round.

All requests of one call open together, because they share budgets. The steps, each one collective over the job's ranks:

1. The leader of each node looks at every source (`look`): what its samples look like gives the codec, and the random
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
from typing import Any

from torch.utils.data import Dataset

from lightning_stocache.cache.placement import Ring
from lightning_stocache.cache.records import RecordCodec, SampleCodec
from lightning_stocache.cache.store import slots_for
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import Backend
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.agreement import check_lengths, drawn_by_any, ranks_apart
from lightning_stocache.setup.allocation import Allocation, allocate
from lightning_stocache.setup.disk_cache import allocate_on_disk, with_directories
from lightning_stocache.setup.finding import Finding
from lightning_stocache.setup.form_choice import keeps_files, told_form
from lightning_stocache.setup.look import SourceReader
from lightning_stocache.setup.named_cache import FingerprintError, found_before, join_caches, rings_as_they_are
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import BackendChoice, CacheRequest
from lightning_stocache.setup.same_data import store_or_refuse
from lightning_stocache.setup.segments import CacheMemoryError, Segments, make_and_attach
from lightning_stocache.source.access import warn_of_odd
from lightning_stocache.source.encoded import taken_apart

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
    with ExitStack() as readers:
        return _open(requests, budgets, group, backend, later_bytes, kept_back, readers)


def _open(
    requests: Sequence[CacheRequest],
    budgets: Mapping[str, Budget],
    group: NodeGroup,
    backend: BackendChoice,
    later_bytes: int,
    kept_back: int,
    open_readers: ExitStack,
) -> list[OpenCache]:
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
    apart = ranks_apart(requests, group)
    reader = open_readers.enter_context(closing(SourceReader(requests)))
    findings = group.lead(
        lambda: [
            _look(request, partial(reader.look, number, found_before(request)), budgets[request.pot], not apart[number])
            for number, request in enumerate(requests)
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

    def divided() -> Allocation:
        if all(found.codec is None for found in findings):  # to measure what is free would take its time
            nothing = (0,) * len(requests)
            return Allocation(nothing, nothing, None if backend == "auto" else backend, (), nothing)
        if on_disk:
            return allocate_on_disk(requests, codecs, budgets)
        more = {"worker_bytes": worker_bytes, "later_bytes": later_bytes}
        return allocate(requests, codecs, budgets, ranks, backend, promised + kept_back, **more)

    on_disk = any(request.dir is not None for request in requests)
    if any(request.whole_if_room and request.domain is not None for request in requests):
        drawn = list(requests)
        requests = whole = [replace(request, domain=None) if request.whole_if_room else request for request in drawn]
        room = group.exchange(group.lead(divided).slots)
        totals = [sum(room[ranks[0]][number] for ranks in group.nodes) for number in range(len(drawn))]
        fits = [total >= request.length for total, request in zip(totals, drawn, strict=True)]
        requests = [every if fit else part for every, part, fit in zip(whole, drawn, fits, strict=True)]
    plan = group.lead(divided)
    if on_disk and backend != "auto":  # where the job counts
        plan = replace(plan, backend=backend)
    planned = list(plan.slots)
    for number, (request, found) in enumerate(zip(requests, findings, strict=True)):
        codec, granted, wanted = found.codec, plan.granted[number], budgets[request.pot].part_of(request.samples)
        if codec is None or number in joined:
            continue
        as_files = found.as_files
        if isinstance(codec, RecordCodec):
            codec = codec.for_bytes(granted, wanted)
        if found.encoded is not None:
            as_files = keeps_files(granted, wanted, codec, found.encoded)
            if group.is_leader:
                log.info(told_form(request.title, as_files, codec, found.encoded))
            codec = found.encoded.codec if as_files else codec
        if codec is not found.codec:
            seen = found.seen if as_files == found.as_files else ()
            findings[number] = replace(found, codec=codec, as_files=as_files, seen=seen)
            planned[number] = min(granted // codec.slot_bytes, wanted)
    parts = group.together(lambda: list(map(_parts, requests, findings)))
    homes = [
        _homes(found.codec, count, granted, budgets[request.pot].part_of(request.samples), group)
        for found, count, granted, request in zip(findings, planned, plan.granted, requests, strict=True)
    ]
    slots = group.exchange([planned, homes])
    expected, rings = (
        [
            Ring.cut(
                request.samples,
                group.shares,
                [slots[ranks[0]][which][number] for ranks in group.nodes],
                request.domain,
            )
            for number, request in enumerate(requests)
        ]
        for which in (0, 1)
    )
    if named:
        held = group.exchange({number: cache.handle.arc for number, cache in joined.items()})
        rings = [
            ring.beside([held[ranks[0]].get(number) for ranks in group.nodes]) for number, ring in enumerate(rings)
        ]
    short = any(count < request.samples for count, request in zip(planned, requests, strict=True))
    if group.is_leader and short:  # files, or packed images, may fit where decoded ones do not
        for warning in plan.warnings:
            log.warning(warning)

    def make(kind: Backend | None) -> list[Segments]:
        made = []
        for number, (request, found, ring) in enumerate(zip(requests, findings, rings, strict=True)):
            cache, budget, arc = joined.pop(number, None), budgets[request.pot], ring.arcs[group.node]
            bounds = plan.granted[number], plan.keep_free[number]
            refuse = partial(store_or_refuse, request, found, partial(reader.read, number))
            made.append(Segments.make(request, found, arc, group, kind, cache, budget, *bounds, refuse))
        return made

    try:
        segments = make_and_attach(make, plan.backend, group)
    except CacheMemoryError as error:
        return _without(requests, group, error, wanted=named or any(arc.slots for ring in rings for arc in ring.arcs))
    if named:
        try:
            group.together(lambda: _tell_refusals(requests, segments, group))
        except BaseException:
            for made in segments:
                made.close()
            raise
    for request, found, made in zip(requests, findings, segments, strict=True):
        told = found.odd if group.is_leader and not request.strict else None
        if told and made.counters is not None and made.counters.is_first("odd sample"):
            warn_of_odd(request.source, told)
    if named:
        arcs = group.exchange([None if made.cache is None else made.cache.handle.arc for made in segments])
        rings = rings_as_they_are(rings, [arcs[ranks[0]] for ranks in group.nodes])
        expected = [
            e if request.name is None else ring for ring, request, e in zip(rings, requests, expected, strict=True)
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


def _without(
    requests: Sequence[CacheRequest], group: NodeGroup, error: Exception, *, wanted: bool = True
) -> list[OpenCache]:
    """Go on without the caches, for want of memory or disk, with one warning; `strict`, an error if any is wanted."""
    if wanted and any(request.strict for request in requests):
        raise error
    if group.rank == 0:
        log.warning("the cache is off, all samples are loaded from their source, uncounted: %s", error)
    return [OpenCache.without(request, group) for request in requests]


def _parts(request: CacheRequest, found: Finding) -> tuple[Dataset[Any], Callable[[Any], Any] | None]:
    """What is kept of a source, and what finishes it after the cache."""
    if found.as_files:
        return taken_apart(request.source)
    return (request.source, None) if found.cut is None else found.cut.apply(request.source)


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


def _tell_refusals(requests: Sequence[CacheRequest], segments: Sequence[Segments], group: NodeGroup) -> None:
    """Say which caches are not used, for what lies under their names is other data.

    Raises:
        FingerprintError: a request for one of them is strict.
    """
    for request, made in zip(requests, segments, strict=True):
        if made.refusal is not None and request.strict:
            raise FingerprintError(f"{request.title} cannot be cached: {made.refusal}")
        if made.refusal is not None and group.is_leader:
            log.warning("%s passes through uncached: %s", request.title, made.refusal)


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
