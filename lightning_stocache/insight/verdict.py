"""What a run's caches were worth, in a few sentences at its end.

Made of the epochs' metrics alone. Time saved is what the clock showed: how long an epoch took and waited for data at
first, sample for sample, and how long later. What workers load behind the training step costs no wait, but it takes
processor time from the training, so an epoch may become shorter by more than it waited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from lightning_stocache.node.budget import format_bytes

__all__ = ["began_warm", "saved_seconds", "verdict"]

_NEEDED = ("hits", "misses", "bypasses", "data_wait_seconds")
_MATTERS = 0.05  # below this share of an epoch a difference is noise


def saved_seconds(epochs: Sequence[Mapping[str, float]]) -> float | None:
    """Seconds by which an epoch waited less for data than the first one did, as a mean over the later epochs.

    None where it cannot be known: there is no later epoch, waits were not logged, or the first epoch found most of its
    samples in a cache that was kept.

    Example:
        >>> epochs = [
        ...     {"hits": 0, "misses": 10, "bypasses": 0, "data_wait_seconds": 2.0},
        ...     {"hits": 10, "misses": 0, "bypasses": 0, "data_wait_seconds": 0.5},
        ... ]
        >>> saved_seconds(epochs)
        1.5
    """
    if len(epochs) < 2 or not all(name in epoch for epoch in epochs for name in _NEEDED):
        return None
    first, later = epochs[0], epochs[1:]
    loads = first["misses"] + first["bypasses"]
    if not loads or began_warm(first):
        return None
    without = sum(map(_served, later)) * first["data_wait_seconds"] / loads
    return max(without - sum(epoch["data_wait_seconds"] for epoch in later), 0.0) / len(later)


def began_warm(first: Mapping[str, float]) -> bool:
    """Whether most samples of the first epoch came from the cache: from one with a name, kept, or filled by others."""
    return first["hits"] > first["misses"] + first["bypasses"]


def verdict(epochs: Sequence[Mapping[str, float]], samples: int, *, off: bool = False) -> list[str]:
    """Sentences on what was cached, what it gave, and what to do if that was little.

    Args:
        epochs: the metrics of every training epoch, by the names of the metric keys.
        samples: samples in the training set.
        off: whether its user has switched the cache off.
    """
    if off:
        return ["the cache is off (budget=0)"]
    first, last = epochs[0], epochs[-1]
    if "rolling/resident" in last:
        return [
            f"{last['rolling/resident']:,.0f} samples are in the rolling cache, and each that came was served "
            f"{last['rolling/times_seen']:.1f} times on average"
        ]
    shares = ", ".join([f"{100 * epoch['hit_rate']:.0f}" for epoch in epochs[:8]] + ["..."] * (len(epochs) > 8))
    memory = int(last["memory_bytes"])
    used = f", {format_bytes(memory)} in use" if memory else ""  # of a cache on a disk alone there is none
    said = [
        f"{100 * last['coverage']:.0f} % of {samples:,} samples have a slot, {100 * last['fill_fraction']:.0f} % of "
        f"the slots are filled{used}; hit rate per epoch: {shares} %",
    ]
    if last["coverage"] < first["coverage"] and _served(last) > _served(first):
        return [*said, "the dataset has grown, and what is new has no slot. For data that grows there is RollingCache"]
    if began_warm(first):
        warm = "epoch one came from the cache already: this run does not tell how long training waits without it"
        return [*said, warm]
    if len(epochs) == 1:
        return [*said, "a cache helps from the second epoch on; this run had one"]
    if not last["coverage"]:
        return [*said, "nothing was cached: raise the budget, or see the warnings above"]
    return [*said, *_gain(epochs), *_advice(epochs)]


def _gain(epochs: Sequence[Mapping[str, float]]) -> list[str]:
    """What the clock showed of a run that began with an empty cache."""
    gains, saved = [], saved_seconds(epochs)
    before, after = _seconds(epochs[0]), fmean(map(_seconds, epochs[1:]))
    if before - after > _MATTERS * before:
        gains.append(f"epoch one took {before:,.1f} s, later ones {after:,.1f} s each")
    if saved is not None and saved > _MATTERS * before:
        gains.append(
            f"epoch one waited {epochs[0]['data_wait_seconds']:,.1f} s for data, later ones {saved:,.1f} s less each"
        )
    return ["; ".join(gains)] if gains else []


def _advice(epochs: Sequence[Mapping[str, float]]) -> list[str]:
    """What to do, as far as it follows from what was measured."""
    first, last = epochs[0], epochs[-1]
    before, after = _seconds(first), fmean(map(_seconds, epochs[1:]))
    loaded = (first["misses"] + first["bypasses"]) / max(_served(first), 1)
    waited = first.get("data_wait_seconds")
    if waited is not None and before and waited < _MATTERS * before * loaded and after > (1 - _MATTERS) * before:
        return ["training hardly waited for data even in its first epoch: a cache cannot make it faster"]
    if last["coverage"] < 1 and last["budget_bytes"]:
        whole = int(last["budget_bytes"] / last["coverage"])
        return [f"a budget of {format_bytes(whole)}, over all nodes, would hold every sample"]
    return []


def _served(epoch: Mapping[str, float]) -> float:
    return epoch["hits"] + epoch["misses"] + epoch["bypasses"]


def _seconds(epoch: Mapping[str, float]) -> float:
    """How long the training's loop took in an epoch, without validation; 0 where that was not logged."""
    speed = epoch.get("samples_per_second", 0.0)
    return _served(epoch) / speed if speed else 0.0
