"""CachedLoader gives the batches of a DataLoader, bit for bit, in any combination of arguments; and what it refuses."""

import copy
import inspect
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)
from torchvision import transforms
from torchvision.transforms import v2

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.dataset import CachedDataset, StandIn
from lightning_stocache.loading.loader import CachedLoader
from tests.loading.twins import (
    STRUCTURES,
    Jitter,
    LazySampler,
    Numbers,
    Transformed,
    UnequalBatches,
    copied,
    pairwise,
    run,
    same,
    totals,
    unchanged,
)
from tests.sources import Made

LENGTH = 50
SPEC = SampleSpec.infer(Numbers(LENGTH)[0])

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.processes]


class Flipped(Dataset[Any]):
    """A source that flips at random by itself: it is split before the flip."""

    def __init__(self) -> None:
        self.numbers = Numbers(LENGTH)
        self.transform = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.RandomHorizontalFlip()])

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.numbers[index]
        return self.transform(image), label


def sampling(name: str, batch_size: int, drop_last: bool) -> dict[str, Any]:
    """The arguments for a way to draw indices, with samplers of their own."""
    plain: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    indices = range(LENGTH)
    return {
        "shuffle": lambda: plain | {"shuffle": True},
        "sequential": lambda: plain,
        "lazy": lambda: plain | {"sampler": LazySampler(LENGTH)},
        "replacement": lambda: plain | {"sampler": RandomSampler(indices, replacement=True, num_samples=61)},
        "oversampled": lambda: plain | {"sampler": RandomSampler(indices, num_samples=83)},
        "distributed": lambda: plain | {"sampler": DistributedSampler(indices, 2, 1)},
        "own batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(indices), batch_size, drop_last)},
        "unequal": lambda: {"batch_sampler": UnequalBatches(LENGTH)},
    }[name]()


def source_and_transform(name: str) -> tuple[Dataset[Any], Callable[[Any], Any] | None]:
    if name == "split":
        return Flipped(), None
    return Numbers(LENGTH), None if name == "none" else Jitter(name)


def seed_all() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # type: ignore[func-returns-value]


def assert_equal_to_plain(
    *, sampler: str, share: str, transform: str, batch_size: int, drop_last: bool, generator: bool, **options: Any
) -> None:
    """Three epochs of both loaders, the second one broken off: batches and all generators, after every batch."""
    source, after = source_and_transform(transform)
    budget: Any = {"off": 0, "quarter": "25%"}.get(share, "auto")
    spec = None if transform == "split" else SPEC  # else a process looks at the source, each time

    def arguments() -> dict[str, Any]:
        own = {"generator": torch.Generator().manual_seed(5)} if generator else {}
        return options | own | sampling(sampler, batch_size, drop_last)

    seed_all()
    expected = run(DataLoader(source if after is None else Transformed(source, after), **arguments()))
    with closing(CachedDataset(source, budget, transform=after, spec=spec)) as dataset:
        if share == "warm":
            dataset.__getitems__(list(range(LENGTH)))
        seed_all()
        got = run(CachedLoader(dataset, **arguments()))
    assert len(got) == len(expected)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert same(one, other), f"batch {number} or a generator's state after it differs"


SAMPLERS = ("shuffle", "sequential", "lazy", "replacement", "oversampled", "distributed", "own batches", "unequal")
SHARES = ("off", "quarter", "all", "warm")
TRANSFORMS = ("none", "torch", "numpy", "random", "split")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_without_workers_batches_and_draws_are_those_of_dataloader(sampler):
    """Whatever draws the indices, whatever is cached, whatever a transform draws from: nothing tells the two apart."""
    more: dict[str, Any] = {"batch_size": (7, 1, 256), "drop_last": (False, True), "generator": (False, True)}
    for options in pairwise(share=SHARES, transform=TRANSFORMS, **more):  # for each sampler: a seed may be drawn or not
        assert_equal_to_plain(sampler=sampler, **options)


@pytest.mark.parametrize(
    "options",
    pairwise(
        sampler=SAMPLERS,
        share=SHARES,
        transform=TRANSFORMS,
        num_workers=(1, 2),
        persistent_workers=(False, True),
        batch_size=(7, 1, 256),
        drop_last=(False, True),
        generator=(False, True),
        prefetch_factor=(2, 1),
    ),
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_with_workers_batches_and_draws_are_those_of_dataloader(options):
    """The same with workers, persistent or not: every two values of all factors meet in one of these combinations."""
    assert_equal_to_plain(**options)


# ---- what samples look like ----


@pytest.mark.parametrize("name", STRUCTURES)
def test_batches_have_the_structure_and_types_that_dataloader_gives_them(name):
    """Whatever default_collate makes of the samples comes out, cached or not; `test_reply` has batches of workers."""
    source: Any = [STRUCTURES[name](i) for i in range(7)]
    expected = [copied(batch) for batch in DataLoader(source, 3)] * 2
    with closing(CachedDataset(source, "50%")) as dataset:
        loader = CachedLoader(dataset, 3)
        assert same([copied(batch) for batch in itertools.chain(loader, loader)], expected)


# ---- what goes DataLoader's own way ----


def later_first(samples: list[Any]) -> torch.Tensor:
    return torch.stack([image for image, _ in reversed(samples)])


OWN_WAY: dict[str, dict[str, Any]] = {
    "a collate_fn": {"batch_size": 4, "collate_fn": later_first},
    "no batches": {"batch_size": None},
    "no batches, a sampler": {"batch_size": None, "sampler": list(range(9, -1, -1))},
}
if "in_order" in inspect.signature(DataLoader.__init__).parameters:  # since torch 2.6
    OWN_WAY["any order"] = {"batch_size": 4, "in_order": False, "num_workers": 1}


@pytest.mark.parametrize("arguments", OWN_WAY.values(), ids=OWN_WAY)
def test_what_has_no_short_cut_travels_as_dataloader_sends_it(arguments):
    """A collate function of the user's, samples without batching and batches in any order come out as ever."""
    with closing(CachedDataset(Numbers(10), "50%")) as dataset:
        loader = CachedLoader(dataset, **arguments)
        for _ in range(2):
            assert same(list(loader), list(DataLoader(Numbers(10), **arguments)))
        assert loader.resources is None
        assert totals(dataset).served == 20


# ---- indices ----


class Endless(Numbers):
    """Has a sample for every index, whatever its length says."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full(self.shape, index % 251, dtype=torch.uint8), index


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "arguments", [{"batch_sampler": [[0, 12, 3], [25, -13]]}, {"sampler": SequentialSampler(range(14))}], ids=list
)
def test_indices_outside_that_the_source_knows_are_served_by_it(arguments, num_workers):
    """The ring would wrap them around to samples of other indices."""
    with closing(CachedDataset(Endless(10))) as dataset:
        dataset.__getitems__(list(range(10)))
        batches = list(CachedLoader(dataset, num_workers=num_workers, **arguments))
        assert same(batches, list(DataLoader(Endless(10), **arguments)))


class Sized(Numbers):
    """A source with keys of its own: an index and a size."""

    def __getitem__(self, key: Any) -> Any:
        index, size = key if isinstance(key, tuple) else (key, 2)
        return torch.full((size,), index), index


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("transform", [None, unchanged], ids=["gathered", "made"])
def test_keys_that_only_the_source_understands_pass_through(transform, num_workers):
    """A sampler that gives (index, size) gets what the source makes of it, between batches from the cache."""
    batches: Any = [[0, 1], [(2, 5), (3, 5)], [4, 0], [(1, 3)]]
    with closing(CachedDataset(Sized(6), transform=transform)) as dataset:
        loader = CachedLoader(dataset, batch_sampler=batches, num_workers=num_workers)
        for _ in range(2):
            got = [copied(batch) for batch in loader]
            assert same(got, list(DataLoader(Sized(6), batch_sampler=batches)))


def test_a_sampler_may_change_the_batch_that_it_gave():
    """Indices are copied when they are drawn: a sampler that reuses its array does not change batches to come."""

    class Reusing:
        def __init__(self, kind: Callable[[Any], Any]) -> None:
            self.batch = kind([0, 0])

        def __iter__(self) -> Iterator[Any]:
            for start in range(0, 10, 2):
                self.batch[0], self.batch[1] = start, start + 1
                yield self.batch

    with closing(CachedDataset(Numbers(10), "50%")) as dataset:
        for kind in (np.array, torch.tensor, list):
            loader = CachedLoader(dataset, batch_sampler=Reusing(kind), num_workers=2)  # type: ignore[arg-type]
            assert [batch[1].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


# ---- arguments ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("transform", [None, unchanged], ids=["gathered", "made"])
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


class Telling(Numbers):
    """A source whose samples say what the worker that loaded them was told."""

    told = (-1, -1, -1)

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return torch.tensor([*self.told, -1 if info is None else info.id]), index


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(
    ("transform", "wrap", "kind"),
    [(None, StandIn, Telling), (None, lambda dataset: dataset, CachedDataset), (unchanged, StandIn, Telling)],
)
def test_worker_init_fn_finds_the_dataset_and_the_worker(transform, wrap, kind):
    """It runs in every worker, where get_worker_info says what it says under DataLoader: the user's own dataset."""

    def note_worker(worker: int) -> None:
        info: Any = get_worker_info()
        assert type(info.dataset) is kind
        info.dataset.told = (worker, info.id, info.num_workers)

    with closing(CachedDataset(Telling(8), transform=transform)) as dataset:
        loader = CachedLoader(wrap(dataset), 2, num_workers=2, worker_init_fn=note_worker)
        told = {tuple(row) for images, _ in loader for row in images.tolist()}
        assert told == {(0, 0, 2, 0), (1, 1, 2, 1)}


def test_gather_says_who_makes_the_batches():
    """Workers where there are some and a transform to run, else the main process; or as one says by hand."""
    with closing(CachedDataset(Numbers(8))) as plain, closing(CachedDataset(Numbers(8), transform=unchanged)) as after:
        ways = {
            ("auto", plain, 0): "main",
            ("auto", plain, 1): "main",
            ("main", plain, 1): "main",
            ("worker", plain, 1): "worker",
            ("auto", after, 0): None,
            ("auto", after, 1): "worker",
            ("worker", after, 1): "worker",
            ("main", after, 1): None,
        }
        for (gather, dataset, num_workers), way in ways.items():
            loader = CachedLoader(dataset, 4, gather=gather, num_workers=num_workers)  # type: ignore[arg-type]
            assert loader.route == way
            assert same([copied(batch) for batch in loader], list(DataLoader(Numbers(8), 4)))


def test_arguments_that_cannot_be_are_refused_in_words():
    """The message names the argument, the rule and what came."""
    with pytest.raises(ValueError, match="gather must be 'auto', 'main' or 'worker', got 'both'"):
        CachedLoader(Numbers(4), 2, gather="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gather='worker' needs num_workers > 0"):
        CachedLoader(Numbers(4), 2, gather="worker")
    with pytest.raises(ValueError, match="mutually exclusive"):
        CachedLoader(Numbers(4), shuffle=True, batch_sampler=[[0]])
    with pytest.raises(TypeError, match="frobnicate"):
        CachedLoader(Numbers(4), frobnicate=1)
    with pytest.raises(ValueError, match="mode must be one of locality, global, sticky, got 'nearby'"):
        CachedLoader(Numbers(4), 2, sampling="nearby")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give the loader a batch_size"):
        CachedLoader(Numbers(4), None, sampling="locality")
    sampler = DistributedSampler(Numbers(4), 2, 0)
    assert CachedLoader(Numbers(4), 2, sampler=sampler, sampling="locality").sampler is sampler


def test_the_length_is_that_of_the_batch_sampler_and_asked_for_only_then():
    """A batch sampler without a length will do, as long as nobody wants to know."""
    with closing(CachedDataset(Numbers(10))) as dataset:
        iterator = iter(CachedLoader(dataset, 4))
        assert len(iterator) == 3
        unequal = iter(CachedLoader(dataset, batch_sampler=UnequalBatches(10)))  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            len(unequal)


@pytest.mark.parametrize(("transform", "method"), [(None, "forkserver"), (unchanged, "spawn")])
def test_workers_may_be_started_by_any_method(transform, method):
    """Spawned workers fill the same cache, stage what does not fit and use the same windows."""
    with closing(CachedDataset(Numbers(12), "50%", transform=transform)) as dataset:
        arguments: dict[str, Any] = {
            "batch_size": 4,
            "num_workers": 1,
            "persistent_workers": True,
            "multiprocessing_context": method,
        }
        loader = CachedLoader(dataset, **arguments)
        expected = list(DataLoader(Numbers(12), 4))
        for _ in range(3):
            assert same([copied(batch) for batch in loader], expected)
        assert dataset.cache.filled == 6
        loader.close()


# ---- copies ----


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


@pytest.mark.parametrize("own", [False, True])
def test_a_persistent_loader_whose_cache_is_closed_draws_no_second_seed(own):
    """The epochs after it are those of a DataLoader whose workers have lived on, and so is the generator's state."""

    def epochs(loader: Any, close: Any = None) -> list[Any]:
        torch.manual_seed(0)
        got = []
        for epoch in range(4):
            for number, batch in enumerate(loader):
                if close is not None and (epoch, number) == (1, 1):
                    close()
                got.append(batch[1].tolist())
        return [*got, torch.rand(1).item()]

    arguments: dict[str, Any] = {"batch_size": 8, "shuffle": True, "num_workers": 1, "persistent_workers": True}
    with closing(CachedDataset(Numbers(LENGTH))) as dataset:
        expected = epochs(DataLoader(Numbers(LENGTH), generator=seeded() if own else None, **arguments))
        loader = CachedLoader(dataset, generator=seeded() if own else None, **arguments)
        assert epochs(loader, dataset.close) == expected


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


# ---- records: samples of any kind ----

RECORDS = 26


def text(index: int) -> Any:
    """A string, its tokens and a label, of many lengths."""
    return {"text": f"sample {index} " * (index % 5), "ids": list(range(index % 7 + 1)), "label": index % 3}


class Photos(Dataset[Any]):
    """Images of PIL of many sizes, cropped and flipped at random."""

    def __init__(self) -> None:
        steps = [transforms.RandomResizedCrop(8), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
        self.transform = transforms.Compose(steps)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        pixels = np.random.default_rng(index).integers(0, 256, (20 + index, 40 - index, 3), dtype=np.uint8)
        return self.transform(Image.fromarray(pixels)), f"{index}.jpg"


def boxed(index: int) -> Any:
    """A large image with boxes of varying number."""
    image = torch.full((3, 64, 60 + index), index, dtype=torch.uint8)
    return image, {"boxes": torch.full((index % 4, 4), float(index)), "id": index, "name": str(index)}


TEXTS, BOXES = Made(text, RECORDS), Made(boxed, RECORDS)


def padded(samples: list[Any]) -> Any:
    ids = [torch.tensor(sample["ids"]) for sample in samples]
    texts, labels = [sample["text"] for sample in samples], torch.tensor([sample["label"] for sample in samples])
    return {"ids": pad_sequence(ids, batch_first=True), "text": texts, "label": labels}


def as_tuples(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def twice(samples: list[Any]) -> Any:
    """Large tensors of all sorts: the same one twice, one with other strides, an empty one, one in an object."""
    large = torch.stack([torch.full((40, 50), float(len(str(sample)))) for sample in samples])
    return [
        large,
        large,
        large.permute(2, 0, 1),
        torch.empty(0, 3),
        None,
        large[0].numpy().copy(),
        {"deep": (large + 1, "x")},
    ]


WAYS: dict[str, tuple[Any, Any]] = {
    "text, padded": (TEXTS, padded),
    "photographs": (Photos(), None),
    "photographs, tuples": (Photos(), as_tuples),
    "boxes": (BOXES, as_tuples),
    "odd batches": (TEXTS, twice),
}

DESIGNS = pairwise(
    way=list(WAYS),
    num_workers=[0, 2],
    budget=["auto", "40%"],
    persistent=[False, True],
    batch_size=[4, 7],
    shuffle=[True, False],
    transform=[None, repr],
)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: " ".join(map(str, design.values())))
def test_batches_and_draws_of_records_are_those_of_dataloader(design: dict[str, Any]) -> None:
    """In three epochs, one of them broken off, with all of it in the cache, or a part."""
    source, collate = WAYS[design["way"]]
    transform = design["transform"]
    if transform is not None:
        collate = list
    arguments = {"batch_size": design["batch_size"], "shuffle": design["shuffle"], "collate_fn": collate}
    arguments |= {"num_workers": design["num_workers"]}
    arguments |= {"persistent_workers": design["persistent"] and design["num_workers"] > 0}
    with closing(CachedDataset(source, design["budget"], transform=transform)) as dataset:
        whole = source if transform is None else Transformed(source, transform)
        seed_all()
        plain = run(DataLoader(whole, **arguments))
        seed_all()
        loader = CachedLoader(dataset, **arguments)
        cached = run(loader)
        loader.close()
        assert same(cached, plain)
        counts = totals(dataset)
        assert counts.hits > 0
        assert counts.fills == dataset.cache.filled  # type: ignore[union-attr]


def test_a_tensor_that_is_there_twice_is_one() -> None:
    """What a collate function gives twice shares its memory, and strides are what they were."""
    with closing(CachedDataset(TEXTS)) as dataset:
        loader = CachedLoader(dataset, 4, collate_fn=twice, num_workers=1)
        for _ in range(3):
            batch = next(iter(loader))
            batch[0][0, 0, 0] = -5.0
            assert batch[1][0, 0, 0] == -5.0
            assert batch[2].stride() == (1, 2000, 50)
        loader.close()


class Point:
    """A part of samples, whose class gets another name."""

    def __init__(self, x: int) -> None:
        self.x = x


def of_a_point(index: int, kind: type[Point] = Point) -> Any:
    return {"point": kind(index), "text": "." * index}


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_record_that_cannot_be_decoded_is_a_miss(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that was renamed since its samples were stored costs loads, and ends no training."""
    with closing(CachedDataset(Made(of_a_point, RECORDS))) as dataset:
        loader = CachedLoader(
            dataset, 4, collate_fn=lambda samples: [sample["point"].x for sample in samples], num_workers=num_workers
        )
        for epoch in range(2):
            assert [x for batch in loader for x in batch] == list(range(RECORDS))
            counts = totals(dataset)
            assert (counts.hits, counts.served) == (0, (epoch + 1) * RECORDS)
            monkeypatch.delattr(f"{__name__}.Point", raising=False)
        loader.close()
