"""What the caches of a run gave, in a few sentences at its end: what was measured, or what to do next.

Seconds are those of the first epoch and the mean of later epochs. There is no factor: the first epoch also stores, so
only a run with budget=0, or `plan`, is a measure of training without a cache. Advice follows from what later epochs
still wait for: the start of workers, samples without a slot, or the work after the cache.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lightning_stocache.growing.rolling_cache import RollingCache
from lightning_stocache.insight.metrics import seconds
from lightning_stocache.insight.tallies import coverage, samples_of
from lightning_stocache.loading.dataset import CachedDataset, cached_in, cached_source
from lightning_stocache.loading.loader_tree import cached_in_leaves, leaves_in
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.named import clean_command
from lightning_stocache.setup.allocation import largest_grant
from lightning_stocache.source.encoded import EncodedSource, access_to
from lightning_stocache.source.transform_split import Tail

__all__ = ["Caches", "epoch_line", "verdict"]

Epoch = Mapping[str, float]

_MATTERS = 0.05  # below this share of an epoch a difference is noise
_NOISE = 0.1  # seconds of waiting in an epoch, of which nothing is said


@dataclass(frozen=True)
class Caches:
    """Facts about the caches of a training that its metrics do not contain."""

    samples: int  # that training draws
    stored: int | None = None  # samples of these that lie in the cache; None if other nodes have a part of them
    disk_bytes: int = 0
    setup_fills: int = 0  # samples that set-up has stored
    is_off: bool = False  # by the user
    way_out: str = ""  # what would cache the samples that have no slot
    starts_workers: bool = False  # each epoch starts new workers
    has_workers: bool = False
    after_cache: str = ""  # the work on each sample after the cache
    pool_reads: tuple[int, int] | None = None  # samples that a rolling cache has loaded, and its source has

    @classmethod
    def behind(cls, loaders: Any, others: Any = None) -> Caches:
        """The caches behind training loaders; `others` are loaders whose caches may share their budget."""
        leaves = list(leaves_in(loaders))
        datasets = cached_in_leaves(loaders)
        stores = [dataset.cache for dataset in datasets if dataset.cache is not None]
        of_training = [dataset for dataset in datasets if isinstance(dataset, CachedDataset)]
        of_call = [dataset for dataset in cached_in_leaves([loaders, others]) if isinstance(dataset, CachedDataset)]
        sharing = {id(dataset): _sharing_budget(dataset, of_call) for dataset in of_training}
        # A set also has a budget of 0 if other sets have taken all of the shared budget.
        budgets = [cached_source(each).opened.request.budget for sets in sharing.values() for each in sets]
        short = [dataset for dataset in of_training if dataset.cache is not None and coverage([dataset]) < 1]
        has_one_node = not of_training or len(of_training[0].group.nodes) == 1
        with_workers = [leaf for leaf in leaves if getattr(leaf, "num_workers", 0)]
        return cls(
            samples=sum(map(samples_of, datasets)),
            stored=sum(store.filled for store in stores) if has_one_node else None,
            disk_bytes=sum(store.disk_bytes for store in stores),
            setup_fills=sum(each.counters.totals().setup_fills for each in datasets if each.counters is not None),
            is_off=bool(budgets) and all(budget.off for budget in budgets),
            way_out=_way_out(short[0], sharing[id(short[0])]) if short else "",
            starts_workers=any(not leaf.persistent_workers for leaf in with_workers),
            has_workers=bool(with_workers),
            after_cache=next(filter(None, map(_after_cache, leaves)), ""),
            pool_reads=_pool_reads(leaves),
        )


def _sharing_budget(dataset: CachedDataset, of_call: Sequence[CachedDataset]) -> list[CachedDataset]:
    """The datasets of a Trainer's call that share the budget of a dataset, which comes first."""

    def shares(other: CachedDataset) -> bool:
        requests = [cached_source(each).opened.request for each in (dataset, other)]
        return requests[0].pot == requests[1].pot and all(request.reader is not None for request in requests)

    return [dataset, *(other for other in of_call if other is not dataset and shares(other))]


def _pool_reads(leaves: Sequence[Any]) -> tuple[int, int] | None:
    """The samples that the rolling cache of a training has loaded, and the number in its source, if it has a length."""
    pools = [leaf.dataset for leaf in leaves if isinstance(getattr(leaf, "dataset", None), RollingCache)]
    if len(pools) != 1 or not hasattr(pools[0].source, "__len__"):
        return None
    return pools[0].stats().appended, len(pools[0].source)


def _after_cache(leaf: Any) -> str:
    """The names of what runs on each sample that a loader reads from its cache."""
    dataset = cached_in(getattr(leaf, "dataset", None))
    if dataset is None:
        return ""
    cached = cached_source(dataset)
    decoding = "decoding of files" if isinstance(cached.opened.source, EncodedSource) else ""
    tail, transform = cached.opened.tail, cached.transform
    split = str(tail) if isinstance(tail, Tail) else ""
    own = "" if transform is None else getattr(transform, "__name__", type(transform).__name__)
    return ", ".join(filter(None, (decoding, split, own)))


# ---- samples without a slot ----


def _way_out(dataset: CachedDataset, sharing: Sequence[CachedDataset]) -> str:
    """How to cache all samples of a set: by the budget that holds them, or with less memory.

    Args:
        dataset: the set.
        sharing: the set, and the others that draw on its budget.
    """
    sets = [each for each in sharing if each.cache is not None]
    needed = _needed_bytes(dataset, sets)
    if needed > _free_bytes(dataset) + sum(map(_used_bytes, sets)):
        return _with_less_memory(dataset)
    request = cached_source(dataset).opened.request
    empty_stages = sorted({_stage(each) for each in sharing if cached_source(each).opened.request.budget.off})
    stage = f" for {request.pot!r}" if request.reader is not None and request.pot else ""
    where = " on each node" if len(dataset.group.nodes) > 1 else ""
    with_others = ", with the other sets that share it" if len(sets) > 1 else ""
    sentence = f"a budget of {_rounded_up(needed)}{stage}{where} would hold every sample{with_others}"
    if empty_stages:  # they got no memory, so their sizes are unknown
        budgets = f"budget={{{_stage(dataset)!r}: {_rounded_up(needed)!r}}}"
        others = " and ".join(empty_stages)
        sentence = f"{budgets} would hold every sample{where}: {others} then has a budget of its own"
    if request.name is None:
        return sentence
    names = " ".join(cached_source(each).opened.request.name or "" for each in sets)
    return f"{sentence}. A cache with a name keeps its size: first {clean_command(names, request.dir)}"


def _stage(dataset: CachedDataset) -> str:
    """The stage of the loader that reads a set of a Trainer's call."""
    reader = cached_source(dataset).opened.request.reader
    return "" if reader is None else reader.stage


def _needed_bytes(dataset: CachedDataset, sets: Sequence[CachedDataset]) -> int:
    """The budget of a node that holds all samples of some sets, of which one is the training set."""
    whole = sum(map(_whole_bytes, sets))
    others = whole - _whole_bytes(dataset)
    # A validation set that opens first takes at most half.
    return math.ceil(max(whole, 2 * others) / len(dataset.group.nodes))


def _whole_bytes(dataset: CachedDataset) -> int:
    """The bytes that hold all samples of a set, estimated from the stored records if these are larger than expected."""
    cache = dataset.cache
    assert cache is not None
    stored = _used_bytes(dataset) / max(cache.filled, 1)
    return math.ceil(samples_of(dataset) * max(int(cache.codec.most_slot_bytes), stored))


def _used_bytes(dataset: CachedDataset) -> int:
    cache = dataset.cache
    return 0 if cache is None else cache.memory_bytes + cache.disk_bytes


def _free_bytes(dataset: CachedDataset) -> int:
    """The bytes that are free where the cache of a set lies."""
    request = cached_source(dataset).opened.request
    cache = dataset.cache
    if request.dir is None:
        return largest_grant(None if cache is None else cache.codec, request.reader, len(dataset.group.members))[0]
    with suppress(OSError):  # the directory was removed
        return int(0.99 * shutil.disk_usage(request.dir).free)
    return 0


def _with_less_memory(dataset: CachedDataset) -> str:
    opened = cached_source(dataset).opened
    has_files = not isinstance(opened.source, EncodedSource) and access_to(opened.request.source) is not None
    ways = []
    if opened.request.dir is None:
        ways.append("dir= puts the cache on a disk")
    if has_files:
        ways.append('store="encoded" keeps files, which are smaller')
    limit = "memory" if opened.request.dir is None else "the disk"
    return f"{limit} is the limit: {', '.join(ways) or 'nothing more fits'}"


def _rounded_up(nbytes: int) -> str:
    """A number of bytes as text that is not below the number."""
    unit = 2 ** (10 * max((nbytes.bit_length() - 1) // 10, 1))
    return format_bytes(math.ceil(10 * nbytes / unit) * unit // 10)


# ---- the lines ----


def epoch_line(number: int, epoch: Epoch, *, is_stream: bool = False) -> str:
    """The line about an epoch that has ended. Nobody knows how much of a stream is stored before it has ended."""
    if not epoch["coverage"] and not epoch["hits"]:
        return f"epoch {number}: nothing cached, {_took(epoch)}"
    filled = "" if is_stream else f", {100 * epoch['fill_fraction']:.0f} % filled"
    return f"epoch {number}: {100 * epoch['hit_rate']:.0f} % from the cache{filled}, {_took(epoch)}"


def verdict(epochs: Sequence[Epoch], caches: Caches) -> list[str]:
    """The lines at the end of a training: what is cached, the seconds of the epochs, and advice if epochs still wait.

    Args:
        epochs: the metrics of every training epoch, by the names in the metric keys; with `start_seconds`, for which
            the training waited before the epoch's first batch.
        caches: the caches.
    """
    first, last = epochs[0], epochs[-1]
    if caches.is_off and not any(epoch["coverage"] for epoch in epochs):
        return [f"the cache is off (budget=0): {_times(epochs)}"]
    if "rolling/resident" in last:
        return _of_pool(last, caches)
    if not last["coverage"]:
        was_cached = any(epoch["coverage"] for epoch in epochs)
        return [f"nothing {'is cached any more' if was_cached else 'was cached'}: the warnings above say why"]
    sentences = [_cached(last, caches), _times(epochs)]
    if last["coverage"] < first["coverage"] and _served(last) > _served(first):
        return [*sentences, "the dataset has grown, and what is new has no slot: for data that grows: RollingCache"]
    # The first epoch also hits what set-up has stored, and samples that its sampler draws several times.
    ready_before = first["fill_fraction"] * first["coverage"] * caches.samples
    ready_before -= first.get("fills", 0) + caches.setup_fills
    if first["hits"] > first["misses"] + first["bypasses"] and ready_before >= 1:
        return [*sentences, "the first epoch came from the cache already: compare with a run with budget=0"]
    if len(epochs) == 1:
        return [*sentences, "a cache helps from the second epoch on; this run had one"]
    advice = _advice(first, _mean(epochs[1:]), caches)
    return [*sentences, advice] if advice else sentences


def _advice(first: Epoch, later: Epoch, caches: Caches) -> str:
    """What to do next, or why nothing was gained; empty if all that could be gained was."""
    waits = later.get("data_wait_seconds", math.nan)
    still_waits = waits > max(_MATTERS * later.get("epoch_seconds", 0.0), _NOISE)
    start = later.get("start_seconds", 0.0)
    if still_waits and caches.starts_workers and start > waits / 2:
        return (
            f"later epochs wait {seconds(waits)}, of which {seconds(start)} for their first batch: "
            "persistent_workers=True keeps the workers"
        )
    if caches.way_out and (still_waits or math.isnan(waits)):
        return caches.way_out
    hits_wait = still_waits and later["hit_rate"] > 1 - _MATTERS
    if hits_wait and caches.after_cache:
        way_out = "v2 on uint8 tensors is faster, or augment on the device"
        if caches.after_cache.startswith("decoding"):
            way_out = 'store="decoded" decodes once, and takes more memory'
        return f"later epochs wait for what runs after the cache ({caches.after_cache}): {way_out}"
    if _has_gained(first, later):
        lighter = first.get("compute_seconds", 0.0) - later.get("compute_seconds", 0.0)
        if caches.has_workers and lighter > _MATTERS * first.get("epoch_seconds", 0.0):
            return f"later steps took {seconds(lighter)} less, too: no loading beside them, no warm-up"
        return ""
    if _hardly_waited(first):
        return "training hardly waited for data in its first epoch: a cache gains little here"
    return "nothing was gained: batches from the cache take as long as loaded ones" if hits_wait else ""


def _has_gained(first: Epoch, later: Epoch) -> bool:
    """Whether later epochs were shorter, or waited less. Waiting may be unknown."""
    before, after = first.get("epoch_seconds", 0.0), later.get("epoch_seconds", 0.0)
    waited, waits = (epoch.get("data_wait_seconds", 0.0) for epoch in (first, later))
    return max(before - after, waited - waits) > _MATTERS * before


def _hardly_waited(epoch: Epoch) -> bool:
    """Whether the misses of an epoch cost little."""
    waited = epoch.get("data_wait_seconds", math.inf)
    return waited < _MATTERS * epoch.get("epoch_seconds", 0.0) * (1 - epoch["hit_rate"])


def _of_pool(last: Epoch, caches: Caches) -> list[str]:
    sentences = [
        f"{last['rolling/resident']:,.0f} samples are in the rolling cache; training read each loaded sample "
        f"{last['rolling/times_seen']:.1f} times on average"
    ]
    if caches.pool_reads is not None and caches.pool_reads[0] < caches.pool_reads[1]:
        read, there = caches.pool_reads
        sentences.append(f"only {read:,} of the source's {there:,} samples came in: train longer, or max_steps=")
    return sentences


def _cached(last: Epoch, caches: Caches) -> str:
    """The samples that lie in the cache, and their bytes."""
    room = round(last["coverage"] * caches.samples)
    stored = round(room * last["fill_fraction"]) if caches.stored is None else caches.stored
    on_disk = f"{format_bytes(caches.disk_bytes)} on the disk" if caches.disk_bytes else ""
    size = on_disk or format_bytes(int(last["memory_bytes"]))
    if stored >= caches.samples:
        return f"all {caches.samples:,} samples are cached ({size})"
    rest = f"; there is room for {room:,}" if stored < (1 - _MATTERS) * room else ""
    return f"{stored:,} of {caches.samples:,} samples are cached ({size}){rest}"


def _times(epochs: Sequence[Epoch]) -> str:
    """The seconds of the first epoch and of later ones, as they were measured."""
    later = f", later {_took(_mean(epochs[1:]))}" if len(epochs) > 1 else ""
    return f"first epoch {_took(epochs[0])}{later}"


def _took(epoch: Epoch) -> str:
    waiting = f" ({seconds(epoch['data_wait_seconds'])} waiting)" if "data_wait_seconds" in epoch else ""
    return f"{seconds(epoch.get('epoch_seconds', 0.0))}{waiting}"


def _mean(epochs: Sequence[Epoch]) -> dict[str, float]:
    """The mean of each metric that all epochs have."""
    return {name: fmean(epoch[name] for epoch in epochs) for name in epochs[0] if all(name in e for e in epochs)}


def _served(epoch: Epoch) -> float:
    return epoch["hits"] + epoch["misses"] + epoch["bypasses"]
