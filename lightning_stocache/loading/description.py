"""A cache in one line, for people."""

from __future__ import annotations

import logging
import sys
from typing import Any

from lightning_stocache.loading.opened import Opened
from lightning_stocache.node.budget import format_bytes

__all__ = ["description", "tell"]

log = logging.getLogger(__name__)


def tell(sentence: str) -> None:
    """Say something at set-up: to the log, or on stderr where a script has not set logging up, which drops it."""
    if log.hasHandlers():
        log.info(sentence)
    else:
        sys.stderr.write(f"{sentence}\n")


def description(source: Any, opened: Opened) -> str:
    """What is cached of a source; with several nodes, on which one, and its arc of the ring."""
    cache, group = opened.live_cache, opened.group
    name, samples = type(source).__name__, len(source)
    if cache is None:
        return f"{name}: {samples:,} samples, not cached"
    where, arc = "", ""
    if len(group.nodes) > 1:
        where = f" on node{group.node} (ranks {', '.join(map(str, group.nodes[group.node]))})"
        arc = "" if opened.ring is None else f" in an arc that starts at {opened.ring.arcs[group.node].start:,}"
    return (
        f"{name}{where}: {len(cache):,} of {samples:,} samples have a slot{arc}, {cache.filled:,} are filled, "
        f"{format_bytes(cache.memory_bytes)} in use of {format_bytes(opened.budget_bytes)}"
    )
