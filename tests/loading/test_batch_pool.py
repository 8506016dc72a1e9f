"""Memory for batches, of this process and of workers: it comes back when nobody holds it, and only then."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.loading import arena
from lightning_stocache.loading.arena import Arena, Slot
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.node.free import FreeMemory

SIZE = 1 << 16


HOLDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "a row of a view": lambda tensor: tensor.view(torch.float32).view(64, -1)[3],
    "a slice of an array": lambda tensor: tensor.numpy()[10:20],
    "a memoryview": lambda tensor: memoryview(tensor.numpy()),
    "dlpack": lambda tensor: torch.from_dlpack(tensor),
    "the storage": lambda tensor: tensor.untyped_storage(),
    "an iterator": iter,
}


def take(pool: BatchPool, size: int = SIZE) -> torch.Tensor:
    """Private memory, as a tensor."""
    return torch.from_numpy(pool.take([size])[0])


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_memory_that_somebody_holds_a_view_of_is_not_given_out_again(hold: Callable[[torch.Tensor], Any]):
    """Whatever kind of view it is; once it is gone the memory is used again. That of workers, too."""
    pool = BatchPool()
    tensor = take(pool)
    address = tensor.data_ptr()
    held = hold(tensor)
    del tensor
    assert take(pool).data_ptr() != address
    del held
    gc.collect()
    two = take(pool), take(pool)
    assert address in {one.data_ptr() for one in two}

    memory = Arena.create(1, workers=1)
    assert memory is not None
    assert memory.lease(0) == 0
    assert Slot(memory, 0).room(SIZE) is not None
    held = hold(torch.frombuffer(memory.lend(0, SIZE), dtype=torch.uint8))
    gc.collect()
    assert memory.free_slots == 0
    del held
    gc.collect()
    assert memory.free_slots == 1


def test_a_larger_batch_gets_larger_memory_and_smaller_memory_is_dropped():
    """Whenever the smaller one comes back. What is sent to another process is not shared with the next batch."""
    pool = BatchPool()
    sent = take(pool).fill_(7)
    sent.share_memory_()
    take(pool).fill_(0)
    assert int(sent.min()) == 7
    small, large = take(pool, SIZE + 64), take(pool, 2 * SIZE + 8)
    del small, large
    for _ in range(3):
        one, other = take(pool, 2 * SIZE + 8).fill_(1), take(pool, 2 * SIZE).fill_(2)
        assert (int(one.max()), len(one), one.data_ptr() % 64) == (1, 2 * SIZE + 8, 0)
        del one, other
    assert not [each for each in gc.get_objects() if type(each) is torch.Tensor and each.nbytes == SIZE + 64]


def test_memory_of_single_samples_is_kept_up_to_a_limit():
    """Two pieces of each size; what is large goes back to the system."""
    pool = BatchPool()
    for size in (1 << 20, 32 << 20):
        address = pool.lend([size])[0].ctypes.data
        other = np.empty(size, dtype=np.uint8)  # what is free would be found again by chance
        assert (pool.lend([size])[0].ctypes.data == address) == (size == 1 << 20), other.nbytes


# ---- of workers


@pytest.mark.parametrize("promised", [0, 16384])
def test_memory_that_is_not_there_or_promised_to_a_cache_is_not_tried(monkeypatch, promised):
    """All of it is reserved before: above a cgroup's limit the kernel would kill. Other workers may take as much."""
    workers = 2
    free = FreeMemory(None, 2**40, workers * 65536 + promised)
    monkeypatch.setattr(arena.FreeMemory, "now", lambda *_: free)
    memory = Arena.create(3, workers=workers)
    assert memory is not None
    slot = Slot(memory, 1, lambda: promised)
    assert slot.room(65536) is not None
    assert memory.allocated_bytes == 65536 + 4096  # of the table
    assert slot.room(2 * 65536) is None
    assert slot.is_refused
    assert memory.allocated_bytes == 65536 + 4096
    assert Slot(memory, 2, lambda: promised).room(65537) is None


def test_memory_that_one_large_batch_has_taken_is_given_back():
    """A slot keeps twice the median batch; free slots keep nothing after an epoch, and what a batch holds stays."""
    memory = Arena.create(3, workers=1)
    assert memory is not None
    for number, size in enumerate([SIZE, SIZE, 64 * SIZE, SIZE]):
        slot_number = memory.lease(number)
        assert slot_number is not None
        slot = Slot(memory, slot_number)
        room = slot.room(size)
        assert (room.numel(), room.data_ptr() % 64) == (size, 0)
        room.fill_(number)
        batch = torch.frombuffer(memory.lend(number, slot.end), dtype=torch.uint8, count=size)
        assert set(batch.tolist()) == {number}
        kept = batch if number == 3 else None
        del batch, room
        memory.free_slots  # noqa: B018  # has it back
        memory.give_back(slot_number, memory.most_bytes)
        assert memory.allocated_bytes <= 2 * SIZE + 4096, number
    memory.trim()
    assert memory.allocated_bytes <= 2 * SIZE + 4096
    assert set(kept.tolist()) == {3}


def test_where_address_space_is_limited_slots_are_smaller(monkeypatch):
    """A batch that does not fit travels in the message; without any room there is no such memory."""
    for limit, has_arena in ((1 << 30, True), (1 << 20, False)):
        monkeypatch.setattr(arena.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        memory = Arena.create(4, workers=1)
        assert (memory is not None) == has_arena
        if memory is not None:
            assert memory.stride == (1 << 30) // 8 // 4
            assert Slot(memory, 0).room(memory.stride + 1) is None
            assert Slot(memory, 0).room(memory.stride) is not None
