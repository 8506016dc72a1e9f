"""How caches open: look at the sources, divide the memory, make the segments, hand them round.

All requests of one call open together, because they share budgets. The steps, each one collective over the job's ranks:

1. The leader of each node reads a few samples of every source: the fields of the first one are the spec, and the
   random part is found (`split`). The other ranks read nothing; they cut their own copy of the source at the same
   place.
2. Each leader divides the memory of its node (`allocate`).
3. The leaders tell each other their slots, and every rank lays the same ring.
4. Each leader makes the segments of its node; the other ranks attach. Where they cannot (another pid namespace), named
   files are tried, whose names go again as soon as all are attached.

What fails on one rank is raised on all. Nothing is kept here: an `Opened` holds all there is.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset

from lightning_stocache.cache.cache import SharedCache
from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.placement import Arc, Ring
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.loading.allocation import BackendChoice, Request, allocate
from lightning_stocache.loading.cut import Cut
from lightning_stocache.loading.split import split
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.segment import Backend, Segment, SegmentHandle

__all__ = ["CacheMemoryError", "Opened", "open_caches"]

log = logging.getLogger(__name__)


class CacheMemoryError(OSError):
    """The memory for a cache cannot be had, or not be reached by all ranks of a node."""


@dataclass
class Opened:
    """What came of a request, in this process.

    Args:
        source: where misses are loaded from: the request's source, or its deterministic part.
        tail: the random part, to be applied after the cache.
        cache: None when the source is passed through uncached.
        counters: None where counting is impossible (Windows).
        ring: the arcs of all nodes.
        group: the ranks that share it.
        budget_bytes: memory that was granted on this node.
    """

    source: Dataset[Any]
    tail: Callable[[Any], Any] | None = None
    cache: SharedCache | None = None
    counters: Counters | None = None
    ring: Ring | None = None
    group: NodeGroup = field(default_factory=NodeGroup)
    budget_bytes: int = 0

    def close(self) -> None:
        """Give cache and counters up in this process."""
        for part in (self.cache, self.counters):
            if part is not None:
                part.close()


def open_caches(
    requests: Sequence[Request], budgets: Mapping[str, Budget], group: NodeGroup, backend: BackendChoice = "auto"
) -> list[Opened]:
    """Open a cache for every request. Collective: all ranks pass the same requests in the same order.

    Args:
        requests: what is to be cached.
        budgets: the budget of every pot, per node.
        group: which ranks share memory.
        backend: where segments lie, see `allocate`.

    Raises:
        UnsupportedSampleError: a sample holds something that has no fixed size.
        SampleMismatchError: the samples read at set-up differ in shape, dtype or structure.
        CacheMemoryError: a segment could not be made or reached, not even by name; on all ranks alike.
        Exception: what a source itself raises, unchanged; on the other ranks a RuntimeError that names it.
    """
    if sys.platform == "win32":
        log.warning("there is no memory shared between processes on Windows: all samples pass through uncached")
        return [Opened(request.source) for request in requests]
    findings = group.lead(lambda: [_look_at(request, budgets[request.pot]) for request in requests])
    ranks = len(group.nodes[group.node])
    plan = group.lead(lambda: allocate(requests, [found.spec for found in findings], budgets, ranks, backend))
    slots = group.exchange(plan.slots)
    rings = [
        Ring.cut(request.length, group.shares, [slots[ranks[0]][number] for ranks in group.nodes])
        for number, request in enumerate(requests)
    ]
    if group.is_leader:
        for warning in plan.warnings:
            log.warning(warning)
    segments = _make_and_attach(
        lambda kind: [
            _Segments.make(found.spec, ring.arcs[group.node], group.rank, kind)
            for found, ring in zip(findings, rings, strict=True)
        ],
        plan.backend,
        group,
    )
    opened = []
    for number, (request, found, ring, own) in enumerate(zip(requests, findings, rings, segments, strict=True)):
        source, tail = (request.source, None) if found.cut is None else found.cut.apply(request.source)
        opened.append(Opened(source, tail, own.cache, own.counters, ring, group, plan.granted[number]))
    return opened


@dataclass(frozen=True)
class _Finding:
    """What a leader has seen of a source; it travels to the ranks of the node. Without a spec, nothing is cached."""

    spec: SampleSpec | None = None
    cut: Cut | None = None


def _look_at(request: Request, budget: Budget) -> _Finding:
    if budget.off:
        return _Finding()
    if request.spec is not None:
        return _Finding(request.spec)
    if request.allow_random:
        return _Finding(SampleSpec.infer(request.source[0]))
    parts = split(request.source)
    log.info("%s: %d samples read at set-up, to learn their shape and look for randomness", request.name, parts.reads)
    if parts.reason is not None:
        advice = "To cache it all the same, with its first draw frozen: allow_random=True"
        log.warning("%s passes through uncached. %s %s", request.name, parts.reason, advice)
        return _Finding()
    spec = SampleSpec.infer(parts.samples[0])
    for index, sample in zip(parts.indices, parts.samples, strict=True):
        spec.flatten(sample, index)
    return _Finding(spec, parts.cut)


@dataclass(frozen=True)
class _Address:
    """Where the segments of one request are, for the other ranks of the node."""

    counters: SegmentHandle
    cache: tuple[SegmentHandle, SampleSpec, Arc] | None

    def attach(self, rank: int) -> _Segments:
        counters = Counters(Segment.attach(self.counters), rank)
        if self.cache is None:
            return _Segments(counters, None)
        handle, spec, arc = self.cache
        return _Segments(counters, SharedCache.over(Segment.attach(handle), spec, arc))


@dataclass(frozen=True)
class _Segments:
    """The segments of one request, open in this process."""

    counters: Counters
    cache: SharedCache | None

    @classmethod
    def make(cls, spec: SampleSpec | None, arc: Arc, rank: int, backend: Backend | None) -> _Segments:
        cache = SharedCache.create(spec, arc, backend) if spec is not None and arc.slots else None
        return cls(Counters.create(rank, backend), cache)

    @property
    def address(self) -> _Address:
        cache = self.cache
        its = None if cache is None else (cache.segment.handle, cache.spec, cache.arc)
        return _Address(self.counters.segment.handle, its)

    def unlink(self) -> None:
        self.counters.segment.unlink()
        if self.cache is not None:
            self.cache.segment.unlink()

    def close(self) -> None:
        self.counters.close()
        if self.cache is not None:
            self.cache.close()


def _make_and_attach(
    make: Callable[[Backend | None], list[_Segments]], backend: Backend | None, group: NodeGroup
) -> list[_Segments]:
    """Make the segments on every leader and attach elsewhere; by name, where they cannot be reached without one."""
    troubles: list[str | None] = []
    for kind in dict.fromkeys((backend, "file")):
        segments: list[_Segments] = []
        trouble: str | None = None
        addresses: list[_Address] = []
        try:
            if group.is_leader:
                segments += make(kind)
                addresses = [one.address for one in segments]
        except OSError as error:
            trouble = repr(error)
        addresses = group.exchange(addresses)[group.leader]
        try:
            if not group.is_leader:
                segments += [address.attach(group.rank) for address in addresses]
        except (OSError, ValueError) as error:
            trouble = repr(error)
        troubles = group.exchange(trouble)  # by now everybody has attached, or will not
        for one in segments:
            one.unlink()
        if not any(troubles):
            return segments
        for one in segments:
            one.close()
    rank, words = next((rank, words) for rank, words in enumerate(troubles) if words)
    raise CacheMemoryError(f"rank {rank} could not make or reach the shared memory of its node: {words}")
