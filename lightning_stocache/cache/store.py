"""Where samples are kept: the one door of this room for whoever makes batches.

An index has a place in the store or none, which never changes; a place that is READY can be read, and stays so. Who
asks for indices gets places, gathers them into memory of his own, and puts what was missing. How samples lie, and in
whose memory, is the store's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from lightning_stocache.cache.codec import Memory, SampleCodec
from lightning_stocache.cache.placement import NO_SLOT, Integers

__all__ = ["NO_PLACE", "SampleStore"]

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

    def __len__(self) -> int:
        """Number of places."""

    def has_place(self, index: int) -> bool:
        """Whether an index has a place, READY or not."""

    def lookup(self, indices: Integers) -> Integers:
        """The places of those indices (int64 `[samples]`) that can be read now, NO_PLACE for the others."""

    def get(self, index: int) -> Any | None:
        """A copy of the sample of an index, or None if it cannot be read now."""

    def gather(self, places: Integers, into: Memory) -> None:
        """Copy READY places (int64 `[samples]`) into the memory of a batch, uint8 `codec.sizes(samples)`."""

    def fill(self, index: int, sample: Any) -> bool:
        """Check a sample and store it, unless its index has no place or somebody else fills it; whether it was stored.

        Raises:
            SampleMismatchError: it is not of the codec; also where it has no place.
        """

    def put_many(self, indices: Sequence[int], samples: Sequence[Sequence[memoryview]]) -> Iterator[bool | None]:
        """Store encoded samples, a few megabytes, by their bytes per field, as the iterator comes to them.

        It gives whether each was stored, None where its index has no place.
        """

    @property
    def filled(self) -> int:
        """Number of places that are READY."""

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
