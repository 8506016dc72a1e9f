"""Caches in memory that stay in this process when a Trainer call ends, for the next one that asks for the same.

The trials of a sweep that run in one process make all anew: datasets, DataModule, callbacks. What a trial has cached is
handed to the next one under its place, the n-th dataset of a stage, if what is asked for is the same: the budget and
whatever else decides what lies in a cache, what its samples look like, and the source up to its first random step
(`source.identity`). If anything differs, the cache goes, before the free memory is looked at, and the new one takes its
place: so there is never more than one for each place. Nothing of it has a name, so it ends with the process.

Only the leader of a node keeps anything; the other ranks attach, as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.cache.segment_store import SegmentStore
from lightning_stocache.cache.stores import AnyStore, attach_store
from lightning_stocache.setup.look import Finding
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.source.identity import UnknownSourceError, source_digest

__all__ = ["ProcessCaches", "close_kept"]

log = logging.getLogger(__name__)

_kept: dict[str, tuple[tuple[str, ...], SegmentStore[Any]]] = {}


class ProcessCaches:
    """The caches that are kept for some requests.

    Args:
        requests: what is to be cached.
        findings: what has been seen of the source of each.
        backend: where segments lie.
    """

    def __init__(self, requests: Sequence[CacheRequest], findings: Sequence[Finding], backend: str) -> None:
        self._identities: dict[int, tuple[str, tuple[str, ...]]] = {}
        for number, (request, found) in enumerate(zip(requests, findings, strict=True)):
            if request.kept is None or found.codec is None:
                continue
            try:
                self._identities[number] = request.kept, _identity(request, found, found.codec, backend)
            except UnknownSourceError as error:
                log.warning(
                    "the cache of %s is not kept for the next trial, which could not know it again: %s.\nGive it a "
                    "name (name=), under which it stays in memory until it is removed",
                    request.title,
                    error,
                )

    def join(self) -> dict[int, SegmentStore[Any]]:
        """The caches that are there, by the number of their request; others in their places are closed."""
        joined: dict[int, SegmentStore[Any]] = {}
        for number, (place, identity) in self._identities.items():
            there = _kept.get(place)
            if there is None:
                continue
            if there[0] == identity and not there[1].closed:
                joined[number] = _attached(there[1])
            else:
                close_kept([place])
        return joined

    def keep(self, caches: Iterable[AnyStore | None]) -> None:
        """Keep those that are not kept yet, of these, one for each request."""
        for number, cache in enumerate(caches):
            if number in self._identities and isinstance(cache, SegmentStore):
                place, identity = self._identities[number]
                if place not in _kept:
                    _kept[place] = identity, _attached(cache)


def close_kept(places: Iterable[str] | None = None) -> None:
    """Close what is kept in some places, or in all: the memory is free when nobody reads it any more."""
    for place in list(_kept if places is None else places):
        if place in _kept:
            _kept.pop(place)[1].close()


def _attached(cache: SegmentStore[Any]) -> SegmentStore[Any]:
    """One more use of a cache that this process has open."""
    store = attach_store(cache.handle)
    assert isinstance(store, SegmentStore)
    return store


def _identity(request: CacheRequest, found: Finding, codec: SampleCodec, backend: str) -> tuple[str, ...]:
    """What must be the same.

    Raises:
        UnknownSourceError: the source cannot be known again.
    """
    source = request.source if found.cut is None else found.cut.apply(request.source)[0]
    words = (request.budget, request.allow_random, request.fingerprint, request.layout, request.store, backend)
    return (codec.title, source_digest(source), *map(str, words))
