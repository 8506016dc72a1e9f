"""How the memory for a stream opens: granted, made by the leader of each node, reached by its other ranks.

Neither the length nor the size of a stream is known before it is read, so memory is granted in bytes. What its samples
look like its first ones tell, which the leader of a node has read by another process.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TypeAlias

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.records import SampleCodec
from lightning_stocache.cache.stream import StreamStore
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import Backend
from lightning_stocache.node.grant import Reserve
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.allocation import allocate_alone
from lightning_stocache.setup.first_samples import FirstSampleError, codec_of
from lightning_stocache.setup.request import BackendChoice, Layout
from lightning_stocache.setup.segments import CacheMemoryError, OpenMemory, make_and_attach
from lightning_stocache.source.draws import Draws

__all__ = ["OpenStream", "check_budget", "open_stream"]

log = logging.getLogger(__name__)

OpenStream: TypeAlias = OpenMemory[StreamStore]
"""The memory of a stream in this process."""

_LEAST = 1 << 16  # bytes below which there is nothing to be kept
_READERS = 4  # processes per rank that map the memory, where nobody has said how many


def check_budget(budget: Budget) -> None:
    """Refuse a share of a dataset whose size nobody knows.

    Raises:
        ValueError: it is one.
    """
    if budget.unit == "% of dataset" and budget.amount < 100:
        raise ValueError(
            f"budget of a stream must be in bytes, '% of free', 'auto' (as much as is safely free) or 0, got "
            f"{str(budget)!r}: nobody knows the size of a stream"
        )


def open_stream(
    source: Any,
    budget: Budget,
    group: NodeGroup,
    layout: Layout = "auto",
    backend: BackendChoice = "auto",
    *,
    strict: bool = False,
    kept_back: int = 0,
) -> OpenStream:
    """Open the memory of a stream. Collective: all ranks call it in the same order.

    Args:
        source: the stream.
        budget: memory per node.
        group: which ranks share memory.
        layout: how samples are to lie.
        backend: where segments lie.
        strict: whether memory that cannot be had is an error; else the stream passes through, with a warning.
        kept_back: bytes of this node's free memory that are for something else.

    Raises:
        CacheMemoryError: the memory cannot be had or reached, on all ranks alike, and `strict`.
    """
    trouble: object = None
    codec: SampleCodec | None = None
    if sys.platform == "win32":
        log.warning("Windows has no memory that processes could share: the stream passes through uncached")
        return OpenMemory(group=group)
    if len(group.nodes) > 1 and not budget.off:
        trouble = f"it is kept on one node only, and there are {len(group.nodes)}"
    elif not budget.off:
        codec, trouble = group.lead(lambda: _look(source, layout))

    def make(kind: Backend | None) -> list[OpenStream]:
        return [_made(codec, budget, group, kind, kept_back)]

    opened: OpenStream = OpenMemory(group=group)
    try:
        [opened] = make_and_attach(make, None if backend == "auto" else backend, group)
    except CacheMemoryError as error:
        if strict:
            raise
        trouble = error
    if trouble is not None and group.rank == 0:
        log.warning("the stream passes through uncached: %s", trouble)
    return opened


def _look(source: Any, layout: Layout) -> tuple[SampleCodec | None, str | None]:
    """What samples look like, or why the stream cannot be kept."""
    try:
        return codec_of(Draws(source, shuffle=False, passes=1, as_stream=True), layout), None
    except FirstSampleError as error:
        return None, str(error)


def _made(
    codec: SampleCodec | None, budget: Budget, group: NodeGroup, backend: Backend | None, kept_back: int
) -> OpenStream:
    """Made by the leader of a node."""
    ranks = len(group.nodes[group.node])
    counters = Counters.create(group.rank, backend)
    if codec is None:
        return OpenMemory(None, counters, group)
    given = allocate_alone(budget, None, ranks, Reserve(kept_back, 0, ranks * _READERS), backend or "auto")
    [granted], [keep_free] = given.granted, given.keep_free
    if granted < _LEAST:
        return OpenMemory(None, counters, group)
    try:
        store = StreamStore.empty(codec, granted, ranks, given.backend, keep_free)
    except OSError:
        counters.close()
        raise
    return OpenMemory(store, counters, group, granted)
