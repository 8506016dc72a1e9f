"""Rates from counts, and seconds in words.

Every rank brings a `Tally`. The tallies are summed first and divided afterwards, because the mean of the ranks' hit
rates is not the hit rate of the job. Slots and bytes belong to the memory of a node, and every rank of the node reports
them. The largest values count: they are those of the rank that ended its epoch last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce

from lightning_stocache.cache.counters import Counts

__all__ = [
    "LIVE",
    "LIVE_METRICS",
    "NODE_METRICS",
    "PREFIXES",
    "ROLLING_METRICS",
    "Tally",
    "rates",
    "seconds",
    "summarise",
]

PREFIXES = {
    "train": "stocache/",
    "val": "stocache/val/",
    "test": "stocache/test/",
    "predict": "stocache/predict/",
}
"""The prefix of the metric keys of each stage."""

LIVE = "stocache/live/"
"""The prefix of the keys of live values."""

LIVE_METRICS = ("hit_rate", "fill_fraction", "memory_bytes", "data_wait_seconds", "compute_seconds")
"""The metrics that are logged while an epoch runs."""

NODE_METRICS = ("hit_rate", "fill_fraction", "memory_bytes")
"""The metrics of each node, if there are several nodes."""

ROLLING_METRICS = ("resident", "oldest_seconds", "times_seen", "appended_per_second", "evicted_per_second", "renewed")
"""The metrics of a rolling cache."""

_OF_MEMORY = ("slots", "filled", "memory_bytes", "budget_bytes")


@dataclass(frozen=True)
class Tally:
    """The counts, memory and seconds of one rank for the caches of a stage in an epoch."""

    node: int = 0
    counts: Counts = field(default_factory=Counts)  # of the rank's processes
    slots: int = 0  # on the node
    filled: float = 0  # slots of the node that are ready; for records, the filled share of the bytes times the slots
    memory_bytes: int = 0  # in use by the caches of the node
    budget_bytes: int = 0  # granted to the caches of the node
    wait_seconds: float = 0.0  # the training's waiting for data; NaN if a loader has no clock
    loop_seconds: float = 0.0  # the training, waiting or not
    ranks: int = 0  # number of ranks in the two sums of seconds
    unsized: int = 0  # misses and bypasses without a cache, whose bytes are unknown

    def __add__(self, other: Tally) -> Tally:
        """Add up several caches of one rank, several ranks, or several nodes. The result has the node of the left."""
        summed = (getattr(self, part.name) + getattr(other, part.name) for part in fields(self)[1:])
        return Tally(self.node, *summed)


def rates(tally: Tally) -> dict[str, float]:
    """The metrics of a tally, by the names in their keys. A rate over nothing is 0; an unknown metric is left out."""
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
        metrics["compute_seconds"] = (tally.loop_seconds - tally.wait_seconds) / tally.ranks
    if tally.ranks:
        metrics["epoch_seconds"] = tally.loop_seconds / tally.ranks
        metrics["samples_per_second"] = counts.served * tally.ranks / (tally.loop_seconds or math.inf)
    return metrics


def summarise(tallies: Sequence[Tally]) -> dict[str, float]:
    """The metrics of a job from the tallies of all its ranks, with `NODE_METRICS` of each node if there are several."""
    nodes = {node: _of_node([tally for tally in tallies if tally.node == node]) for node in {t.node for t in tallies}}
    metrics = rates(reduce(Tally.__add__, nodes.values()))
    if len(nodes) > 1:
        for node, tally in sorted(nodes.items()):
            of_node = rates(tally)
            metrics |= {f"node{node}/{name}": of_node[name] for name in NODE_METRICS}
    return metrics


def _of_node(tallies: Sequence[Tally]) -> Tally:
    """The sum over the ranks of a node, which share its memory."""
    memory = {name: max(getattr(tally, name) for tally in tallies) for name in _OF_MEMORY}
    return replace(reduce(Tally.__add__, tallies), node=tallies[0].node, **memory)


def seconds(value: float) -> str:
    """Seconds for people.

    Example:
        >>> seconds(4021.3), seconds(12.34), seconds(0.0342), seconds(0)
        ('4,021 s', '12.3 s', '34 ms', '0 ms')
    """
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 99.95 else f"{value:,.0f} s"
