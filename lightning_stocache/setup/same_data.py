"""Whether a cache has the data of a source: a cache with a name, or a dataset object that replaces another.

The leader of each node calls `store_or_refuse` when a cache is open, before any rank serves from it. A cache without a
name is empty, so the samples that set-up has read are stored. A cache with a name may have samples of another job. Two
folders of photographs can have the same class, length and shapes, so samples are compared:

1. If no slot is ready, the samples that set-up has read are stored, under a lock that every job takes before its first
   fill. So a ready slot has a sample of the first job, or of a job that has compared its own samples.
2. Else at least four samples of ready slots are compared, or 32 if the state of the dataset differs from its state in
   the job that made the cache (`witness`). A sample of the source is encoded and decoded first.
3. A sample that differs is read again under other seeds. A sample that differs from itself is random, and is skipped.

The compared samples are in their cached form: the deterministic part of a split source, the files of `store="encoded"`.
If no sample can be compared (`freeze_random`), only the user's `fingerprint` protects the data. Without a fingerprint a
warning says so.

The resident samples of a rolling cache on a disk are compared in the same way, by their indices (`check_pool`).

A dataset object that replaces another, as some loader hooks make it, goes on in its cache if its state is equal and 32
samples are (`is_continued`). A dataset that has grown gets a larger cache, which takes over the samples of the smaller
one under the same condition (`take_over`): new files may come before old files, or the contents may change.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.store import NO_SLOT, UNREADABLE, Store
from lightning_stocache.node.named import manifest_of, way_out
from lightning_stocache.setup.find import Finding, SourceReader
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.source.probe import FEW, MANY
from lightning_stocache.source.samples import digest_of, same_sample
from lightning_stocache.source.witness import Witness, digest_of_state, same_state

__all__ = [
    "FingerprintError",
    "check_pool",
    "is_continued",
    "sample_digests",
    "store_or_refuse",
    "take_over",
]

log = logging.getLogger(__name__)

_TRIED = 64  # samples that are looked at until so many could be compared
_LOOKED_FOR = 256  # stored indices, from which the compared ones are taken


class FingerprintError(ValueError):
    """The cache of this name has other data."""


def store_or_refuse(opened: OpenCache, reader: SourceReader) -> bool:
    """Store the samples that set-up has read. Returns False, with a warning, if the cache has other data.

    Args:
        opened: the open cache. Its counters count `setup_fills`.
        reader: reads its source.

    Raises:
        FingerprintError: (`strict`) the cache has other data.
    """
    request, cache, counters = opened.request, opened.cache, opened.counters
    if cache is None or counters is None or not request.by_index:
        return True
    if request.freeze_random:
        if request.name is not None and cache.some_stored(1):
            _warn_of_trust(request, "a random source that is cached as it is has other samples in each job")
        return True
    contents = reader.read(list(filter(cache.has_slot, reader.found.seen)))
    if request.name is None:
        _store(cache, contents, counters)
        return True
    is_empty = not cache.some_stored(1)
    if is_empty and not reader.found.is_certain:
        return True  # epoch one stores the first samples
    if is_empty:
        others = (index for index in map(cache.handle.arc.index, range(len(cache))) if index not in contents)
        contents |= reader.read(list(islice(others, max(FEW - len(contents), 0))))
        with cache.alone():
            if not cache.some_stored(1):
                _store(cache, contents, counters)
                return True
    indices = [*contents, *(index for index in cache.some_stored(_TRIED) if index not in contents)]
    slots = ((index, cache.ready_slot(index, verify=True)) for index in indices)
    manifest = manifest_of(request.name, request.dir)
    has_equal_state = manifest is not None and manifest.state == digest_of_state(opened.state)
    least = FEW if has_equal_state else MANY
    other, equal = _compare(reader, cache, slots, contents, least)
    if other is None and equal:
        _store(cache, contents, counters)
    words = _refusal(request, other, equal)
    if words is not None:
        request.pass_through(words, FingerprintError)
    return words is None


def check_pool(request: CacheRequest, reader: SourceReader, pool: RollingStore) -> None:
    """Compare resident samples of a rolling cache on a disk with the source, by their indices.

    Samples of a stream have no indices.

    Raises:
        FingerprintError: the pool has other data. It is closed then.
    """
    if request.source is None or not pool.filled:
        return
    pairs = np.stack(pool.slots_by_index(0 if request.as_stream else request.length), axis=1)
    pairs = pairs[:: max(len(pairs) // _TRIED, 1)]
    slots = ((index, slot) for index, slot in pairs.tolist() if pool.is_sound(slot))
    words = _refusal(request, *_compare(reader, pool, slots, {}, FEW))
    if words is not None:
        pool.close()
        raise FingerprintError(words)


def _compare(
    reader: SourceReader,
    cache: Store,
    slots: Iterable[tuple[int, int]],
    contents: Mapping[int, list[bytes]],
    least: int,
) -> tuple[int | None, int]:
    """Compare samples of a cache, given by index and slot, with those of a source: all of `contents`, and `least`.

    Returns:
        The index of a sample that differs from the source's, or None; and the number of equal samples.
    """
    equal = 0
    for index, slot in slots:
        if index not in contents and equal >= least:
            break
        ours = contents.get(index) or reader.read([index]).get(index)
        if ours is None or slot == NO_SLOT:
            continue
        seen = cache.changes
        sample, stored = cache.codec.decoded(ours), next(iter(cache.read(np.array([slot]))))
        if stored is UNREADABLE or cache.changes != seen:
            continue
        if same_sample(sample, stored):
            equal += 1
            continue
        again = reader.read([index], again=True).get(index)
        if again is not None and same_sample(sample, cache.codec.decoded(again)):
            return index, equal
    return None, equal


def _refusal(request: CacheRequest, other: int | None, equal: int) -> str | None:
    """Why a cache must not be used, given the result of `_compare`. Warns if no sample could be compared."""
    if other is not None:
        return (
            f"there is other data under this name: sample {other} of the cache {request.name!r} is another one.\n"
            f"{way_out(str(request.name), request.dir)}"
        )
    if not equal:
        _warn_of_trust(request, "no stored sample could be compared with this job's")
    return None


def sample_digests(reader: SourceReader, indices: Sequence[int]) -> dict[int, str]:
    """Digests of samples, by index. Samples that are random, or cannot be read or stored, are left out."""
    codec: Any = reader.found.codec
    return {index: digest_of(codec.decoded(parts)) for index, parts in reader.read(indices).items()}


def is_continued(opened: OpenCache, dataset: Any, moved: Collection[str] = ()) -> bool:
    """Whether another dataset has the samples of a cache. It may have more samples after these.

    Args:
        opened: the open cache.
        dataset: the other dataset.
        moved: the places of the state that reads move.

    Returns False if this is unknown: nothing is stored, the transform of the source was split, or freeze_random is
    set.
    """
    cache, request, length = opened.live_cache, opened.request, len(dataset)
    if cache is None or type(dataset) is not type(request.source) or opened.source is not request.source:
        return False
    if request.freeze_random or request.name is not None or request.domain is not None or length < cache.length:
        return False
    return _has_state(opened, cache, dataset, moved) and _has_samples_of(cache, request, dataset)


def _has_state(opened: OpenCache, cache: Store, dataset: Any, moved: Collection[str]) -> bool:
    """Whether a dataset has the state of the one that a cache was opened for, without what came after its samples."""
    has_grown = len(dataset) > cache.length
    return same_state(opened.state, Witness(dataset).sums(cache.length if has_grown else None), moved)


def take_over(larger: OpenCache, before: OpenCache, moved: Collection[str] = ()) -> bool:
    """Copy the samples of the smaller cache of a dataset that has grown, unless its earlier part is different now.

    Args:
        larger: the new cache.
        before: the smaller cache.
        moved: the places of the state that reads move.

    With `freeze_random` no sample can be compared: samples are copied if the dataset is otherwise unchanged, so that
    its new cache has the codec of the old one.

    Rings of two sizes give different indices a slot, so a part would lose samples that the smaller cache has.

    Returns:
        False if the smaller cache must stay: not all samples have room in the larger one, or it has another codec.
    """
    cache, request, smaller = larger.live_cache, larger.request, before.live_cache
    if cache is None or smaller is None:
        return False
    count = smaller.filled
    if request.freeze_random:
        is_same = request.spec is not None
    else:
        is_same = _has_state(before, smaller, request.source, moved)
        is_same = is_same and _has_samples_of(smaller, request, larger.source)
    if not is_same:
        return True
    if len(cache) < cache.length or cache.granted_bytes <= smaller.granted_bytes:
        return False
    if cache.codec.title != smaller.codec.title:
        return False
    try:
        cache.take_over(smaller)
    except OSError:
        return False
    return cache.filled >= count


def _has_samples_of(cache: Store, request: CacheRequest, source: Any) -> bool:
    """Whether 32 stored samples of a cache are those of a source. The last sample shows that no other one moved."""
    tried = np.unique([*cache.some_stored(_LOOKED_FOR), cache.length - 1])
    stored = tried[cache.lookup(tried) != NO_SLOT]
    if not len(stored):
        return False
    indices = np.unique(stored[np.linspace(0, len(stored) - 1, MANY).astype(np.int64)])
    slots = list(zip(indices.tolist(), cache.lookup(indices).tolist(), strict=True))
    request = replace(request, source=source, reader=None)
    with closing(SourceReader(request, found=Finding(cache.codec))) as reader:
        other, equal = _compare(reader, cache, slots, {}, MANY)
    return other is None and equal == len(slots)


def _store(cache: Store, contents: Mapping[int, Sequence[bytes]], counters: Counters) -> None:
    for index, parts in contents.items():
        [stored] = cache.put([index], [[memoryview(bytearray(part)) for part in parts]])
        if stored:
            counters.add(setup_fills=1)


def _warn_of_trust(request: CacheRequest, why: str) -> None:
    """Warn that samples of a named cache were not compared, unless the user has given a fingerprint."""
    if not request.fingerprint:
        log.warning(
            "the samples under the name %r are taken for those of %s without being compared: %s.\nDescribe the data by "
            "fingerprint=, so that another dataset of this class and length is refused",
            request.name,
            request.title,
            why,
        )
