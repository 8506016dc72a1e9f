"""Rates from counts.

Every rank brings a `Tally`; the sums are made first and divided afterwards, because the mean of per-rank hit rates is
not the hit rate. What is read off the memory of a node (slots, bytes) every rank of it has read: the largest is that of
the rank that ended its epoch last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce

from lightning_stocache.cache.counters import Counts

__all__ = ["LIVE", "LIVE_METRICS", "NODE_METRICS", "ROLLING_METRICS", "Tally", "rates", "summarise"]

LIVE = "stocache/live/"
"""The beginning of the keys of live values."""

LIVE_METRICS = ("hit_rate", "fill_fraction", "memory_bytes", "data_wait_seconds", "compute_seconds")
"""The metrics that are logged while an epoch runs."""

NODE_METRICS = ("hit_rate", "fill_fraction", "memory_bytes")
"""The metrics of each node, where there are several."""

ROLLING_METRICS = ("resident", "oldest_seconds", "times_seen", "appended_per_second", "evicted_per_second", "renewed")
"""The metrics of a rolling cache."""

_OF_MEMORY = ("slots", "filled", "memory_bytes", "budget_bytes")


@dataclass(frozen=True)
class Tally:
    """The numbers of one rank about the caches of a stage."""

    node: int = 0
    counts: Counts = field(default_factory=Counts)  # what the rank's processes have served and filled in the epoch
    slots: int = 0  # on the node
    filled: float = 0  # slots of the node that are ready; of records, as large a part of them as of their bytes
    memory_bytes: int = 0  # in use by the caches of the node
    budget_bytes: int = 0  # granted for them
    wait_seconds: float = 0.0  # that the rank's training has waited for data; NaN if its loaders do not tell
    compute_seconds: float = 0.0
    loop_seconds: float = 0.0  # with all that is neither
    ranks: int = 0  # whose seconds these are
    unsized: int = 0  # misses and bypasses without a cache, whose bytes nobody knows

    def __add__(self, other: Tally) -> Tally:
        """Add up several caches of one rank, or several nodes."""
        summed = (getattr(self, part.name) + getattr(other, part.name) for part in fields(self)[1:])
        return Tally(self.node, *summed)


def rates(tally: Tally) -> dict[str, float]:
    """The metrics of a tally by their keys' names; a rate over nothing is 0, and what is not known is left out."""
    counts = tally.counts
    metrics = {
        "hit_rate": counts.hits / max(counts.served, 1),
        "fill_fraction": tally.filled / max(tally.slots, 1),
        "hits": counts.hits,
        "misses": counts.misses,
        "bypasses": counts.bypasses,
        "fills": counts.fills,
        "bytes_from_cache": counts.bytes_from_cache,
        "bytes_from_source": counts.bytes_from_source,
        "source_seconds": counts.source_ns / 1e9,
        "fill_seconds": counts.fill_ns / 1e9,
        "gather_seconds": counts.gather_ns / 1e9,
        "memory_bytes": tally.memory_bytes,
        "budget_bytes": tally.budget_bytes,
    }
    if tally.unsized:
        del metrics["bytes_from_source"]
    if tally.ranks and not math.isnan(tally.wait_seconds):
        metrics["data_wait_seconds"] = tally.wait_seconds / tally.ranks
        metrics["compute_seconds"] = tally.compute_seconds / tally.ranks
    if tally.ranks:
        metrics["samples_per_second"] = counts.served * tally.ranks / (tally.loop_seconds or math.inf)
    return metrics


def summarise(tallies: Sequence[Tally]) -> dict[str, float]:
    """The metrics of a job from the tallies of all its ranks; those of each node beside them, if there are several."""
    nodes = {node: _of_node([tally for tally in tallies if tally.node == node]) for node in {t.node for t in tallies}}
    metrics = rates(reduce(Tally.__add__, nodes.values()))
    if len(nodes) > 1:
        for node, tally in sorted(nodes.items()):
            of_node = rates(tally)
            metrics |= {f"node{node}/{name}": of_node[name] for name in NODE_METRICS}
    return metrics


def _of_node(tallies: Sequence[Tally]) -> Tally:
    """The ranks of a node as one: they share its memory."""
    memory = {name: max(getattr(tally, name) for tally in tallies) for name in _OF_MEMORY}
    return replace(reduce(Tally.__add__, tallies), node=tallies[0].node, **memory)
