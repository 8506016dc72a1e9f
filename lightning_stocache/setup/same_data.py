"""Whether a cache holds the data of a source: what lies under a name, and what a dataset that is made anew would give.

What set-up has read is stored in the cache, unless other data lies there under the request's name (`store_or_refuse`).

The leader of each node does it, when the cache is open and before any rank serves from it. A cache without a name is
empty: what was read at set-up is stored, where it has a slot, and counted apart from the fills of epochs.

Under a name another job may have stored something. The class, the length and the shapes of a source say little: another
folder of photographs has the same. So samples are compared:

1. Where no slot is READY, what was read at set-up is stored. The look again whether that is so and the storing happen
   under a lock of their own, which each job takes before it fills anything: so a slot that is READY holds a sample of
   the first job, and of a second one that opens at the same time only if its samples are the same.
2. Else samples of READY slots are compared: those that were read at set-up, and others, read now, until there are four.
   A sample of the source is encoded and decoded as a cache does it, and `same_sample` compares what comes out. Where
   they are the same, what was read is stored in the slots that are still empty.
3. A sample that differs is read once more, under other seeds. If it differs from itself it is random, which nobody has
   looked for where `spec=` was given, and says nothing.

What is kept of a source is compared: of one that was split its deterministic part, of `store="encoded"` the files.
A source that is cached as it is (`allow_random`) has other samples in each job. There, and where no sample could be
compared, the user's `fingerprint` has to do; a warning says so where none was given.

Some loader hooks make their dataset whenever they run, and a dataset that grows is often made anew to be longer. A few
samples that are in the cache are read from the new object, in a process that is thrown away, and compared
(`is_continued`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.records import RecordCodec, SampleCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import NO_PLACE, UNREADABLE, Store
from lightning_stocache.node.named import way_out
from lightning_stocache.setup.child import Child, Told, start_method
from lightning_stocache.setup.find import Finding
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.source.samples import same_sample

__all__ = ["is_continued", "store_or_refuse"]

log = logging.getLogger(__name__)

_COMPARED = 4  # samples at least, if so many are stored
_PIECE_BYTES = 1 << 20  # of samples that are asked for at once
_TRIED = 64  # samples that are asked for, to have so many
_LOOKED_FOR = 256  # indices of a cache that goes on with another object


def store_or_refuse(
    request: CacheRequest,
    found: Finding,
    read: Callable[[Finding, Sequence[int], bool], Mapping[int, list[bytes]]],
    cache: Store,
    counters: Counters,
) -> str | None:
    """Store what was read at set-up, unless what lies there is other data.

    Args:
        request: what is to be cached.
        found: what was found of its source, with the codec of the cache.
        read: reads samples of its source, see `SourceReader`.
        cache: that was opened for the request.
        counters: of the cache; what is stored is counted as `setup_fills`.

    Returns:
        Why the cache must not be used, in two lines; None if it may be.
    """
    if request.allow_random:
        if request.name is not None and cache.filled:
            _warn_of_trust(request, "a random source that is cached as it is has other samples in each job")
        return None
    seen = list(filter(cache.has_place, found.seen))
    if request.name is None:
        step = max(_PIECE_BYTES // max(cache.codec.nbytes, 1), 1)
        for start in range(0, len(seen), step):  # this process never holds all of them
            _store(cache, read(found, seen[start : start + step], False), counters)
        return None
    contents = dict(read(found, seen, False))
    if not cache.filled:
        contents |= read(found, _with_slots(cache, contents), False)
        with cache.alone():
            if not cache.filled:
                _store(cache, contents, counters)
                return None
    compared = 0
    for index, stored in _stored(cache, list(contents)):
        if index not in contents and compared >= _COMPARED:
            break
        ours = contents.get(index) or read(found, [index], False).get(index)
        if ours is None or stored is UNREADABLE:
            continue
        sample = _decoded(cache.codec, ours)
        if not same_sample(sample, stored):
            again = read(found, [index], True).get(index)
            if again is None or not same_sample(sample, _decoded(cache.codec, again)):
                continue
            return (
                f"there is other data under this name: sample {index} of the cache {request.name!r} is another one.\n"
                f"{way_out(str(request.name), request.dir)}"
            )
        compared += 1
    if compared:
        _store(cache, contents, counters)
    else:
        _warn_of_trust(request, "no sample that lies there could be compared with this job's")
    return None


def is_continued(opened: OpenCache, dataset: Any) -> bool:
    """Whether another dataset has the samples that are in a cache; it may have more behind them.

    False also where that cannot be known: nothing is stored by now, the random part of the source was cut off, or it is
    cached as it is, though random.
    """
    cache, request, length = opened.live_cache, opened.request, len(dataset)
    if (method := start_method()) is None:
        return False
    if cache is None or type(dataset) is not type(request.source) or opened.source is not request.source:
        return False
    if request.allow_random or request.name is not None or request.domain is not None or length < cache.length:
        return False
    tried = np.unique(np.linspace(0, cache.length - 1, _LOOKED_FOR).astype(np.int64))
    stored = tried[cache.lookup(tried) != NO_PLACE]
    if not len(stored):
        return False
    indices = np.unique(stored[np.linspace(0, len(stored) - 1, _COMPARED).astype(np.int64)]).tolist()
    answer = partial(_gives_the_same, dataset, cache, indices)
    try:
        with closing(Child(answer, dataset, method, request.title)) as child:
            return cast(bool, child.ask())
    except Exception as error:  # no process could be started; or of the source, which is the user's
        log.debug("%s cannot be compared with the one before: %s", request.title, error)
        return False


def _gives_the_same(source: Any, cache: Store, indices: Sequence[int], _: None, told: Told) -> bool:
    """In a child: whether samples of a source are those of a cache."""
    stored = cache.read(cache.lookup(np.array(indices)))
    for index, sample in zip(indices, stored, strict=True):
        told(index)
        if not same_sample(source[index], sample):
            return False
    return True


def _with_slots(cache: Store, known: Mapping[int, Any]) -> list[int]:
    """Indices that have a slot, as many as are needed beside the known ones, which have one."""
    missing = _COMPARED - len(known)
    among = map(cache.handle.arc.index, range(len(cache)))
    return list(islice((index for index in among if index not in known), max(missing, 0)))


def _store(cache: Store, contents: Mapping[int, Sequence[bytes]], counters: Counters) -> None:
    for index, parts in contents.items():
        [stored] = cache.put([index], [[memoryview(bytearray(part)) for part in parts]])
        if stored:
            counters.add(setup_fills=1)


def _stored(cache: Store, known: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Indices and samples that can be read from a cache: those of the known indices, then some of all others."""
    for index in [*known, *(index for index in cache.some_stored(_TRIED) if index not in known)]:
        if (place := cache.place(index, verify=True)) != NO_PLACE:
            yield index, next(iter(cache.read(np.array([place]))))


def _decoded(codec: SampleCodec, parts: Sequence[bytes]) -> Any:
    if isinstance(codec, RecordCodec):
        return codec.decode(memoryview(b"".join(parts)))
    assert isinstance(codec, SampleSpec)
    return codec.split([np.frombuffer(bytearray(part), dtype=np.uint8) for part in parts], 1)[0]


def _warn_of_trust(request: CacheRequest, why: str) -> None:
    """Say that nobody knows whose data lies under a name, unless the user has said it."""
    if not request.fingerprint:
        log.warning(
            "the samples under the name %r are taken for those of %s without being compared: %s.\nSay what the data is "
            "by fingerprint=, so that no other dataset of this class and length is served them",
            request.name,
            request.title,
            why,
        )
