"""What a run's caches were worth, in a few sentences at its end.

Made of the epochs' metrics alone. Time saved is an estimate: hits times the mean time that a sample took in the source,
summed over processes; it is what was not done, not what the clock shows, since workers load beside each other and
behind the training step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_stocache.node.budget import format_bytes

__all__ = ["saved_seconds", "verdict"]

_WAITS = 0.05  # below this share of an epoch, waiting for data is noise


def saved_seconds(epochs: Sequence[Mapping[str, float]]) -> float:
    """Seconds of loading that the hits have saved, over all epochs.

    Example:
        >>> saved_seconds(
        ...     [
        ...         {"hits": 0, "misses": 10, "bypasses": 0, "source_seconds": 2.0},
        ...         {"hits": 10, "misses": 0, "bypasses": 0, "source_seconds": 0.0},
        ...     ]
        ... )
        2.0
    """
    loaded = sum(epoch["misses"] + epoch["bypasses"] for epoch in epochs)
    spent = sum(epoch["source_seconds"] for epoch in epochs)
    return sum(epoch["hits"] for epoch in epochs) * spent / loaded if loaded else 0.0


def verdict(epochs: Sequence[Mapping[str, float]], samples: int) -> list[str]:
    """Sentences on what was cached, what it gave, and what to do if that was little.

    Args:
        epochs: the metrics of every training epoch, by the names of the metric keys.
        samples: samples in the training set.
    """
    last = epochs[-1]
    shares = ", ".join([f"{100 * epoch['hit_rate']:.0f}" for epoch in epochs[:8]] + ["..."] * (len(epochs) > 8))
    said = [
        f"{100 * last['coverage']:.0f} % of {samples:,} samples have a slot, {100 * last['fill_fraction']:.0f} % of "
        f"the slots are filled, {format_bytes(int(last['memory_bytes']))} in use; hit rate per epoch: {shares} %",
    ]
    if (saved := saved_seconds(epochs)) > 0:
        said.append(f"about {saved:,.1f} s of loading were saved, summed over processes")
    said.extend(_advice(epochs, last))
    return said


def _advice(epochs: Sequence[Mapping[str, float]], last: Mapping[str, float]) -> list[str]:
    first = epochs[0]
    seconds = first.get("data_wait_seconds", 0.0) + first.get("compute_seconds", 0.0)
    if len(epochs) == 1:
        return ["a cache helps from the second epoch on; this run had one"]
    if not last["coverage"]:
        return ["nothing was cached: raise the budget, or see the warnings above"]
    if seconds and first["data_wait_seconds"] < _WAITS * seconds:
        return ["training hardly waited for data even in its first epoch: a cache cannot make it faster"]
    if last["coverage"] < 1 and last["budget_bytes"]:
        whole = int(last["budget_bytes"] / last["coverage"])
        return [f"a budget of {format_bytes(whole)}, over all nodes, would hold every sample"]
    return []
