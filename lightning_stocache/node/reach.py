"""Whether the ranks of a node can really map each other's memory.

That two processes see the same filesystem does not mean that one can open what the other makes: a container per rank
has process ids of its own, another user no right to open. So the first rank of every node makes two empty segments, one
without a name and one with, and the others try to open either.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lightning_stocache.node.files import Backend, default_backend
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["strangers"]

_KINDS: tuple[Backend, ...] = (default_backend(), "file")


def strangers(rank: int, nodes: Sequence[Sequence[int]], exchange: Callable[[Any], list[Any]]) -> dict[int, str]:
    """The ranks that cannot open what the first rank of their node makes, each with the reason. Collective.

    Args:
        rank: this process's rank.
        nodes: the ranks of each node, the one that makes its segments first.
        exchange: gives every rank's value to all, by rank.
    """
    mates = next(node for node in nodes if rank in node)
    with contextlib.ExitStack() as made:
        handles: list[SegmentHandle] = []
        if rank == mates[0] and len(mates) > 1 and sys.platform != "win32":
            for kind in dict.fromkeys(_KINDS):
                with contextlib.suppress(OSError):  # no memory at all is for who wants some to say
                    segment = Segment.create(1, kind)
                    made.callback(segment.close)
                    handles.append(segment.handle)
        offered: list[SegmentHandle] = exchange(handles)[mates[0]]
        troubles = exchange(None if rank == mates[0] else _trouble(offered))
    return {number: trouble for number, trouble in enumerate(troubles) if trouble is not None}


def _trouble(handles: Sequence[SegmentHandle]) -> str | None:
    """Why none of these can be opened here, or None."""
    trouble = None
    for handle in handles:
        try:
            Segment.attach(handle).close()
            return None
        except (OSError, ValueError) as error:
            trouble = str(error)
    return trouble
