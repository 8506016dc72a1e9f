"""How the memory for a stream opens: look at its first samples, divide the memory, make it, attach it on all ranks.

The length and the size of a stream are not known before it is read, so its memory is granted in bytes.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TypeAlias

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

_LEAST = 1 << 16  # bytes; less is not worth a segment
_READERS = 4  # processes per rank that map the memory, where nobody has said how many


def check_budget(budget: Budget) -> None:
    """Refuse a share of a dataset whose size is not known."""
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
        layout: rows or records.
        backend: where segments lie.
        strict: whether memory that cannot be had is an error; else the stream passes through, with a warning.
        kept_back: bytes of this node's free memory that are for something else.

    Raises:
        CacheMemoryError: the memory cannot be had or reached, on all ranks alike, and `strict`.
    """
    if sys.platform == "win32":
        log.warning("Windows has no memory that processes could share: the stream passes through uncached")
        return OpenMemory(group=group)

    def look() -> SampleCodec | str:
        try:
            return codec_of(Draws(source, shuffle=False, passes=1, as_stream=True), layout)
        except FirstSampleError as error:
            return str(error)

    def make(kind: Backend | None) -> list[OpenStream]:
        if codec is None or isinstance(codec, str):
            return [OpenMemory(group=group)]
        ranks = len(group.nodes[group.node])
        given = allocate_alone(budget, None, ranks, Reserve(kept_back, 0, ranks * _READERS), kind or "auto")
        [granted], [keep_free] = given.granted, given.keep_free
        if granted < _LEAST:
            return [OpenMemory(group=group)]
        store = StreamStore.empty(codec, granted, ranks, given.backend, keep_free)
        return [OpenMemory(store, None, group, granted)]

    codec: SampleCodec | str | None = None
    if not budget.off:
        nodes = len(group.nodes)
        codec = f"it is kept on one node only, and there are {nodes}" if nodes > 1 else group.lead(look)
    if isinstance(codec, str) and group.rank == 0:
        log.warning("the stream passes through uncached: %s", codec)
    try:
        [opened] = make_and_attach(make, None if backend == "auto" else backend, group)
        return opened
    except CacheMemoryError as error:
        if strict:
            raise
        if group.rank == 0:
            log.warning("the stream passes through uncached: %s", error)
        return OpenMemory(group=group)
