"""Whose name is whose: the user's dataset behind a CachedDataset, and behind what the doors put in its place."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.datapipes.map import SequenceWrapper

from lightning_stocache import CachedDataset, CachedLoader, CachedStream
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.dataset import StandIn, cached_in
from lightning_stocache.loading.loader_tree import cached_in_leaves, leaves_in, loaders_in, wrapped_loader
from tests.loading.twins import logged_to, same, totals

NAMES = [
    *("transform", "transforms", "target_transform", "classes", "targets", "data", "epoch", "_image_files", "_opened"),
    *("source", "cache", "counters", "ring", "group", "budget_bytes", "share", "close", "describe", "opened", "finish"),
    *("changed", "refresh", "view", "request", "adopt", "load_into", "budget", "spec", "name", "strict", "backend"),
]


class Plain(Dataset[Any]):
    """A dataset with attributes that decide what its samples are."""

    def __init__(self) -> None:
        self.strength, self._offset = 1, 0
        self.transform: Any = None

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        sample, transform = index * self.strength + self._offset, getattr(self, "transform", None)
        return transform(sample) if callable(transform) else sample

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]

    def set_strength(self, strength: int) -> None:
        self.strength = strength


def itself(dataset: CachedDataset) -> CachedDataset:
    return dataset


@pytest.fixture
def dataset() -> Iterator[Any]:
    with closing(CachedDataset(Plain())) as dataset:
        yield dataset


def test_a_stand_in_has_no_name_of_its_own() -> None:
    """All names but dunder names, and those that CachedDataset documents, are the user's dataset's."""
    source = Plain()
    for name in NAMES:
        setattr(source, name, f"the user's {name}")
    with closing(CachedDataset(source)) as dataset:
        stand_in: Any = StandIn(dataset)
        kept = set(dir(CachedDataset)) & set(NAMES) - {"transform"}
        assert all(f"`{name}`" in str(CachedDataset.__doc__) for name in kept)
        for name in NAMES:
            for wrapped in (stand_in, dataset):
                if wrapped is stand_in or name not in kept:
                    assert getattr(wrapped, name) == getattr(source, name)
                    setattr(wrapped, name, f"another {name}")
                    assert vars(source)[name] == f"another {name}"
            delattr(stand_in, name)
            assert not hasattr(source, name)
            assert not hasattr(stand_in, name)
            assert list(DataLoader(stand_in, None)) == list(range(6))
        assert dataset.source is source
        assert not hasattr(stand_in, "__iter__")
        assert {"strength", "_offset", "set_strength"} <= set(dir(dataset)) & set(dir(stand_in))
        with pytest.raises(AttributeError, match="nothing_of_this_name"):
            dataset.nothing_of_this_name  # noqa: B018
    with pytest.raises(AttributeError, match="source"):
        CachedDataset.__new__(CachedDataset).source  # noqa: B018  pickle asks before there is one


@pytest.mark.parametrize(
    ("wrap", "way"),
    [(itself, "a method"), (itself, "the user's object"), (StandIn, "an attribute"), (StandIn, "a method")],
)
def test_a_change_takes_effect(dataset: Any, wrap: Any, way: str, caplog: Any) -> None:
    """Through the wrapper, by a method or on the user's object: from the next read on, with one warning."""
    plain, wrapped = dataset.source, wrap(dataset)
    assert [wrapped[index] for index in range(6)] == [0, 1, 2, 3, 4, 5]
    if way == "a method":
        wrapped.set_strength(3)
    else:
        (wrapped if way == "an attribute" else plain).strength = 3
    assert (plain.strength, wrapped.strength) == (3, 3)
    assert [wrapped[index] for index in range(6)] == [0, 3, 6, 9, 12, 15]
    assert wrapped.__getitems__([1, 2]) == [3, 6]
    assert list(DataLoader(Subset(wrapped, [1, 2]), None)) == [3, 6]
    wrapped.strength = 4
    assert wrapped[1] == 4
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("Plain: its `strength` has changed")
    assert warning.count("\n") == 1
    assert dataset.cache is None
    assert totals(dataset).served == 17


@pytest.mark.processes
@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(
    ("kind", "wrap", "found"),
    [
        (DataLoader, itself, CachedDataset),
        (CachedLoader, itself, CachedDataset),
        (partial(CachedLoader, gather="worker"), StandIn, Plain),
    ],
)
def test_workers_that_change_their_copy_say_so_once(tmp_path: Path, kind: Any, wrap: Any, found: Any) -> None:
    """`worker_init_fn` finds the user's dataset; workers let go of the cache and count what they serve once."""

    def set_strength_of_the_worker(worker: int) -> None:
        info: Any = get_worker_info()
        assert (type(info.dataset), info.id, info.num_workers) == (found, worker, 2)
        info.dataset.strength = worker + 2

    with closing(CachedDataset(Plain(), "34%")) as dataset, logged_to(tmp_path / "log"):
        dataset.__getitems__(list(range(6)))
        loader = kind(wrap(dataset), 3, num_workers=2, worker_init_fn=set_strength_of_the_worker)
        batches = [[batch.tolist() for batch in loader] for _ in range(3)]
        assert totals(dataset).served == 6 + 3 * 6
    assert batches == [[[0, 2, 4], [9, 12, 15]]] * 3  # by two workers in turn, as without a cache
    assert (tmp_path / "log").read_text().count("its `strength` has changed") == 1


def test_the_transform_is_the_sources_unless_one_was_given(dataset: Any) -> None:
    """Reading and writing `transform` reach the source's; one that was given is the CachedDataset's own."""
    plain = dataset.source
    plain.transform = float
    assert dataset.transform is float
    assert same(dataset[2], 2.0)
    dataset.transform = None
    assert plain.transform is None
    assert same(dataset[2], 2)
    with closing(CachedDataset(plain, transform=float)) as dataset:
        dataset.transform = str
        assert (dataset[2], dataset.transform, plain.transform) == ("2", str, None)
        assert dataset.cache is not None
    with closing(CachedDataset([1, 2])) as dataset:
        assert dataset.transform is None
        dataset.transform = float
        assert same(dataset[1], 2.0)


@pytest.mark.parametrize(
    ("kind", "num_workers", "persistent"),
    [(DataLoader, 0, False), (DataLoader, 2, True), (CachedLoader, 0, False), (CachedLoader, 2, False)],
)
def test_batches_between_changes_are_a_plain_loaders(kind: Any, num_workers: int, persistent: bool) -> None:
    """In the middle of an epoch, whose later batches may be gathered already, and between two of them."""

    def run(make: Any, dataset: Any) -> list[list[int]]:
        loader, batches = make(dataset, 1, num_workers=num_workers, persistent_workers=persistent), []
        for epoch in range(4):
            for number, batch in enumerate(loader):
                batches.append(batch.tolist())
                if (epoch, number) == (1, 0):
                    dataset._offset = 100
            if epoch == 2:
                dataset.strength = 2
        return batches

    with closing(CachedDataset(Plain())) as dataset:
        assert run(kind, StandIn(dataset)) == run(DataLoader, Plain())


@pytest.mark.parametrize("wrap", [itself, StandIn])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_has_attributes_of_its_own(dataset: Any, wrap: Any, duplicate: Any) -> None:
    """What is written to a copy stays there, as with the user's own dataset."""
    other = duplicate(wrap(dataset))
    other.strength = 5
    assert (other[1], dataset[1], dataset.source.strength) == (5, 1, 1)


# ---- its class, and the arguments of its `__getitem__`


class Sized(Protocol):
    """What a hook may ask for."""

    def set_strength(self, strength: int) -> None: ...


class Base:
    """A dataset that knows nothing of torch, whose items may be asked for in another form."""

    def __getitem__(self, number: int, scale: int = 1, *, negate: bool = False) -> int:
        return number * scale * (-1 if negate else 1)

    def __len__(self) -> int:
        return 6


class Derived(Base): ...


KINDS: list[tuple[Any, tuple[type, ...]]] = [
    (ConcatDataset([Plain(), Plain()]), (ConcatDataset, Dataset)),
    (Subset(Subset(Plain(), range(5)), [0, 3]), (Subset,)),
    (StackDataset(Plain(), Plain()), (StackDataset,)),
    (Plain(), (Plain, runtime_checkable(Sized))),
    (Derived(), (Derived, Base)),
    ([1, 2, 3], (list,)),
]


@pytest.mark.parametrize(("source", "kinds"), KINDS, ids=lambda value: type(value).__name__)
def test_a_stand_in_is_an_instance_of_the_class_of_its_source(source: Any, kinds: tuple[type, ...]) -> None:
    """Of base classes, too, after a copy or a pickle; and it cannot be cached again."""
    with closing(CachedDataset(source)) as dataset:
        stand_in: Any = StandIn(dataset)
        for duplicate in stand_in, copy.copy(stand_in), copy.deepcopy(stand_in), pickle.loads(pickle.dumps(stand_in)):
            assert all(isinstance(duplicate, kind) for kind in (*kinds, StandIn))
            assert not isinstance(duplicate, TensorDataset | dict)
            assert (duplicate.__class__, type(duplicate)) == (type(source), StandIn)
            assert same(list(DataLoader(duplicate, 2)), list(DataLoader(source, 2)))
            assert cached_in(duplicate) is not None
        with pytest.raises(TypeError, match="cached already"):
            CachedDataset(stand_in)
    inner = stand_in
    while isinstance(inner, Subset):
        inner = inner.dataset
    assert type(inner) is (Plain if isinstance(source, Subset) else StandIn)


def test_a_datapipe_behind_a_stand_in_is_read_through_the_cache() -> None:
    """A DataLoader, which wraps datapipes, leaves the stand-in as it is."""
    with closing(CachedDataset(SequenceWrapper(range(6)))) as dataset:
        loader = DataLoader(StandIn(dataset), 2)
        assert cached_in(loader.dataset) is dataset
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("kind", [DataLoader, CachedLoader])
def test_workers_of_every_start_method_get_a_stand_in(method: str, kind: Any) -> None:
    """A stand-in for a wrapper reaches the workers, and is an instance of the wrapper's class there."""
    source = ConcatDataset([Plain(), Plain()])
    with closing(CachedDataset(source)) as dataset:
        context = get_context(method)
        loader = kind(StandIn(dataset), 4, num_workers=1, multiprocessing_context=context, worker_init_fn=_is_concat)
        assert same(list(loader), list(DataLoader(source, 4)))
        assert totals(dataset).hits > 0


def _is_concat(worker: int) -> None:
    info: Any = get_worker_info()
    assert isinstance(info.dataset, ConcatDataset)


@pytest.mark.parametrize("wrap", [itself, StandIn])
def test_further_arguments_of_getitem_reach_the_source(wrap: Any) -> None:
    """By position or by name, uncached; one index alone is served from the cache."""
    with closing(CachedDataset(Derived(), transform=float)) as dataset:
        wrapped = wrap(dataset)
        assert same(wrapped.__getitem__(3, 2), 6.0)
        assert same(wrapped.__getitem__(3, negate=True), -3.0)
        assert same(wrapped.__getitem__(number=4), 4.0)
        assert same(wrapped.__getitem__(*(2, 5), negate=True), -10.0)
        assert (totals(dataset).bypasses, totals(dataset).hits) == (4, 0)
        assert same(wrapped.__getitem__(3), 3.0)
        assert totals(dataset).hits == 1
        with pytest.raises(TypeError, match="depth"):
            wrapped.__getitem__(3, depth=1)


# ---- how the package finds it


PLAIN = DataLoader(TensorDataset(torch.zeros(1)))


def test_leaves_come_in_order() -> None:
    """Through lists, tuples, dicts, what Lightning combines them in, and the loader of timm that wraps one."""
    combined = SimpleNamespace(iterables={"a": PLAIN, "b": [range(3), {}]})
    assert list(leaves_in([7, (combined, {"text": "text"}), [], None])) == [7, PLAIN, range(3), "text", None]
    assert list(loaders_in([7, (combined, PLAIN)])) == [PLAIN, PLAIN]
    kind = type("PrefetchLoader", (), {"__module__": "timm.data.loader", "__init__": lambda self, loader: None})
    wrapper, empty, foreign = kind(None), kind(None), type("PrefetchLoader", (), {"loader": PLAIN})()
    wrapper.loader, empty.loader = PLAIN, range(3)
    assert (wrapped_loader(wrapper), wrapped_loader(empty)) == (PLAIN, None)
    assert list(leaves_in([wrapper, empty, foreign])) == [PLAIN, empty, foreign]


def test_cached_datasets_are_found_through_what_wraps_them_once() -> None:
    """Datasets of several caches come in the order in which they are read, streams and foreign leaves included."""
    dataset = CachedDataset([0.0, 1.0, 2.0], spec=SampleSpec.infer(0.0))
    other = CachedDataset([3.0], spec=SampleSpec.infer(0.0))
    stream = CachedStream([1.0], budget="1MiB")
    behind = [dataset, Subset(dataset, [1]), ConcatDataset([PLAIN.dataset, Subset(dataset, [0])]), StandIn(dataset)]
    loaders = {"each": [DataLoader(each) for each in behind], "plain": PLAIN}
    assert cached_in_leaves(loaders) == [dataset]
    assert cached_in(dataset) is cached_in(StandIn(dataset)) is dataset
    assert cached_in(PLAIN.dataset) is None
    assert cached_in_leaves([DataLoader(ConcatDataset([other, dataset])), DataLoader(dataset)]) == [other, dataset]
    leaves = [SimpleNamespace(dataset=dataset), SimpleNamespace(dataset=stream), SimpleNamespace(dataset=stream), 7]
    assert cached_in_leaves(leaves) == [dataset, stream]
    for opened in (dataset, other, stream):
        opened.close()
