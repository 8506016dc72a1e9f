"""One cache per node, which all its processes fill and read.

A sample that was loaded is checked against the spec and stored by `Filling`. A reader looks at the slot's state,
fences, and copies the bytes out; nobody is ever handed a view.

The interface of the library that the idea comes from, stocaching (https://github.com/Charl-AI/stochastic-caching), is
kept: constructor, `get_slot`, `set_slot`, `[]`, `len`, `array`, `aux_array`, `clear`. A cache made by that
constructor holds the first indices of the dataset; one made by `create` holds the arc that it is given.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from lightning_stocache.cache.filling import Filling, Slots
from lightning_stocache.cache.placement import NO_SLOT, Arc
from lightning_stocache.cache.slots import READY, FieldSlots
from lightning_stocache.cache.spec import SampleSpec, contents_of
from lightning_stocache.node.fence import fence
from lightning_stocache.node.files import HEADER_BYTES, Backend
from lightning_stocache.node.manifest import Geometry, Manifest
from lightning_stocache.node.segment import Segment

__all__ = ["SharedCache"]

_OUT_OF_BOUNDS = 2


class SharedCache:
    """A cache of samples in memory that the processes of a node share, lazily filled and never evicted.

    Args:
        size_limit_gib: memory limit in GiB (a fraction will do), for the samples and one state byte per index.
        dataset_len: number of samples in the dataset.
        data_dims: shape of one sample, without the batch dimension; a number for a vector.
        dtype: dtype of the samples.

    Raises:
        ValueError: a limit or size below zero, or a dataset without samples; later, the cache is closed.
        TypeError: an argument is of another type.
        OSError: the system has no memory for the states of the slots.

    Example:
        >>> cache = SharedCache(size_limit_gib=1, dataset_len=10, data_dims=(3, 8, 8))
        >>> cache.get_slot(4) is None
        True
        >>> cache.set_slot(4, torch.full((3, 8, 8), 7, dtype=torch.uint8))
        >>> int(cache.get_slot(4).max())
        7
        >>> cache.close()
    """

    def __init__(
        self, size_limit_gib: float, dataset_len: int, data_dims: Sequence[int] | int, dtype: torch.dtype = torch.uint8
    ) -> None:
        if not isinstance(size_limit_gib, int | float) or not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"size_limit_gib and dtype must be a number and a torch.dtype, got {size_limit_gib!r}, {dtype!r}"
            )
        data_dims = (data_dims,) if isinstance(data_dims, int) else tuple(data_dims)
        if any(size < 0 for size in data_dims):
            raise ValueError(f"data_dims must hold sizes of zero or more, got {data_dims}")
        if not 0 <= size_limit_gib < float("inf"):
            raise ValueError(f"size_limit_gib must be a number of GiB, zero or more, got {size_limit_gib}")
        if dataset_len < 1:
            raise ValueError(f"dataset_len must be at least 1, got {dataset_len}")
        spec = SampleSpec.infer(torch.empty(data_dims, dtype=dtype))
        limit = int(size_limit_gib * 1024**3) - dataset_len
        slots = min(max(limit, 0) // max(spec.nbytes, 1), dataset_len)
        arc = Arc(dataset_len, slots)
        self._assemble(_new_segment(spec, arc), spec, arc)

    @classmethod
    def create(
        cls, spec: SampleSpec, arc: Arc, backend: Backend | None = None, whose: Mapping[str, Any] | None = None
    ) -> SharedCache:
        """Make an empty cache for any sample and any arc of the ring.

        Args:
            spec: what a sample looks like.
            arc: which indices have a slot, and where.
            backend: kind of segment, see `lightning_stocache.node.segment`.
            whose: what the segment says about itself besides the arc, see `lightning_stocache.node.manifest`.
        """
        return cls.over(_new_segment(spec, arc, backend, whose), spec, arc)

    @classmethod
    def over(cls, segment: Segment, spec: SampleSpec, arc: Arc) -> SharedCache:
        """Open the cache that lies in a segment already."""
        cache = cls.__new__(cls)
        cache._assemble(segment, spec, arc)
        return cache

    def _assemble(self, segment: Segment, spec: SampleSpec, arc: Arc) -> None:
        self.segment, self.spec, self.arc = segment, spec, arc
        self.slots: Slots = FieldSlots(segment, spec.row_bytes, arc.slots)
        self._filling = Filling(segment, self.slots)
        self._given_up = False

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedCache.over, (self.segment, self.spec, self.arc)

    # ---- one sample ----

    def get(self, index: int) -> Any | None:
        """A copy of the sample of an index, or None when its slot is empty or it has none.

        The index lies in `[0, dataset_len)`.
        """
        slot = self.arc.slot(index)
        if slot == NO_SLOT or self.slots.state_bytes[slot] != READY:
            return None
        fence()
        return self.spec.unflatten(self.slots.read(slot))

    def is_ready(self, index: int) -> bool:
        """Whether an index in `[0, dataset_len)` can be read now; in another process, after a message or a fence."""
        slot = self.arc.slot(index)
        return slot != NO_SLOT and self.slots.state_bytes[slot] == READY

    def fill(self, index: int, sample: Any) -> bool:
        """Store a sample into the slot of an index, if it has one that is empty and nobody else is filling it.

        Returns:
            Whether this call stored it.

        Raises:
            SampleMismatchError: the sample differs from the spec; checked also where there is no slot.
        """
        leaves, slot = self.spec.leaves(sample, index), self.arc.slot(index)
        return slot != NO_SLOT and self._filling.fill(slot, contents_of(leaves))

    def fill_from(self, index: int, contents: Sequence[memoryview]) -> bool:
        """The same for a sample that was checked already, from its bytes, `[nbytes]` per field."""
        slot = self.arc.slot(index)
        return slot != NO_SLOT and self._filling.fill(slot, contents)

    # ---- many samples ----

    def ready_slots(self, indices: torch.Tensor) -> torch.Tensor:
        """The slots of those indices (int64 `[samples]`) that can be read now, NO_SLOT for the others."""
        slots = self.arc.slots_of(indices)
        if self.arc.slots == 0:
            return slots
        ready = torch.index_select(self.slots.states, 0, slots.clamp(min=0)) == READY
        fence()
        return slots.masked_fill_(~ready, NO_SLOT)

    def gather(self, slots: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        """Copy READY slots (int64 `[samples]`) into uint8 `[samples * nbytes]` per field."""
        self.slots.gather(slots, into)

    @property
    def filled(self) -> int:
        """Number of slots that are ready."""
        return int(self.slots.states.count_nonzero())

    @property
    def memory_bytes(self) -> int:
        """Bytes that the cache holds on this node right now, as budgets count: no header, no rest of whole pages."""
        return min(max(self.segment.allocated_bytes - HEADER_BYTES, 0), len(self) * self.spec.slot_bytes)

    @property
    def closed(self) -> bool:
        """Whether this process has given the cache up."""
        return self._given_up or self.segment.closed

    def close(self) -> None:
        """Give the cache up in this process; the memory is free when all processes have."""
        self.slots.close()  # also where another copy has closed the segment: these views are our own
        if not self._given_up:
            self._given_up = True
            self.segment.close()

    # ---- the ancestor's interface ----

    def get_slot(self, idx: int, allow_oob_idx: bool = True, allow_empty_slot: bool = True) -> Any | None:
        """A copy of the sample of an index.

        Args:
            idx: index in the dataset.
            allow_oob_idx: whether an index without a slot gives None; else it is an error.
            allow_empty_slot: whether an empty slot gives None; else it is an error.

        Raises:
            IndexError: the index is outside the dataset, or has no slot and `allow_oob_idx=False`.
            RuntimeError: the slot is empty and `allow_empty_slot=False`.
        """
        if self._checked_slot(idx, allow_oob_idx) == NO_SLOT:
            return None
        sample = self.get(idx)
        if sample is None and not allow_empty_slot:
            raise RuntimeError(f"the slot of index {idx} is empty, and allow_empty_slot=False")
        return sample

    def set_slot(self, idx: int, value: Any, allow_oob_idx: bool = True, allow_overwrite: bool = False) -> None:
        """Store a sample.

        Nothing happens where the index has no slot, nor where the slot holds the same bytes already (two processes
        filled it).

        Args:
            idx: index in the dataset.
            value: the sample, with exactly the dtype and shape of the cache.
            allow_oob_idx: whether an index without a slot is ignored; else it is an error.
            allow_overwrite: whether a slot that holds other bytes is overwritten; else it is an error.

        Raises:
            IndexError: the index is outside the dataset, or has no slot and `allow_oob_idx=False`.
            RuntimeError: the slot holds other bytes and `allow_overwrite=False`.
            SampleMismatchError: the sample has another dtype, shape or structure.
        """
        slot = self._checked_slot(idx, allow_oob_idx)
        leaves = self.spec.leaves(value, idx)
        if slot == NO_SLOT:
            return
        if not self._filling.put(slot, contents_of(leaves), overwrite=allow_overwrite):
            raise RuntimeError(f"the slot of index {idx} already holds another sample, and allow_overwrite=False")

    def __getitem__(self, idx: int) -> Any:
        """A copy of what lies in slot `idx`: zeroes where nothing has been stored, for which memory is taken."""
        slot = self._slot_number(idx)
        if self.slots.state_bytes[slot] != READY:
            self.slots.reserve(slot)
        return self.spec.unflatten(self.slots.read(slot))

    def __setitem__(self, idx: int, value: Any) -> None:
        slot = self._slot_number(idx)
        index = (slot + self.arc.start) * pow(self.arc.step, -1, self.arc.size) % self.arc.size
        self.set_slot(index, value, allow_overwrite=True)

    def __len__(self) -> int:
        """Number of slots."""
        return self.slots.count

    @property
    def array(self) -> torch.Tensor:
        """The slots themselves, `[slots, *data_dims]`: the one live view.

        Writing to it goes past every check, and marks nothing as set. Touching an empty slot takes memory; where there
        is none the process dies of SIGBUS.
        """
        self._check_open()
        if len(self.spec.fields) != 1 or not isinstance(self.spec.fields[0].dtype, torch.dtype):
            came = ", ".join(map(str, self.spec.fields))
            raise TypeError(f"array needs samples of a single tensor; these are of {came or 'nothing'}")
        return self.spec.fields[0].batch(self.slots.table(0).reshape(len(self), self.spec.nbytes))

    @property
    def aux_array(self) -> torch.Tensor:
        """The state of each index now, uint8 `[dataset_len]`: 0 empty, 1 set, 2 out of bounds (no slot)."""
        self._check_open()
        slots = self.arc.slots_of(torch.arange(self.arc.size))
        states = torch.full((self.arc.size,), _OUT_OF_BOUNDS, dtype=torch.uint8)
        has_slot = slots != NO_SLOT
        states[has_slot] = self.slots.states[slots[has_slot]]
        return states

    def clear(self) -> None:
        """Empty all slots and give their memory back. No process may be reading or filling meanwhile."""
        self.slots.clear()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("the cache is closed")

    def _slot_number(self, idx: int) -> int:
        self._check_open()
        try:
            return range(len(self))[idx]
        except IndexError:
            raise IndexError(f"slot {idx} is outside the cache of {len(self)} slots") from None

    def _checked_slot(self, idx: int, allow_oob_idx: bool) -> int:
        self._check_open()
        idx = operator.index(idx)
        if not 0 <= idx < self.arc.size:
            raise IndexError(f"index {idx} is outside the dataset of {self.arc.size} samples")
        slot = self.arc.slot(idx)
        if slot == NO_SLOT and not allow_oob_idx:
            raise IndexError(f"index {idx} has no slot in this cache of {len(self)}, and allow_oob_idx=False")
        return slot


def _new_segment(
    spec: SampleSpec, arc: Arc, backend: Backend | None = None, whose: Mapping[str, Any] | None = None
) -> Segment:
    manifest = Manifest(Geometry(**asdict(arc)), **(whose or {}))
    segment = Segment.create(FieldSlots.bytes_for(spec.row_bytes, arc.slots), backend, manifest)
    try:
        segment.reserve(0, arc.slots)  # the states: they are read before anything is stored
    except OSError:
        segment.close()
        raise
    return segment
