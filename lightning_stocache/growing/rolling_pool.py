"""The pool of one node behind a rolling cache: its memory, who fills it, and the waiting for both.

The leader of a node makes it and waits; the other ranks open the same memory, and are told what is resident.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.growing.fillers import Fillers
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import Backend
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.waiting import poll
from lightning_stocache.setup.allocation import Allocation, allocate_pool
from lightning_stocache.setup.first_samples import codec_of
from lightning_stocache.setup.request import Layout, check_choice, check_count
from lightning_stocache.setup.segments import OpenMemory, make_and_attach
from lightning_stocache.source.draws import Draws, is_stream

__all__ = ["RollingPool", "RollingRequest", "RollingStats"]

log = logging.getLogger(__name__)

_NODE_SEEDS = 1_000_003  # between the seeds of two nodes, whose fillers draw different permutations


@dataclass(frozen=True)
class RollingRequest:
    """What is asked for; the arguments are those of `RollingCache`, which describes them."""

    source: Any
    budget: Budget
    fillers: int = 4
    minimum: int = 256
    indices: Iterable[int] | None = None
    spec: SampleSpec | RecordCodec | None = None
    layout: Layout = "auto"
    shuffle: bool = True
    seed: int = 0
    method: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("fillers", 0), ("minimum", 1)):
            check_count(name, getattr(self, name), least)
        check_choice("layout", self.layout, Layout)
        if self.source is None and self.spec is None:
            raise ValueError("without a source a rolling cache needs spec=SampleSpec.infer(sample), of one to come")
        if self.indices is not None and (self.source is None or is_stream(self.source)):
            raise ValueError("indices needs a map-style source to load them from")

    @property
    def length(self) -> int | None:
        """Number of samples that are drawn before one comes again; None where that is not known."""
        return None if self.source is None or self.indices is not None or is_stream(self.source) else len(self.source)

    def draws(self, node: int, *, passes: int | None = None) -> Draws:
        """What the fillers of a node draw."""
        return Draws(self.source, self.indices, self.seed + _NODE_SEEDS * node, self.shuffle, passes)


@dataclass(frozen=True)
class RollingStats:
    """What a rolling cache holds on this node, and has done since it was opened.

    Args:
        resident: samples that can be read now.
        capacity: samples for which there is room.
        appended: samples that came.
        evicted: samples that left for newer ones.
        oldest_seconds: age of the oldest that is resident.
        times_seen: how often a sample that came was served, on average.
        renewed: samples served by this process that had come after the epoch had begun, for one that had left.
        substituted: samples served by this process for one that was being replaced at that moment.
        failed: samples that the fillers could not load, or that were of another kind.
        restarts: fillers that died and were started anew.
        memory_bytes: memory in use.
    """

    resident: int
    capacity: int
    appended: int
    evicted: int
    oldest_seconds: float
    times_seen: float
    renewed: int
    substituted: int
    failed: int
    restarts: int
    memory_bytes: int


class RollingPool:
    """An open pool.

    Args:
        memory: where samples lie, and what has been served.
        minimum: samples for which an epoch waits.
    """

    def __init__(self, memory: OpenMemory[RollingStore], minimum: int = 1) -> None:
        assert memory.store is not None
        assert memory.counters is not None
        self.memory, self.store, self.counters = memory, memory.store, memory.counters
        self.minimum = max(minimum, memory.ranks)
        self.fillers: Fillers | None = None
        self._told_short = False

    @classmethod
    def open(cls, request: RollingRequest, group: NodeGroup) -> RollingPool:
        """Take the memory and start the fillers. Collective: the leader of each node does both, all ranks have both.

        Raises:
            ValueError: the budget has no room for the least number of samples.
            FirstSampleError: no sample can be read, or samples cannot be kept.
            TypeError: the source cannot be sent to the fillers.
        """
        codec, given, holds_all = group.lead(lambda: cls._plan(request, group))
        [memory] = make_and_attach(lambda kind: [_made(request, group, codec, given, kind)], given.backend, group)
        pool = cls(memory, request.minimum)
        try:
            group.lead(lambda: pool.fill(request, holds_all=holds_all))
        except BaseException:  # somewhere nobody fills it
            pool.stop()
            memory.close()
            raise
        return pool

    @staticmethod
    def _plan(request: RollingRequest, group: NodeGroup) -> tuple[SampleSpec | RecordCodec, Allocation, bool]:
        """What samples look like, what memory there is for them, and whether all have room."""
        if sys.platform == "win32":
            raise OSError("a rolling cache needs memory and locks that processes share, which Windows does not have")
        ranks = len(group.nodes[group.node])
        codec = request.spec or codec_of(request.draws(group.node), request.layout, request.method)
        writers = 1 if request.source is None else max(request.fillers, 1)
        return codec, *allocate_pool(request.budget, codec, request.length, writers, ranks)

    def fill(self, request: RollingRequest, *, holds_all: bool) -> None:
        """On the node's leader: start the fillers."""
        if request.source is not None and request.fillers:
            draws = request.draws(self.memory.group.node, passes=1 if holds_all else None)
            self.fillers = Fillers(draws, self.store, request.fillers, request.method)

    def resident(self) -> Integers:
        """What is resident, once the minimum has come.

        Raises:
            RuntimeError: nothing is, and no filler is left.
        """
        store = self.store
        # Memory may end, and larger records come, while it is waited: once samples leave, no more have room.
        self._wait(lambda: store.filled, lambda: 1 if store.evicted else min(self.minimum, store.capacity))
        return store.resident()

    def begin_epoch(self) -> Integers:
        """What is resident, for a new epoch."""
        self.look_after()
        resident = self.resident()
        self.store.begin_epoch()
        return resident

    def look_after(self) -> None:
        """Tell what fillers have said, and start those anew that have died."""
        if self.fillers is not None:
            self.fillers.look()

    def stats(self) -> RollingStats:
        """What is resident, and what has been done."""
        store, fillers = self.store, self.fillers
        return RollingStats(
            resident=store.filled,
            capacity=store.capacity,
            appended=store.appended,
            evicted=store.evicted,
            oldest_seconds=store.oldest_seconds,
            times_seen=self.counters.totals().hits / max(store.appended, 1),
            renewed=store.renewed,
            substituted=store.substituted,
            failed=0 if fillers is None else fillers.failed,
            restarts=0 if fillers is None else fillers.restarts,
            memory_bytes=store.memory_bytes,
        )

    def stop(self) -> None:
        """End the fillers."""
        if self.fillers is not None:
            self.fillers.stop()

    def _wait(self, have: Callable[[], int], wanted: Callable[[], int]) -> None:
        """Wait for samples, and say so. Where no more can come, what there is will do."""
        fillers = self.fillers
        for seconds in poll(pause=0.005):
            if (count := have()) >= (least := wanted()):
                break
            if fillers is not None and not fillers.are_at_work():
                if (count := have()) >= least:
                    return
                if count or seconds or not self.store.appended:  # else the only sample is being replaced
                    self._no_more(count, least, fillers)
                    return
            if seconds:
                log.warning(
                    "training waits for samples: %d of %d have come in %.0f s. %s",
                    count,
                    least,
                    seconds,
                    "Only RollingWriters append to this cache" if fillers is None else fillers.describe(),
                )

    def _no_more(self, count: int, wanted: int, fillers: Fillers) -> None:
        if not self.store.filled:
            raise RuntimeError(
                "the rolling cache is empty and none of its fillers is left: "
                f"{fillers.last_error or 'the source has given no samples'}"
            )
        if not self._told_short:
            self._told_short = True
            log.warning(
                "the last filler of the rolling cache has ended, and %d of %d samples have come: training goes on with "
                "what is resident",
                count,
                wanted,
            )


def _made(
    request: RollingRequest,
    group: NodeGroup,
    codec: SampleSpec | RecordCodec,
    given: Allocation,
    backend: Backend | None,
) -> OpenMemory[RollingStore]:
    """On the node's leader: take the memory."""
    whose = {"dataset": f"rolling: {type(request.source).__name__}", "node": group.node, "nodes": len(group.nodes)}
    [slots], [granted], [keep_free] = given.slots, given.granted, given.keep_free
    store = RollingStore.empty(codec, slots, backend, whose, granted=granted)
    store.keep_free(keep_free)
    try:
        return OpenMemory(store, Counters.create(group.rank, backend), group, store.granted_bytes)
    except OSError:
        store.close()
        raise
