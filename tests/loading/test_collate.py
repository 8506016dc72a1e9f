"""The batch of default_collate, made from gathered fields or by a worker in shared memory; and where it cannot be."""

import collections
import os
import pickle
from collections.abc import Callable
from fractions import Fraction
from multiprocessing import active_children
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision import tv_tensors

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading import workers
from lightning_stocache.loading.arena import Arena
from lightning_stocache.loading.collate import Collator
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.message import Reply
from lightning_stocache.loading.workers import Requested, Requests
from tests.loading.twins import assert_as_plain, default_device, same

# ---- from fields


class Later(collections.namedtuple("Later", "x y")):
    """Has its items in another order than the arguments of its constructor."""

    def __new__(cls, y, x):
        return super().__new__(cls, x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # NumPy has not the second
def test_batches_that_were_gathered_together_are_batches_of_their_own(dtype):
    """Nothing is copied. Who pickles one sends no other, and who changes one in place changes no other."""
    samples: Any = [(torch.full((2,), float(i), dtype=dtype), i) for i in range(5)]
    spec = SampleSpec.infer(samples[0])
    rows = [np.empty(size, dtype=np.uint8) for size in spec.sizes(len(samples))]
    spec.put_many(spec.rows(rows, len(samples)), range(len(samples)), [spec.encode(sample) for sample in samples])
    batches = Collator(spec).batches(rows, 5, 2)
    assert [field.data_ptr() for field in batches[0]] == [row.ctypes.data for row in rows]
    assert same(batches, [default_collate(samples[first : first + 2]) for first in (0, 2, 4)])
    assert [image.untyped_storage().nbytes() for image, _ in batches] == [image.nbytes for image, _ in batches]
    if dtype == torch.float32:
        assert all(image._base is None for image, _ in batches)
        batches[0][0].requires_grad_()
    batches[1][0].add_(1)
    assert same(batches[2], default_collate(samples[4:]))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ((), "does not keep the bytes"),
        (((), []), "does not keep the bytes"),
        (np.array(0, dtype="datetime64[s]"), "datetime64"),
        (tv_tensors.Mask(torch.zeros(2, 2)), "default_collate makes a Mask of a field"),
        (Later(torch.zeros(2), torch.zeros(2, dtype=torch.int32)), "the constructor of Later may change its fields"),
    ],
)
def test_samples_that_have_no_short_cut(monkeypatch, sample, message):
    """Without a field, refused by default_collate, or of a type that the user's function collates."""
    monkeypatch.setitem(default_collate_fn_map, tv_tensors.Mask, lambda masks, *, collate_fn_map: masks[0])
    with pytest.raises(TypeError, match=message):
        Collator(SampleSpec.infer(sample))


@pytest.mark.parametrize("sample", [(1, 2.0), {"x": np.zeros(2)}, [torch.zeros(2), True]])
def test_numbers_under_a_default_device_have_no_short_cut(sample):
    """There default_collate makes tensors on that device, of numbers and of arrays."""
    spec = SampleSpec.infer(sample)
    Collator(spec)
    with default_device("meta"), pytest.raises(TypeError, match="makes a tensor on meta"):
        Collator(spec)


# ---- by a worker


def replied(
    samples: Any, arena: Arena | None, number: int = 0, collate_fn: Callable[[Any], Any] = default_collate
) -> Any:
    """The batch of a worker that is asked for those samples, in the main process, after its way through a pipe."""
    requested = Requested(CachedDataset(samples, defer=True), collate_fn, arena)
    request = Requests(arena).request(number, np.arange(len(samples)))
    reply: Reply = pickle.loads(pickle.dumps(requested.__getitems__(request)))
    reply.unpack(lend=True)
    if reply.error is not None:
        reply.error.reraise()  # type: ignore[no-untyped-call]
    return reply.batch


def through(samples: list[Any]) -> tuple[Any, Any]:
    """The batch as it comes without memory of its own, and then in it."""
    return replied(samples, None), replied(samples, Arena.create(1, workers=1))


class OwnBatch:
    """A user's batch, with an array beside its tensors."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.images = torch.stack(samples)
        self.mean = self.images.numpy().mean(0)
        self.both = [self.images, self.images]


def test_a_batch_of_the_users_own_class_lies_in_the_memory_of_the_batch():
    """Its large tensors and arrays do, for as long as somebody holds a part of one."""
    samples = [torch.full((3, 64, 64), float(number)) for number in range(3)]
    expected = OwnBatch(samples)
    arena = Arena.create(1, workers=1)
    assert arena is not None
    batch = replied(samples, arena, collate_fn=OwnBatch)
    assert same([batch.images, batch.both], [expected.images, expected.both])
    assert batch.both[0] is batch.both[1] is batch.images
    assert np.array_equal(batch.mean, expected.mean)
    row = batch.mean[1]
    del batch
    assert arena.free_slots == 0
    assert row.flags.writeable
    assert np.array_equal(row, expected.mean[1])
    del row
    assert arena.free_slots == 1


def test_a_batch_that_cannot_be_sent_is_an_error_in_its_place(monkeypatch):
    """In a worker of DataLoader's nobody would hear of it, and the loader would wait for ever."""
    monkeypatch.setattr(workers, "get_worker_info", lambda: SimpleNamespace(id=0))
    arena = Arena.create(1, workers=1)
    assert arena is not None
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        replied([torch.zeros(2)], arena, collate_fn=lambda samples: [samples, lambda: 0])
    assert arena.free_slots == 1


ARRAYS: dict[str, Callable[[], Any]] = {
    "read-only": lambda: np.frombuffer(bytes(20_000), dtype=np.int32),
    "small and read-only": lambda: np.frombuffer(bytes(20), dtype=np.int32),
    "axes in another order": lambda: np.arange(6000.0).reshape(10, 20, 30).transpose(1, 2, 0),
    "of another machine": lambda: np.arange(3000, dtype=">f4"),
    "columns first": lambda: np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
    "one column of a row": lambda: torch.ones(1, 2000).t(),
    "channels last": lambda: torch.ones(2, 1, 50, 50).to(memory_format=torch.channels_last),
    "no rows": lambda: torch.empty(0, 5).t(),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_what_a_collate_function_makes_comes_as_from_dataloaders_workers(name):
    """They pickle by Python's default protocol: NumPy's arrays come in native order, to be written to."""
    array = ARRAYS[name]()
    expected = pickle.loads(ForkingPickler.dumps(array))
    for memory in (None, Arena.create(1, workers=1)):
        got = replied([torch.zeros(2)], memory, collate_fn=lambda samples: [array])[0]
        if isinstance(got, np.ndarray):
            assert (got.dtype, got.strides) == (expected.dtype, expected.strides)
            assert got.flags.writeable == expected.flags.writeable
            assert np.array_equal(got, expected)
        else:
            assert got.stride() == expected.stride()
            assert torch.equal(got, expected)


@pytest.mark.processes
def test_workers_keep_nothing_of_batches_that_nobody_wants():
    """Of those that were under way when an epoch was broken off; a worker would keep the memory until it ends."""
    dataset = CachedDataset([torch.arange(12.0).reshape(3, 4) + number for number in range(40)])
    loader = CachedLoader(dataset, 2, num_workers=1, persistent_workers=True, prefetch_factor=8, collate_fn=turned)
    held: list[int] = []
    for _ in range(6):
        batches = iter(loader)
        next(batches)
        del batches
        for batch in loader:
            del batch
        [worker] = active_children()
        held.append(len(os.listdir(f"/proc/{worker.pid}/fd")))
    loader.close()
    dataset.close()
    assert held[-1] < held[0] + 5


def turned(samples: list[torch.Tensor]) -> torch.Tensor:
    """A batch that is not contiguous."""
    return torch.stack(samples).transpose(1, 2)


Pair = collections.namedtuple("Pair", "image label")


SAMPLES: dict[str, Callable[[int], Any]] = {
    "an OrderedDict": lambda i: collections.OrderedDict(b=torch.tensor(i), a=float(i)),
    "nested": lambda i: {"pair": Pair([torch.tensor([i])], (i, {"deep": torch.tensor([i * 0.5])})), "one": (i,)},
    "arrays": lambda i: (np.full((2, 2), i, dtype=np.float32), np.array(i), np.arange(3, dtype=np.int16) + i),
    "scalars": lambda i: (i, float(i), i % 2 == 0, np.float32(i), np.int64(i), torch.tensor(i % 3 == 0)),
    "half precision": lambda i: (torch.full((5,), i, dtype=torch.bfloat16), torch.full((3,), i, dtype=torch.half)),
    "an empty field": lambda i: (torch.empty(0, 3), torch.tensor([i])),
    "tv_tensors": lambda i: {
        "image": tv_tensors.Image(torch.full((3, 2, 2), i, dtype=torch.uint8)),
        "mask": tv_tensors.Mask(torch.full((2, 2), i % 2 == 0)),
    },
    "boxes": lambda i: tv_tensors.BoundingBoxes(torch.full((2, 4), i), format="XYXY", canvas_size=(9, 9)),
    "empty branches": lambda i: {2: torch.tensor([i]), "a": [], "b": (i, ()), "c": {}},
    "nothing": lambda i: (),
    "strings": lambda i: (torch.tensor([i]), f"file {i}", b"bytes"),
    "not contiguous": lambda i: torch.arange(12).reshape(3, 4).t() + i,
    "conjugated": lambda i: torch.tensor([1 + 1j * i]).conj(),
    "defaultdict": lambda i: (collections.defaultdict(list, a=torch.tensor([i])), torch.ones(99)),
}
"""What samples look like: a sample for each index."""


@pytest.mark.processes  # where nothing is left to load, one that reads a sample again
@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("name", SAMPLES)
def test_batches_have_the_structure_and_types_that_dataloader_gives_them(name):
    """Whatever the samples are, cached or not; and whole batches that workers make, in shared memory or not."""
    samples = [SAMPLES[name](i) for i in range(12)]
    assert_as_plain(samples, [(CachedLoader, lambda: {"batch_size": 5})], ["quarter", "all"])
    expected = default_collate(samples)
    for got in through(samples):
        assert same(got, expected)


ODD: dict[str, list[Any]] = {
    "shape": [torch.ones(2), torch.zeros(3), torch.ones(2)],
    "dtype": [torch.ones(2), torch.full((2,), 0.1, dtype=torch.float64), torch.ones(2)],
    "lengths": [(1, 2), (1,)],
    "keys": [{"a": 1}, {"b": 2}],
    "objects": [object(), object()],
    "types": [torch.zeros(2), None],
    "a type that is registered": [(Fraction(1, 2), 1), (Fraction(1, 3), 2)],
}


@pytest.mark.parametrize("samples", ODD.values(), ids=ODD)
def test_samples_that_differ_are_left_to_default_collate(monkeypatch, samples):
    """In shared memory too; and so are those with a type for which the user has registered a function."""
    monkeypatch.setitem(default_collate_fn_map, Fraction, lambda numbers, *, collate_fn_map: sum(numbers))
    monkeypatch.setattr(workers, "get_worker_info", lambda: SimpleNamespace(id=0))

    def outcome(make: Callable[..., Any], *args: Any) -> Any:
        try:
            return make(*args)
        except Exception as refused:
            return type(refused), str(refused)

    expected = outcome(default_collate, samples)
    for memory in (None, Arena.create(1, workers=1)):
        got = outcome(replied, samples, memory)
        assert same(got, expected) or (got[0] is expected[0] and got[1].strip().endswith(expected[1]))
