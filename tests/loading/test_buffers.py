"""Memory for batches comes back when nobody holds it, and only then."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.loading.buffers import Buffers

SIZE = 1 << 16


HOLDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "a slice": lambda tensor: tensor[100:],
    "a row of a view": lambda tensor: tensor.view(torch.float32).view(64, -1)[3],
    "an array": lambda tensor: tensor.numpy(),
    "a slice of an array": lambda tensor: tensor.numpy()[10:20],
    "a memoryview": lambda tensor: memoryview(tensor.numpy()),
    "dlpack": lambda tensor: torch.from_dlpack(tensor),
    "dlpack to NumPy": lambda tensor: np.from_dlpack(tensor),
    "a list": lambda tensor: [tensor[:1]],
    "the storage": lambda tensor: tensor.untyped_storage(),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor.view(torch.float32)),
    "an iterator": iter,
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_memory_that_somebody_holds_a_view_of_is_not_given_out_again(hold: Callable[[torch.Tensor], Any]):
    """Whatever kind of view it is; once it is gone the memory is used again."""
    buffers = Buffers()
    tensor = buffers.take(0, SIZE)
    address = tensor.data_ptr()
    held = hold(tensor)
    del tensor
    assert buffers.take(0, SIZE).data_ptr() != address
    del held
    gc.collect()
    assert address in {one.data_ptr() for one in [buffers.take(0, SIZE), buffers.take(0, SIZE)]}


def test_three_batches_in_rotation_take_three_buffers():
    """However many there are: one that is held, one to come, one being made."""
    buffers = Buffers()
    addresses, held = set(), []
    for _ in range(50):
        held = [*held[-1:], buffers.take(0, SIZE)]
        addresses.add(held[-1].data_ptr())
    assert len(addresses) == 3


def test_batches_of_every_size_share_the_buffers_of_a_field():
    """A sampler with batches of a hundred sizes does not make the process keep a hundred kinds of buffers."""
    buffers = Buffers()
    largest = buffers.take(0, SIZE)
    address = largest.data_ptr()
    del largest
    for size in range(SIZE, SIZE // 2, -331):
        tensor = buffers.take(0, size)
        assert tensor.shape == (size,)
        assert tensor.data_ptr() == address
        del tensor


def test_a_larger_batch_gets_larger_memory_and_smaller_memory_is_dropped():
    """Also where the smaller one comes back after the larger one was made."""
    buffers = Buffers()
    small = buffers.take(0, SIZE)
    large = buffers.take(0, 2 * SIZE)
    del small, large
    for _ in range(3):
        one, other = buffers.take(0, 2 * SIZE), buffers.take(0, 2 * SIZE)
        one.fill_(1), other.fill_(2)
        assert (int(one.max()), int(one.min())) == (1, 1)
        assert one.shape == other.shape == (2 * SIZE,)
        del one, other
    assert sum(map(len, buffers._free.values())) <= 2


def test_fields_have_buffers_of_their_own():
    """Large images and smaller masks of one batch do not take turns in the same memory."""
    buffers = Buffers()
    image = buffers.take(0, 4 * SIZE)
    mask = buffers.take(1, SIZE)
    addresses = image.data_ptr(), mask.data_ptr()
    del image, mask
    mask, image = buffers.take(1, SIZE), buffers.take(0, 4 * SIZE)
    assert (image.data_ptr(), mask.data_ptr()) == addresses


def test_who_lets_go_of_many_batches_at_once_gets_their_memory_back():
    """A few buffers are kept, the rest is freed."""
    buffers = Buffers()
    held = [buffers.take(0, SIZE) for _ in range(100)]
    held.clear()
    assert len(buffers._free[0]) == 8


@pytest.mark.parametrize("nbytes", [0, 8, 100, SIZE, SIZE + 8])
def test_memory_is_aligned_for_wide_copies(nbytes):
    """At 64 bytes; less costs up to 1.6 times as much per copy."""
    assert Buffers().take(0, nbytes).data_ptr() % 64 == 0


def test_memory_that_is_sent_to_another_process_is_not_shared_with_the_next_batch():
    """share_memory_ moves the content, and what was there before may be used again."""
    buffers = Buffers()
    tensor = buffers.take(0, SIZE).fill_(7)
    tensor.share_memory_()
    buffers.take(0, SIZE).fill_(0)
    assert int(tensor.min()) == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_is_torchs_own():
    """Only torch's allocator knows whether a copy to the device is still reading."""
    buffers = Buffers(pinned=True)
    assert buffers.take(0, SIZE).is_pinned()
    assert buffers._free == {}
