"""CachedLoader gives the batches of a DataLoader, bit for bit, in any combination of arguments; and what it refuses."""

import copy
import inspect
import pickle
from collections import namedtuple
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, SequentialSampler
from torchvision.transforms import v2

from lightning_stocache.cache.seats import Seats
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.cache.leaves import same
from tests.loading.twins import (
    AnyKey,
    Augmented,
    InBatches,
    Numbers,
    assert_as_plain,
    copied,
    default_device,
    jitter,
    pairwise,
    totals,
)
from tests.sources import Made

LENGTH, RECORDS = 50, 26

pytestmark = pytest.mark.usefixtures("seeded")


NUMBERS = Numbers(LENGTH)


def photo(index: int) -> Any:
    """An image of PIL, of another size than others."""
    pixels = np.random.default_rng(index).integers(0, 256, (20 + index, 40 - index, 3), dtype=np.uint8)
    return Image.fromarray(pixels), f"{index}.jpg"


def noisy(index: int) -> Any:
    """It is random in itself, and cannot be split."""
    return torch.rand(3) + index, index


def text(index: int) -> Any:
    """A string, boxes of varying number, and a label."""
    boxes = torch.full((index % 4, 4), float(index))
    return {"text": f"sample {index} " * (index % 5), "boxes": boxes, "label": index % 3}


def twice(samples: list[Any]) -> Any:
    """Large tensors of all sorts: the same one twice, one with other strides, an empty one, one in an object."""
    large = torch.stack([torch.full((40, 50), float(len(str(sample)))) for sample in samples])
    strange = [large.permute(2, 0, 1), torch.empty(0, 3), None, large[0].numpy().copy(), {"deep": (large + 1, "x")}]
    return [large, large, *strange]


FLIPPED = Augmented(NUMBERS.__getitem__, LENGTH, v2.ToDtype(torch.float32, scale=True), v2.RandomHorizontalFlip())
TEXTS = Made(text, RECORDS)

SOURCES: dict[str, tuple[Any, Any, Any]] = {
    "rows": (NUMBERS, None, None),
    "rows, transformed": (NUMBERS, jitter, None),
    "rows, as lists": (NUMBERS, None, list),
    "split, in batches": (InBatches(FLIPPED), jitter, None),
    "random": (Made(noisy, RECORDS), None, None),
    "text, transformed": (TEXTS, repr, list),
    "photographs": (Augmented(photo, RECORDS, v2.RandomResizedCrop(8), v2.PILToTensor()), None, None),
    "odd batches": (TEXTS, None, twice),
}
"""Sources of rows and of records, transforms after the cache, and functions that collate."""


DESIGNS = pairwise(
    name=list(SOURCES),
    share=("off", "quarter", "all"),
    kind=(CachedLoader, DataLoader, CachedLoader),
    num_workers=(0, 1, 2),
    persistent_workers=(False, True),
    batch_size=(7, 16),
    shuffle=(True, False),
    drop_last=(False, True),
    generator=(False, True),
)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("design", DESIGNS)
def test_batches_and_draws_are_those_of_dataloader(design):
    """Whatever samples are, whatever is cached, whatever a transform draws from: nothing tells the two apart."""
    options = dict(design)
    name, share, kind, own = (options.pop(key) for key in ("name", "share", "kind", "generator"))
    source, transform, collate = SOURCES[name]
    options["persistent_workers"] &= options["num_workers"] > 0
    if collate is not None:
        options["collate_fn"] = collate
    run = kind, lambda: options | ({"generator": torch.Generator().manual_seed(5)} if own else {})
    assert_as_plain(source, [run], [share], transform=transform)


def endless(index: int) -> Any:
    """There is a sample for every index, whatever the length of the source says."""
    return torch.full((3, 5), index % 251, dtype=torch.uint8), index


def sized(key: Any) -> Any:
    """A source with keys of its own: an index and a size."""
    index, size = key if isinstance(key, tuple) else (key, 2)
    return torch.full((size,), index), index


@pytest.mark.parametrize(("num_workers", "transform"), [(0, None), (1, None), (1, copy.copy)])
@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (endless, {"batch_sampler": [[0, 9, 3], [25, -13]]}),
        (endless, {"sampler": SequentialSampler(range(14))}),
        (sized, {"batch_sampler": [[0, 1], [(2, 5), (3, 5)], [4, 0], [(1, 3)]]}),
    ],
    ids=["outside", "longer", "keys"],
)
def test_what_only_the_source_understands_passes_through(make, arguments, transform, num_workers):
    """Indices outside, which the ring would wrap around, and keys, such as (index, size), between cached batches."""
    with closing(CachedDataset(AnyKey(make, 6), transform=transform)) as dataset:
        dataset.__getitems__([0, 1, 2, 3])
        loader = CachedLoader(dataset, num_workers=num_workers, **arguments)
        for _ in range(2):
            assert same([copied(batch) for batch in loader], list(DataLoader(AnyKey(make, 6), **arguments)))


@pytest.mark.processes
def test_a_sampler_may_change_the_batch_that_it_gave():
    """Indices are copied when they are drawn: a sampler that reuses its list does not change batches to come."""

    def reusing():
        batch = [0, 0]
        for start in range(0, 10, 2):
            batch[0], batch[1] = start, start + 1
            yield batch

    with closing(CachedDataset(Numbers(10), "50%")) as dataset:
        loader = CachedLoader(dataset, batch_sampler=reusing(), num_workers=2)
        assert [batch[1].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.gpu
@pytest.mark.parametrize("transform", [None, copy.copy], ids=["gathered", "made"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_pinned_batches_may_be_copied_while_nobody_holds_them(transform, num_workers):
    """Copies to the device that are still under way read the right batch, though the next ones are made meanwhile."""
    with closing(CachedDataset(Numbers(400, (3, 128, 128)), transform=transform)) as dataset:
        for _ in range(2):
            loader = CachedLoader(dataset, 16, num_workers=num_workers, pin_memory=True)
            on_device = []
            for batch in loader:
                assert all(part.is_pinned() for part in batch)
                on_device.append([part.to("cuda", non_blocking=True) for part in batch])
            torch.cuda.synchronize()
            got = [[part.cpu() for part in batch] for batch in on_device]
            assert same(got, list(DataLoader(Numbers(400, (3, 128, 128)), 16)))


def test_gather_says_who_makes_the_batches():
    """Workers where there are some and more to do than to copy rows, else the main process; or as one says by hand."""
    worker: dict[str, Any] = {"num_workers": 1}
    with closing(CachedDataset(Numbers(8))) as plain, closing(CachedDataset(Numbers(8), transform=copy.copy)) as after:
        ways: list[tuple[Any, dict[str, Any], str | None]] = [
            (plain, {}, "main"),
            (plain, worker, "main"),
            (plain, worker | {"gather": "main"}, "main"),
            (plain, worker | {"gather": "worker"}, "worker"),
            (plain, {"collate_fn": list}, None),
            (plain, worker | {"collate_fn": list}, "worker"),
            (plain, worker | {"batch_size": None}, None),
            (after, {}, None),
            (after, worker, "worker"),
            (after, worker | {"gather": "worker"}, "worker"),
            (after, worker | {"gather": "main"}, None),
        ]
        if "in_order" in inspect.signature(DataLoader.__init__).parameters:  # since torch 2.6
            ways.append((plain, worker | {"in_order": False}, "main"))
        for dataset, options, route in ways:
            assert CachedLoader(dataset, **{"batch_size": 4} | options).route == route


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gather": "both"}, "gather must be 'auto', 'main' or 'worker', got 'both'"),
        ({"gather": "worker"}, "gather='worker' needs num_workers > 0"),
        ({"locality": "global"}, "locality must be true or false, got 'global'"),
        ({"batch_size": None, "locality": True}, "give the loader a batch_size"),
        ({"sampling": "locality"}, "say locality=True in place of sampling='locality'"),
    ],
)
def test_arguments_that_cannot_be_are_refused_in_words(arguments, message):
    """The message names the argument, the rule and what came."""
    with pytest.raises((ValueError, TypeError), match=message):
        CachedLoader(Numbers(4), **arguments)


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
def test_a_loader_that_is_running_can_be_copied_and_sent():
    """A copy, or a loader that comes out of a pickle, iterates for itself."""
    with closing(CachedDataset(Numbers(10))) as dataset:
        loader = CachedLoader(dataset, 4, num_workers=1, persistent_workers=True, gather="main")
        iterator = iter(loader)
        expected = list(DataLoader(Numbers(10), 4))
        for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
            assert (other.gather, other.batch_size, other.persistent_workers) == ("main", 4, True)
            assert same(list(other), expected)
            other.close()
        assert same(list(iterator), expected)
        loader.close()


class Point:
    """A part of samples, whose class gets another name."""

    def __init__(self, x: int) -> None:
        self.x = x


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_record_that_cannot_be_decoded_is_a_miss(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that was renamed since its samples were stored costs loads, and ends no training."""
    source = Made(lambda index, kind=Point: (kind(index), "." * index), RECORDS)

    def collate(samples: list[Any]) -> list[int]:
        return [point.x for point, _ in samples]

    with closing(CachedDataset(source)) as dataset:
        loader = CachedLoader(dataset, 4, collate_fn=collate, num_workers=num_workers)
        for epoch in range(2):
            assert [x for batch in loader for x in batch] == list(range(RECORDS))
            counts = totals(dataset)
            assert (counts.hits, counts.served) == (0, (epoch + 1) * RECORDS)
            monkeypatch.delattr(f"{__name__}.Point", raising=False)
        loader.close()


class Halved(namedtuple("Halved", "x y")):
    """A batch whose constructor computes."""

    def __new__(cls, x: torch.Tensor, y: int) -> Any:
        return super().__new__(cls, x / 2, y)


class Checked(namedtuple("Checked", "x y")):
    """A batch that pickles itself, and refuses everything but tensors."""

    def __reduce__(self) -> Any:
        return checked, tuple(self)


def checked(*items: Any) -> Checked:
    assert all(isinstance(item, torch.Tensor) for item in items)
    return Checked(*items)


def packed(samples: Any) -> Any:
    return pack_sequence(samples, enforce_sorted=False)


def packed_in_a_dict(samples: Any) -> Any:
    return {"x": pack_sequence(samples), "y": [torch.stack(samples)]}


def halved(samples: Any) -> Any:
    return Halved(torch.stack(samples), 1)


def checked_batch(samples: Any) -> Any:
    return checked(torch.stack(samples), torch.ones(2))


def cyclic(samples: Any) -> Any:
    batch: dict[str, Any] = {"x": torch.stack(samples)}
    batch["all"] = [batch]
    return batch


def one_element(samples: Any) -> Any:
    table = torch.stack(samples)
    return {"x": table[:1, 3], "y": table.bfloat16().t()[2:3, :1], "none": table[:0, 1], "number": table[1, 2]}


def twice(samples: Any) -> Any:
    table = torch.stack(samples)
    return {"x": table, "same": [table, table[:1, :1]], "again": table}


@pytest.mark.processes
@pytest.mark.parametrize("make", [packed, packed_in_a_dict, halved, checked_batch, cyclic, one_element, twice])
def test_batches_of_any_container_come_from_workers_as_from_dataloader(make: Any) -> None:
    """With a constructor or a pickle of their own, inside of themselves, of any strides, and with one tensor twice."""
    samples = [torch.arange(5.0) + index for index in range(6)]
    with closing(CachedDataset(samples)) as dataset:
        options = {"num_workers": 1, "collate_fn": make}
        got, expected = list(CachedLoader(dataset, 3, **options)), list(DataLoader(samples, 3, **options))
    assert same(got, expected)
    if make is twice:
        assert all(batch["x"] is batch["again"] is batch["same"][0] for batch in got)


UNDER_A_DEVICE: list[Any] = [
    lambda index: torch.from_numpy(np.full((3, 80, 80), index, np.uint8)),
    lambda index: {
        "x": torch.from_numpy(np.full((2, 9000), index, np.float32)).bfloat16(),
        "y": torch.empty(0, 2, device="cpu"),
    },
    lambda index: (torch.from_numpy(np.full((4 + index % 2,), index)), "text"),
]


def set_meta(worker: int) -> None:
    torch.set_default_device("meta")


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(("make", "num_workers"), [*((make, 0) for make in UNDER_A_DEVICE), (UNDER_A_DEVICE[1], 1)])
def test_batches_under_a_default_device_are_those_of_dataloader(make: Any, num_workers: int) -> None:
    """Samples and the memory of batches stay on the CPU."""
    source = Made(make, 6)
    options: dict[str, Any] = {"num_workers": num_workers, "worker_init_fn": set_meta}
    if make is UNDER_A_DEVICE[2]:
        options["collate_fn"] = list

    def batches(kind: Any, dataset: Any) -> Any:
        iterator = iter(kind(dataset, 2, **options))  # draws a seed, for which "meta" will not do
        with default_device("meta"):
            return placed(list(iterator))

    expected = batches(DataLoader, source)
    with closing(CachedDataset(source)) as dataset:
        for kind in (CachedLoader, DataLoader, CachedLoader):
            assert batches(kind, dataset) == expected
        assert totals(dataset).hits > 0


def placed(batch: Any) -> Any:
    """A batch as values that `==` compares, with the devices of its tensors."""
    if isinstance(batch, torch.Tensor):
        return str(batch.device), str(batch.dtype), batch.float().tolist() if batch.is_cpu else tuple(batch.shape)
    if isinstance(batch, dict):
        return {name: placed(value) for name, value in batch.items()}
    return [placed(value) for value in batch] if isinstance(batch, list | tuple) else batch


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("loader_kind", [CachedLoader, DataLoader])
@pytest.mark.parametrize("make", [None, lambda index: {"text": "words " * (index % 7), "index": index}])
def test_a_sample_without_a_slot_is_neither_encoded_nor_claimed(make: Any, loader_kind: Any, monkeypatch: Any) -> None:
    """From epoch two on, when all slots are filled, none is encoded, and no slot is claimed."""
    source = Numbers(64) if make is None else AnyKey(make, 64)
    encoded, claimed = list[Any](), list[int]()
    with closing(CachedDataset(source, "25%")) as dataset:
        kind, take = type(dataset.cache.codec), Seats.take
        encode = kind.encode

        def counted(codec: Any, sample: Any, index: Any = None) -> Any:
            encoded.append(index)
            return encode(codec, sample, index)

        def claim(seats: Seats, slots: list[int]) -> list[int]:
            claimed.extend(slots)
            return take(seats, slots)

        monkeypatch.setattr(kind, "encode", counted)
        monkeypatch.setattr(Seats, "take", claim)
        plain = list(DataLoader(source, 4, collate_fn=list))
        loader = loader_kind(dataset, 4, collate_fn=list) if make else loader_kind(dataset, 4)
        first = list(loader)
        assert len(encoded) <= 2 * len(dataset.cache)  # rows of a batch are encoded together if half have a slot
        encoded.clear()
        claimed.clear()
        assert same(list(loader), first)
        assert same(first, plain if make else list(DataLoader(source, 4)))
        assert len(encoded) == len(claimed) == 0
