"""Where samples are kept: the one door of this room for whoever makes batches.

An index has a place in the store or none, which never changes; a place that is READY can be read, and stays so. Who
asks for indices gets places, reads them, and puts what was missing. A store of rows also gathers places into the memory
of a batch. How samples lie, and in whose memory, is the store's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np

from lightning_stocache.cache.codec import Lend, Memory, RowCodec, SampleCodec
from lightning_stocache.cache.placement import NO_SLOT, Arc, Integers
from lightning_stocache.cache.turns import Turns
from lightning_stocache.node.segment import SegmentHandle

__all__ = [
    "NO_PLACE",
    "UNREADABLE",
    "NoTurns",
    "ReadOnly",
    "RowSampleStore",
    "SampleStore",
    "StoreHandle",
    "divide_turns",
    "gathers",
    "lookup_near",
    "place_near",
]

UNREADABLE: Any = object()
"""Stands for a sample that was stored by another job, and is made of what this one does not admit."""

NO_PLACE = NO_SLOT
"""Stands for an index that has no place, or one that is not READY."""


class SampleStore(Protocol):
    """Samples by their index, filled lazily, read by many processes.

    Readers get copies, never views. Indices may be any number: one from the end of the dataset (-1 and so on) is that
    of the same sample, and one outside of it has no place.
    """

    @property
    def codec(self) -> SampleCodec:
        """What samples look like."""

    @property
    def length(self) -> int:
        """Number of samples in the dataset."""

    @property
    def turns(self) -> Turns | NoTurns:
        """Who loads what, where several jobs fill the store at the same time."""

    def __len__(self) -> int:
        """Number of places."""

    def has_place(self, index: int) -> bool:
        """Whether an index has a place, READY or not."""

    def has_room(self, sample: Any) -> bool:
        """Whether a sample whose index has a place may find room; False spares the work to encode it."""

    def place(self, index: int) -> int:
        """Where the sample of an index can be read now, or NO_PLACE."""

    def lookup(self, indices: Integers) -> Integers:
        """The places of those indices (int64 `[samples]`) that can be read now, NO_PLACE for the others."""

    def read(self, places: Integers, lend: Lend | None = None) -> Iterable[Any]:
        """Copies of the samples of READY places (int64 `[samples]`), in memory that is lent, or new; or UNREADABLE."""

    def stored_bytes(self, places: Integers) -> int:
        """Bytes of the samples of READY places (int64 `[samples]`)."""

    def recall(self, indices: Sequence[int]) -> bool:
        """Bring nearer what lies under those indices and is not READY, but need not be loaded; whether it has tried."""

    def fill(self, index: int, sample: Any) -> bool:
        """Check a sample and store it, unless its index has no place or somebody else fills it; whether it was stored.

        Raises:
            SampleMismatchError: it is not of the codec; also where it has no place.
        """

    def put_many(self, indices: Sequence[int], samples: Sequence[Sequence[memoryview]]) -> Iterator[bool | None]:
        """Store encoded samples, a few megabytes, given their bytes in parts, as the iterator comes to them.

        It gives whether each was stored; None where its index has no place, or where there is no room for it.
        """

    @property
    def filled(self) -> int:
        """Number of places that are READY."""

    @property
    def fill_fraction(self) -> float:
        """How much of what there is for samples is filled: places, or bytes where samples differ in size."""

    @property
    def capacity(self) -> int:
        """Number of samples for which there is room, as far as that is known."""

    @property
    def full(self) -> bool:
        """Whether every index of the dataset is READY."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that the samples take on this node right now, as budgets count."""

    @property
    def promised_bytes(self) -> int:
        """Bytes that were granted and are still to be taken."""

    @property
    def closed(self) -> bool:
        """Whether this process has given the store up."""

    def close(self) -> None:
        """Give the store up in this process."""


class RowSampleStore(SampleStore, Protocol):
    """A store of samples that all have the same fields."""

    @property
    def codec(self) -> RowCodec:
        """What samples look like."""

    def gather(self, places: Integers, into: Memory) -> None:
        """Copy READY places (int64 `[samples]`) into the memory of a batch, uint8 `codec.sizes(samples)`."""


class NoTurns:
    """The turns of a store that takes nothing from who misses a sample: there are none."""

    are_taken = False

    def take(self, indices: Iterable[int]) -> list[int]:
        """All of them."""
        return list(indices)

    def give_up(self, indices: Iterable[int]) -> None:
        """Nothing was taken."""

    def wait(self, indices: Sequence[int]) -> bool:
        """Nobody is waited for."""
        return False


class ReadOnly:
    """The part of a store that takes nothing from who misses a sample."""

    turns = NoTurns()

    def has_room(self, sample: Any) -> bool:
        """Never."""
        return False

    def recall(self, indices: Sequence[int]) -> bool:
        """There is nothing further away."""
        return False

    def fill(self, index: int, sample: Any) -> bool:
        """Store nothing."""
        return False

    def put_many(self, indices: Sequence[int], samples: Sequence[Sequence[memoryview]]) -> Iterator[bool | None]:
        """Store nothing."""
        return iter([None] * len(indices))


def gathers(store: SampleStore) -> TypeGuard[RowSampleStore]:
    """Whether a store can gather the samples of a batch, one array per field."""
    return hasattr(store, "gather")


def place_near(store: SampleStore, index: int) -> int:
    """Where an index can be read when what lies further away has been brought near, or NO_PLACE."""
    place = store.place(index)
    return store.place(index) if place == NO_PLACE and store.recall([index]) else place


def lookup_near(store: SampleStore, indices: Sequence[int]) -> tuple[Integers, Integers]:
    """Where those indices can be read when what lies further away has been brought near.

    Returns:
        Their places (int64 `[samples]`), NO_PLACE for what has to be loaded; and which of them have one.
    """
    wanted = np.array(indices)
    places = store.lookup(wanted)
    missing = wanted[places == NO_PLACE]
    if len(missing) and store.recall(missing.tolist()):
        places = store.lookup(wanted)
    return places, np.flatnonzero(places != NO_PLACE)


def divide_turns(store: SampleStore, indices: Sequence[int]) -> tuple[list[int], list[int]]:
    """What this process is to load now, and what another one is loading, or has stored since it was looked up."""
    if not store.turns.are_taken:
        return list(indices), []
    mine = store.turns.take(indices)
    try:
        stored = {mine[number] for number in lookup_near(store, mine)[1].tolist()} if mine else set()
    except BaseException:
        store.turns.give_up(mine)
        raise
    store.turns.give_up(stored)
    here = set(mine) - stored
    return [index for index in indices if index in here], [index for index in indices if index not in here]


@dataclass(frozen=True)
class StoreHandle:
    """How another process opens a store: where its segment is, and what lies there."""

    segment: SegmentHandle
    codec: SampleCodec
    arc: Arc
    trusted: SegmentHandle | None = None
    """On a disk: what of it this job may read."""
