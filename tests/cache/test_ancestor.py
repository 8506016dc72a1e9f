"""The documented interface of stocaching: a user of that library changes one import."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_stocache.cache.codec import SampleMismatchError
from lightning_stocache.cache.compat import SharedCache
from lightning_stocache.node.files import get_shm_size
from tests.processes import call, context

GIB = 1024**3


def make(
    slots: int = 6, dataset_len: int = 10, dims: tuple[int, ...] = (2, 3), dtype: Any = torch.uint8
) -> SharedCache:
    """A cache with that many slots."""
    slot_bytes = torch.empty(dims, dtype=dtype).nbytes
    return SharedCache((slots * slot_bytes + dataset_len) / GIB, dataset_len, dims, dtype)


@pytest.fixture
def cache() -> Iterator[SharedCache]:
    cache = make()
    yield cache
    cache.close()


def image(value: int) -> torch.Tensor:
    return torch.full((2, 3), value, dtype=torch.uint8)


@settings(deadline=None)
@given(
    limit=st.integers(0, 5000),
    dataset_len=st.integers(1, 60),
    dims=st.lists(st.integers(1, 4), max_size=3),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.bfloat16, torch.complex64]),
)
def test_the_limit_holds_samples_and_one_byte_per_index(limit: int, dataset_len: int, dims: Any, dtype: Any) -> None:
    """There are (limit - dataset_len) // slot_bytes slots, no more than indices and no fewer than none."""
    cache = SharedCache(limit / GIB, dataset_len, tuple(dims), dtype)
    slot_bytes = torch.empty(dims, dtype=dtype).nbytes
    assert len(cache) == max(0, min((limit - dataset_len) // slot_bytes, dataset_len))
    assert cache.array.shape == (len(cache), *dims)
    assert cache.array.dtype == dtype
    assert cache.aux_array.tolist() == [0] * len(cache) + [2] * (dataset_len - len(cache))
    cache.close()


def test_set_and_get(cache: SharedCache) -> None:
    """The first indices have a slot; what is set is got; the others are ignored and give None."""
    assert [cache.get_slot(index) for index in range(10)] == [None] * 10
    for index in range(10):
        cache.set_slot(index, image(index))
    assert [None if (got := cache.get_slot(index)) is None else int(got.max()) for index in range(10)] == [
        *range(6),
        *[None] * 4,
    ]
    assert cache.aux_array.tolist() == [1] * 6 + [2] * 4
    assert cache.aux_array.dtype == torch.uint8


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda cache: cache.get_slot(10), IndexError, "index 10 is outside the dataset of 10 samples"),
        (lambda cache: cache.get_slot(-1), IndexError, "index -1 is outside"),
        (lambda cache: cache.get_slot(2.0), TypeError, "float"),
        (lambda cache: cache.set_slot(10, image(1)), IndexError, "index 10 is outside"),
        (lambda cache: cache.set_slot(-1, image(1)), IndexError, "index -1 is outside"),
        (lambda cache: cache.get_slot(6, allow_oob_idx=False), IndexError, "index 6 has no slot in this cache of 6"),
        (lambda cache: cache.set_slot(6, image(1), allow_oob_idx=False), IndexError, "index 6 has no slot"),
        (lambda cache: cache.get_slot(1, allow_empty_slot=False), RuntimeError, "slot of index 1 is empty"),
        (lambda cache: cache.set_slot(0, image(1)), RuntimeError, "slot of index 0 already holds another sample"),
        (lambda cache: cache.set_slot(1, image(1).float()), SampleMismatchError, "sample 1: .*uint8.*float32"),
        (lambda cache: cache.set_slot(1, image(1)[:1]), SampleMismatchError, r"sample 1: .*\(2, 3\).*\(1, 3\)"),
        (lambda cache: cache.set_slot(8, image(1)[0, 0]), SampleMismatchError, r"sample 8: .*\(2, 3\).*\(\)"),
        (lambda cache: cache.set_slot(1, 5), SampleMismatchError, "sample 1: .*got int"),
        (lambda cache: cache[6], IndexError, "slot 6 is outside the cache of 6 slots"),
        (lambda cache: cache.__setitem__(6, image(1)), IndexError, "slot 6 is outside"),
        (lambda cache: cache.__setitem__(1, 5), SampleMismatchError, "got int"),
    ],
)
def test_errors_of_every_flag(
    cache: SharedCache, use: Callable[[SharedCache], Any], error: type[Exception], words: str
) -> None:
    """Each flag refuses what it says, with the ancestor's type of error; nothing is broadcast or cast into a slot."""
    cache.set_slot(0, image(9))
    with pytest.raises(error, match=words):
        use(cache)
    assert cache.aux_array.tolist() == [1, 0, 0, 0, 0, 0, 2, 2, 2, 2]
    assert int(cache.get_slot(0).max()) == 9  # type: ignore[union-attr]


def test_items_are_slots(cache: SharedCache) -> None:
    """`cache[i]` is slot i, zeroes while it is empty; setting it marks it as set, and overwrites; -1 is the last."""
    assert cache[0].tolist() == [[0, 0, 0]] * 2
    cache[1] = image(4)
    cache[1] = image(5)
    cache[-1] = image(6)
    assert int(cache[1].max()) == int(cache.get_slot(1).max()) == 5  # type: ignore[union-attr]
    assert int(cache[5].max()) == int(cache[-1].max()) == 6
    assert cache.aux_array.tolist() == [0, 1, 0, 0, 0, 1, 2, 2, 2, 2]
    assert len(cache) == 6


def store_directly(cache: SharedCache) -> None:
    cache.array[3] = 7


@pytest.mark.processes
def test_array_is_the_one_live_view(cache: SharedCache) -> None:
    """What is stored, in any process, is seen in `array` at once, and what is written to it lies in the slots."""
    array = cache.array
    assert array.shape == (6, 2, 3)
    cache.set_slot(0, image(5))
    call(store_directly, cache)
    assert array[:, 0, 0].tolist() == [5, 0, 0, 7, 0, 0]
    assert cache[3].tolist() == [[7] * 3] * 2
    assert cache.get_slot(3) is None  # nothing has marked it as set


def do(cache: SharedCache, what: str, index: int, value: int) -> Any:
    """Use a cache; what is there, or whether its slot was occupied."""
    if what == "get":
        got = cache.get_slot(index)
        return None if got is None else got.unique().tolist()
    if what == "clear":
        return cache.clear()
    try:
        return cache.set_slot(index, image(value), allow_overwrite=what == "overwrite")
    except RuntimeError:
        return "occupied"


@pytest.mark.processes
def test_sets_overwrites_and_clears_agree_with_a_dict(cache: SharedCache, rng: random.Random) -> None:
    """Each by a process drawn at random, sent to a Pool with every task; the same bytes may be set again."""
    plain: dict[int, int] = {}
    with context("forkserver").Pool(2) as pool:
        for _ in range(400):
            what = rng.choices(["get", "set", "overwrite", "clear"], [10, 6, 3, 0.2])[0]
            index, value = rng.randrange(6), rng.randrange(3)
            came = do(cache, what, index, value) if rng.random() < 0.5 else pool.apply(do, (cache, what, index, value))
            if what == "get":
                assert came == ([plain[index]] if index in plain else None)
            elif what == "clear":
                plain.clear()
            elif what == "set" and plain.get(index, value) != value:
                assert came == "occupied"
            else:
                assert came is None
                plain[index] = value
    assert {index: int(got.max()) for index in range(6) if (got := cache.get_slot(index)) is not None} == plain


def test_shm_size_is_in_whole_gib() -> None:
    """The size of /dev/shm, rounded down; 0 on systems without."""
    size = get_shm_size()
    assert isinstance(size, int)
    if os.path.isdir("/dev/shm"):
        stats = os.statvfs("/dev/shm")
        assert size == stats.f_frsize * stats.f_blocks // GIB


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("1", 10, (3,)), TypeError, "size_limit_gib must be a number and dtype of torch, got '1'"),
        ((1, 10, (3,), "uint8"), TypeError, "got 1, 'uint8'"),
        ((1, 10, (-3,)), ValueError, r"sizes of zero or more.*data_dims=\(-3,\)"),
        ((-1, 10, (3,)), ValueError, "got size_limit_gib=-1"),
        ((float("nan"), 10, (2,)), ValueError, "got size_limit_gib=nan"),
        ((float("inf"), 10, (2,)), ValueError, "got size_limit_gib=inf"),
        ((1, 0, (3,)), ValueError, "dataset_len of one or more, got .*dataset_len=0"),
    ],
)
def test_arguments_that_make_no_cache_are_named(arguments: Any, error: type[Exception], words: str) -> None:
    """The error tells the rule and the argument."""
    with pytest.raises(error, match=words):
        SharedCache(*arguments)


def test_a_closed_cache_says_so() -> None:
    """Every use of a closed cache is an error. `data_dims=3` is `(3,)`."""
    cache = SharedCache(1, 10, 3)
    assert cache.array.shape == (10, 3)
    cache.close()
    for use in (
        lambda: cache.get_slot(1),
        lambda: cache.set_slot(1, torch.zeros(3, dtype=torch.uint8)),
        lambda: cache[1],
        lambda: cache.array,
        lambda: cache.aux_array,
    ):
        with pytest.raises(ValueError, match="the cache is closed"):
            use()
