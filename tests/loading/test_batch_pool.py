"""Memory for batches, private and shared: it comes back when nobody holds it, and only then."""

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_stocache.loading import batch_pool
from lightning_stocache.loading.batch_pool import Attached, BatchPool, fields_of
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
    """Whatever kind of view it is; once it is gone the memory is used again. Shared memory, too."""
    pool = BatchPool(shared=1)
    tensor = take(pool)
    address = tensor.data_ptr()
    held = hold(tensor)
    del tensor
    assert take(pool).data_ptr() != address
    del held
    gc.collect()
    two = take(pool), take(pool)
    assert address in {one.data_ptr() for one in two}

    shared = pool.take_shared([400, SIZE])
    _, tensor = map(torch.from_numpy, fields_of(shared, [400, SIZE]))
    held = hold(tensor)
    del shared, _, tensor
    gc.collect()
    assert pool.shared_left == 0
    del held
    gc.collect()
    assert pool.shared_left == 1
    pool.close()


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


# ---- shared


@pytest.mark.parametrize("promised", [0, 400])
def test_memory_that_is_not_there_or_promised_to_a_cache_is_not_tried(monkeypatch, promised):
    """All of it is reserved before, in a memfd: above a cgroup's limit the kernel would kill."""
    monkeypatch.setattr(batch_pool.FreeMemory, "now", lambda *_: FreeMemory(None, 2**40, 65536 + promised))
    pool = BatchPool(shared=3, promised=lambda: promised)
    shared = pool.take_shared([65536])
    assert "memfd" in os.readlink(shared.handle.data)
    assert os.stat(shared.handle.data).st_blocks * 512 >= 65536
    assert pool.take_shared([65537]) is None
    del shared
    pool.close()


def test_shared_memory_that_was_refused_is_asked_for_again_after_a_while(monkeypatch, caplog):
    """Not for every batch; one warning says that it is short. What there is goes on being used meanwhile."""
    tries: list[int] = []
    now = [0.0]

    def refuse(size: int, *_: Any, **__: Any) -> Any:
        tries.append(size)
        raise OSError("no memory")

    monkeypatch.setattr(batch_pool.time, "monotonic", lambda: now[0])
    pool = BatchPool(shared=3)
    first = pool.take_shared([100])
    with monkeypatch.context() as patch:
        patch.setattr(batch_pool.Segment, "create", refuse)
        for now[0] in (0.0, 1.0, 2.0, 60.0):
            assert pool.take_shared([100]) is None
            assert pool.shared_left == 0
        assert tries == [128] * 2
        del first
        assert pool.shared_left > 0
        again = pool.take_shared([100])
        assert again is not None
    now[0] = 120.0
    assert None not in [pool.take_shared([100]) for _ in range(2)]
    assert len(caplog.messages) == 1
    assert "no memory" in caplog.text
    del again
    pool.close()


def test_what_a_worker_writes_is_what_the_batch_holds():
    """On both sides fields begin at multiples of 64 bytes. What is free is given up; what a batch holds stays."""
    pool, attached = BatchPool(shared=2), Attached()
    for sizes in ([100, 7, 0], [1000, 70, 0]):
        shared = pool.take_shared(sizes)
        fields = fields_of(shared, sizes)
        for number, field in enumerate(fields_of(attached.segment(shared.handle), sizes)):
            field.fill(number + 1)
        assert [field.tolist() for field in fields] == [[number + 1] * size for number, size in enumerate(sizes)]
        assert all(field.ctypes.data % 64 == 0 for field in fields if field.size)
    assert len(attached) == 1
    other = pool.take_shared()
    kept, given_up = shared.handle, other.handle
    del shared, other, field
    pool.trim()
    others = Attached()
    assert others.segment(kept) is not None
    assert others.segment(given_up) is None
    again = pool.take_shared()
    fields_of(again, [1000])[0].fill(6)
    assert fields[0].tolist() == [1] * 1000
    del again, fields
    pool.close()
    for segment in others.values():
        segment.close()
