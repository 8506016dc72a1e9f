"""The documented interface of stocaching: a user of that library changes one import."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_stocache.cache.codec import SampleMismatchError
from lightning_stocache.cache.compat import SharedCache
from lightning_stocache.node.files import get_shm_size
from tests.processes import call

GIB = 1024**3


@pytest.fixture
def cache() -> Iterator[SharedCache]:
    cache = SharedCache((6 * 6 + 10) / GIB, 10, (2, 3))  # six slots
    yield cache
    cache.close()


def image(value: int) -> torch.Tensor:
    return torch.full((2, 3), value, dtype=torch.uint8)


def test_the_limit_holds_samples_and_one_byte_per_index() -> None:
    """There are (limit - dataset_len) // slot_bytes slots, and the size of /dev/shm is rounded down to GiB."""
    for limit, length, dims, dtype, slots in (
        (5000, 60, (2, 3), torch.float32, 60),
        (59, 60, (2, 3), torch.float32, 0),
        (60 + 5 * 24 + 23, 60, (2, 3), torch.float32, 5),
        (60 + 7 * 8, 60, (), torch.complex64, 7),
        (10, 10, (0, 3), torch.bfloat16, 0),
        (12, 10, (0, 3), torch.bfloat16, 2),
    ):
        cache = SharedCache(limit / GIB, length, dims, dtype)
        assert (len(cache), cache.array.shape, cache.array.dtype) == (slots, (slots, *dims), dtype)
        assert cache.aux_array.tolist() == [0] * slots + [2] * (length - slots)
        cache.close()
    stats = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    assert get_shm_size() == (0 if stats is None else stats.f_frsize * stats.f_blocks // GIB)


def test_errors_of_every_flag(cache: SharedCache) -> None:
    """Each flag refuses what it says, with the ancestor's type of error, and impossible arguments are named."""
    cache.set_slot(0, image(9))
    uses: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: cache.get_slot(10), IndexError, "index 10 is outside the dataset of 10 samples"),
        (lambda: cache.get_slot(2.0), TypeError, "float"),  # type: ignore[arg-type]
        (lambda: cache.set_slot(-1, image(1)), IndexError, "index -1 is outside"),
        (lambda: cache.get_slot(6, allow_oob_idx=False), IndexError, "index 6 has no slot in this cache of 6"),
        (lambda: cache.set_slot(6, image(1), allow_oob_idx=False), IndexError, "index 6 has no slot"),
        (lambda: cache.get_slot(1, allow_empty_slot=False), RuntimeError, "slot of index 1 is empty"),
        (lambda: cache.set_slot(0, image(1)), RuntimeError, "slot of index 0 already holds another sample"),
        (lambda: cache.set_slot(1, image(1).float()), SampleMismatchError, "sample 1: .*uint8.*float32"),
        (lambda: cache.set_slot(8, image(1)[:1]), SampleMismatchError, r"sample 8: .*\(2, 3\).*\(1, 3\)"),
        (lambda: SharedCache("1", 10, 3), TypeError, "size_limit_gib must be a number and .* got '1'"),  # type: ignore[arg-type]
        (lambda: SharedCache(1, 10, (-3,)), ValueError, r"sizes of zero or more.*data_dims=\(-3,\)"),
        (lambda: SharedCache(float("nan"), 10, 2), ValueError, "got size_limit_gib=nan"),
        (lambda: SharedCache(1, 0, 3), ValueError, r"dataset_len of one or more, got .*data_dims=\(3,\)"),
        (lambda: cache[6], IndexError, "slot 6 is outside the cache of 6 slots"),
        (lambda: cache.__setitem__(1, 5), SampleMismatchError, "got int"),
    ]
    for use, error, words in uses:
        with pytest.raises(error, match=words):
            use()
    assert cache.aux_array.tolist() == [1, 0, 0, 0, 0, 0, 2, 2, 2, 2]
    assert int(cache.get_slot(0).max()) == 9  # type: ignore[union-attr]
    cache.close()
    for use in (lambda: cache.get_slot(1), lambda: cache[1], lambda: cache.array, lambda: cache.aux_array):
        with pytest.raises(ValueError, match="the cache is closed"):
            use()


@pytest.mark.processes
def test_items_are_slots_and_array_is_their_live_view(cache: SharedCache) -> None:
    """`cache[i]` is slot i, zeroes while it is empty; `array` is a view of all slots, which marks none as set."""
    array = cache.array
    assert array.shape == (6, 2, 3)
    assert cache[0].tolist() == [[0, 0, 0]] * 2
    cache.set_slot(0, image(5)), cache.set_slot(8, image(5))
    cache[1] = image(4)
    cache[1] = image(5)
    cache[-1] = image(6)
    call(cache.array[3].fill_, 7)
    assert array[:, 0, 0].tolist() == [5, 5, 0, 7, 0, 6]
    assert [int(cache[slot].max()) for slot in (*range(6), -1)] == [5, 5, 0, 7, 0, 6, 6]
    got = [cache.get_slot(index) for index in range(10)]
    assert [None if sample is None else int(sample.max()) for sample in got] == [5, 5, None, None, None, 6, *[None] * 4]
    assert cache.aux_array.tolist() == [1, 1, 0, 0, 0, 1, 2, 2, 2, 2]
    assert (cache.aux_array.dtype, len(cache)) == (torch.uint8, 6)
    cache.set_slot(0, image(5))  # the same bytes
    cache.set_slot(0, image(7), allow_overwrite=True)
    assert cache[0].unique().tolist() == [7]
    cache.clear()
    assert cache.get_slot(0) is None
    cache.set_slot(0, image(4))
    assert cache.array.sum() == cache[0].sum() == 24
