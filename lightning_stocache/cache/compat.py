"""The interface of stocaching, the library that the idea comes from, around a store of rows.

stocaching (https://github.com/Charl-AI/stochastic-caching) documents its `SharedCache` by constructor, `get_slot`,
`set_slot`, `[]`, `len`, `array`, `aux_array` and `clear`: a user of that library changes one import. The cache has
slots for the first indices of the dataset, as in that library.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from lightning_stocache.cache.layout_rows import Rows
from lightning_stocache.cache.placement import NO_SLOT, Arc
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.seats import READY
from lightning_stocache.cache.store import Store

__all__ = ["SharedCache"]

_OUT_OF_BOUNDS = 2


class SharedCache:
    """A cache of samples in memory that the processes of a node share, lazily filled and never evicted.

    Args:
        size_limit_gib: memory limit in GiB (a fraction will do), for the samples and four bytes of state per index.
        dataset_len: number of samples in the dataset.
        data_dims: shape of one sample, without the batch dimension; a number for a vector.
        dtype: dtype of the samples.

    Raises:
        ValueError: a limit or size below zero, or a dataset without samples; (later) the cache is closed.
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
            raise TypeError(f"size_limit_gib must be a number and dtype of torch, got {size_limit_gib!r}, {dtype!r}")
        data_dims = (data_dims,) if isinstance(data_dims, int) else tuple(data_dims)
        if any(size < 0 for size in data_dims) or not 0 <= size_limit_gib < float("inf") or dataset_len < 1:
            raise ValueError(
                "a cache needs a limit and sizes of zero or more and a dataset_len of one or more, got "
                f"size_limit_gib={size_limit_gib}, dataset_len={dataset_len}, data_dims={data_dims}"
            )
        spec = SampleSpec.infer(torch.empty(data_dims, dtype=dtype))
        limit = int(size_limit_gib * 1024**3) - dataset_len
        slots = min(max(limit, 0) // max(spec.nbytes, 1), dataset_len)
        self.store = Store.create(spec, Arc(dataset_len, slots))

    def __len__(self) -> int:
        """Number of slots."""
        return len(self.store)

    @property
    def closed(self) -> bool:
        """Whether this process has closed the cache."""
        return self.store.closed

    def close(self) -> None:
        """Close the cache in this process. The memory is free when all processes have closed the cache."""
        self.store.close()

    def get_slot(self, idx: int, allow_oob_idx: bool = True, allow_empty_slot: bool = True) -> Any | None:
        """A copy of the sample of an index, or None.

        Raises:
            IndexError: the index is outside the dataset, or has no slot and `allow_oob_idx=False`.
            RuntimeError: the slot is empty and `allow_empty_slot=False`.
        """
        if self._checked_slot(idx, allow_oob_idx) == NO_SLOT:
            return None
        sample = self.store.get(idx)
        if sample is None and not allow_empty_slot:
            raise RuntimeError(f"the slot of index {idx} is empty, and allow_empty_slot=False")
        return sample

    def set_slot(self, idx: int, value: Any, allow_oob_idx: bool = True, allow_overwrite: bool = False) -> None:
        """Store a sample with exactly the dtype and shape of the cache.

        Nothing happens if the index has no slot, or if the slot holds the same bytes already.

        Raises:
            IndexError: the index is outside the dataset, or has no slot and `allow_oob_idx=False`.
            RuntimeError: the slot holds other bytes and `allow_overwrite=False`.
            SampleMismatchError: the sample has another dtype, shape or structure.
        """
        slot = self._checked_slot(idx, allow_oob_idx)
        leaves = self.store.codec.encode(value, idx)
        if slot == NO_SLOT:
            return
        if not self.store.replace(slot, self.store.codec.contents(leaves), overwrite=allow_overwrite):
            raise RuntimeError(f"the slot of index {idx} already holds another sample, and allow_overwrite=False")

    def __getitem__(self, idx: int) -> Any:
        """A copy of slot `idx`, zeroes if nothing has been stored there."""
        return self.store.codec.decoded(self._rows.fetch(self._slot_number(idx)))

    def __setitem__(self, idx: int, value: Any) -> None:
        slot = self._slot_number(idx)
        self.set_slot(self.store.arc.index(slot), value, allow_overwrite=True)

    @property
    def array(self) -> torch.Tensor:
        """A live view of all slots, `[slots, *data_dims]`.

        Writing to it bypasses every check, and marks no slot as set. Touching an empty slot takes memory; without
        memory the process dies of SIGBUS.
        """
        self._check_open()
        live: torch.Tensor = self.store.codec.fields[0].over(self._rows.fields[0], len(self))
        return live

    @property
    def aux_array(self) -> torch.Tensor:
        """The state of each index now, uint8 `[dataset_len]`: 0 empty, 1 set, 2 out of bounds (no slot)."""
        self._check_open()
        slots = self.store.arc.slots_of(np.arange(self.store.length))
        has_slot = slots != NO_SLOT
        states = np.full(self.store.length, _OUT_OF_BOUNDS, dtype=np.uint8)
        states[has_slot] = self._rows.state[slots[has_slot]] == READY
        return torch.from_numpy(states)

    def clear(self) -> None:
        """Empty all slots and return their memory. No process may read or fill meanwhile."""
        self.store.clear()

    @property
    def _rows(self) -> Rows:
        return cast(Rows, self.store.layout)

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
        if not 0 <= idx < self.store.length:
            raise IndexError(f"index {idx} is outside the dataset of {self.store.length} samples")
        slot = self.store.arc.slot(idx)
        if slot == NO_SLOT and not allow_oob_idx:
            raise IndexError(f"index {idx} has no slot in this cache of {len(self)}, and allow_oob_idx=False")
        return slot
