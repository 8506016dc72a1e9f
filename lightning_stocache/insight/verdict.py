"""The gain of a run's caches, in a few sentences at its end, from the metrics of its epochs alone.

Loading that workers hide behind the training step causes no wait, but it takes processor time from the training. So an
epoch may become shorter by more than it waited, and the sentences give both numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from lightning_stocache.node.budget import format_bytes

__all__ = ["verdict"]

Epoch = Mapping[str, float]

_MATTERS = 0.05  # below this share of an epoch a difference is noise


def verdict(epochs: Sequence[Epoch], samples: int, *, off: bool = False, setup_fills: int = 0) -> list[str]:
    """Sentences on the coverage, on the gain, and on what to do if the gain was small.

    Args:
        epochs: the metrics of every training epoch, by the names in the metric keys.
        samples: samples in the training set.
        off: the user has switched the cache off.
        setup_fills: samples of the training set that set-up has stored.
    """
    if off:
        return ["the cache is off (budget=0)"]
    first, last = epochs[0], epochs[-1]
    if "rolling/resident" in last:
        return [
            f"{last['rolling/resident']:,.0f} samples are in the rolling cache; training read each loaded sample "
            f"{last['rolling/times_seen']:.1f} times on average"
        ]
    served = ", ".join([f"{100 * epoch['hit_rate']:.0f}" for epoch in epochs[:8]] + ["..."] * (len(epochs) > 8))
    if not last["coverage"]:
        if any(epoch["coverage"] for epoch in epochs):
            return [f"nothing is cached any more: the warnings above say why; hit rate per epoch: {served} %"]
        return ["nothing was cached: the warnings above say why"]
    memory, filled = int(last["memory_bytes"]), 100 * last["fill_fraction"]
    used = f", {format_bytes(memory)} in use" if memory else ""  # a cache on a disk uses no memory
    cached = "are cached" if filled > 99.5 else f"have a slot, {filled:.0f} % of the slots are filled"
    sentences = [
        f"{100 * last['coverage']:.0f} % of {samples:,} samples {cached}{used}; hit rate per epoch: {served} %"
    ]
    if last["coverage"] < first["coverage"] and _served(last) > _served(first):
        return [
            *sentences,
            "the dataset has grown, and what is new has no slot. For data that grows there is RollingCache",
        ]
    # Epoch one also hits samples that set-up has stored, and samples that its sampler draws several times.
    ready_before = first["fill_fraction"] * first["coverage"] * samples - first.get("fills", 0) - setup_fills
    mostly_hit = first["hits"] > first["misses"] + first["bypasses"]
    if mostly_hit and ready_before >= 1:  # a named or kept cache, or one that other jobs have filled
        warm = "epoch one came from the cache already: this run does not tell how long training waits without it"
        return [*sentences, warm]
    if len(epochs) == 1:
        return [*sentences, "a cache helps from the second epoch on; this run had one"]
    return [*sentences, *_gain(epochs)]


def _gain(epochs: Sequence[Epoch]) -> list[str]:
    """The seconds of epoch one and of later epochs, and advice, for a run that began with an empty cache."""
    first, last, sentences = epochs[0], epochs[-1], []
    before, after = _seconds(first), fmean(map(_seconds, epochs[1:]))
    waits = [epoch["data_wait_seconds"] for epoch in epochs if "data_wait_seconds" in epoch]
    known = len(waits) == len(epochs)
    shorter = before - after > _MATTERS * before
    if known and waits[0] - fmean(waits[1:]) > _MATTERS * before:
        sentences.append(
            f"epoch one took {before:,.1f} s and waited {waits[0]:,.1f} s for data; later epochs took {after:,.1f} s "
            f"and waited {fmean(waits[1:]):,.1f} s each"
        )
    elif shorter:
        sentences.append(f"epoch one took {before:,.1f} s, later epochs {after:,.1f} s each")
    loaded = (first["misses"] + first["bypasses"]) / max(_served(first), 1)
    if known and not shorter and waits[0] < _MATTERS * before * loaded:
        sentences.append("training hardly waited for data even in its first epoch: a cache cannot make it faster")
    elif last["coverage"] < 1 and last["budget_bytes"]:
        whole = int(last["budget_bytes"] / last["coverage"])
        together = ", over all nodes," if "node0/hit_rate" in last else ""
        sentences.append(f"a budget of {format_bytes(whole)}{together} would hold every sample")
    return sentences


def _served(epoch: Epoch) -> float:
    return epoch["hits"] + epoch["misses"] + epoch["bypasses"]


def _seconds(epoch: Epoch) -> float:
    """Seconds of an epoch's training; 0 if they were not logged."""
    return epoch.get("epoch_seconds", 0.0)
