"""The order of an epoch: drawn at DataLoader's moments, and gone on with from where another loader stood."""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler
from torch.utils.data.sampler import RandomSampler, SequentialSampler, SubsetRandomSampler

from lightning_stocache import CachedDataset, CachedLoader
from lightning_stocache.cache.placement import Domain, Ring
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.loader_sampler import locality_sampler
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from tests.loading.twins import assert_as_plain, comparable, outcomes, pairwise, same, seed_all

LENGTH = 23
NUMBERS: Any = [torch.tensor(number) for number in range(LENGTH)]
IN_BATCHES = {"batch_sampler", "batch_size"}  # samplers that say something about batches


@pytest.fixture
def cached() -> Iterator[Any]:
    with closing(CachedDataset(NUMBERS, spec=SampleSpec.infer(NUMBERS[0]))) as dataset:
        yield dataset


@pytest.fixture(params=["cached", "plain"])
def dataset(request: pytest.FixtureRequest, cached: Any) -> Any:
    """Where batches are made by the package, and where by DataLoader."""
    return cached if request.param == "cached" else NUMBERS


# ---- samplers ----


class UnequalBatches:
    """A batch sampler without a length, whose batches have 1 to 9 samples, drawn when they are asked for."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        order = torch.randperm(self.length).tolist()
        while order:
            size = int(torch.randint(1, 10, ()))
            yield order[:size]
            order = order[size:]


class Shuffled(Sampler[Any]):
    """Indices or batches in an order of a generator of the user's, or of a process-wide one, drawn by `iter`."""

    def __init__(self, items: Iterable[Any], generator: Any) -> None:
        self.items, self.generator = list(items), generator

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        order = list(self.items)
        self.generator.shuffle(order)
        return iter(order)


class OneList:
    """A batch sampler that changes and yields the same list."""

    def __iter__(self) -> Iterator[list[int]]:
        batch = [-1, 0]
        for _ in range(8):
            batch[:] = batch[1] + 1, batch[1] + 2
            yield batch


class LazyBatches(BatchSampler):
    """A BatchSampler that draws before every batch."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            torch.rand(1)
            yield batch


class Lazy(DistributedSampler[Any]):
    """A DistributedSampler with a way of its own to draw: from the global generator, when it is asked."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(0, len(self.dataset), ())) for _ in range(self.num_samples))  # type: ignore[arg-type]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sequential": lambda indices: {},
    "shuffle": lambda indices: {"shuffle": True},
    "a generator": lambda indices: {"shuffle": True, "generator": seeded(3)},
    "replacement": lambda indices: {"sampler": RandomSampler(indices, replacement=True, num_samples=40)},
    "oversampled": lambda indices: {"sampler": RandomSampler(indices, num_samples=83)},
    "a shared generator": lambda indices: {"sampler": RandomSampler(indices, generator=torch.default_generator)},
    "subset": lambda indices: {"sampler": SubsetRandomSampler(indices[::2])},
    "distributed": lambda indices: {"sampler": DistributedSampler(indices, 2, 1, seed=5)},
    "lazy": lambda indices: {"sampler": Lazy(indices, 1, 0)},
    "own generator": lambda indices: {"sampler": Shuffled(indices, random.Random(4))},
    "NumPy's generator": lambda indices: {"sampler": Shuffled(indices, np.random)},
    "a list": lambda indices: {"sampler": list(indices[::2])},
    "batches": lambda indices: {"batch_sampler": BatchSampler(RandomSampler(indices, generator=seeded(2)), 4, True)},
    "lazy batches": lambda indices: {"batch_sampler": LazyBatches(SequentialSampler(indices), 3, False)},
    "eager batches": lambda indices: {"batch_sampler": Shuffled([[1, 2], [3], [4, 5, 6], [0, 7, 8, 9]], random)},
    "unequal batches": lambda indices: {"batch_sampler": UnequalBatches(len(indices))},
    "a list of lists": lambda indices: {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
    "no batches": lambda indices: {"shuffle": True, "batch_size": None},
}
"""The arguments of a loader for each way to draw indices, with samplers of their own."""


# ---- drawn at DataLoader's moments ----


@pytest.mark.processes
@pytest.mark.usefixtures("seeded")
@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_are_asked_when_dataloader_asks_them(name):
    """Also the user's own, with a worker that draws ahead, and where nothing is missing."""

    def run_of(*, batch_size: int, drop_last: bool, generator: bool, **options: Any) -> Any:
        def arguments() -> dict[str, Any]:
            given = SAMPLERS[name](range(LENGTH))
            batches = {} if IN_BATCHES & given.keys() else {"batch_size": batch_size, "drop_last": drop_last}
            return options | ({"generator": seeded(5)} if generator else {}) | batches | given

        return CachedLoader, arguments

    flags = (False, True)
    designs = pairwise(batch_size=(7, 256), drop_last=flags, generator=flags)  # a seed may be drawn or not
    assert_as_plain(NUMBERS, [run_of(**design) for design in designs], ["quarter", "all"])
    if name in ("shuffle", "a generator", "lazy", "NumPy's generator", "unequal batches", "no batches"):
        assert_as_plain(NUMBERS, [run_of(**designs[0], num_workers=1)], ["quarter", "all"])


class Failing(Sampler[int]):
    """A sampler that raises in the middle."""

    def __iter__(self) -> Iterator[int]:
        yield from range(7)
        raise OSError("the list of files is gone")


@pytest.mark.parametrize("batches", [BatchSampler(Failing(), size, False) for size in (1, 2, 3)] + [[[0], [], [2]]])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_comes_where_dataloader_raises_it(cached, num_workers, batches):
    """As soon as DataLoader would have drawn so far; of an empty batch in its place. Then the iteration goes on."""
    got = map(comparable, outcomes(CachedLoader(cached, batch_sampler=batches, num_workers=num_workers)))
    expected = map(comparable, outcomes(DataLoader(NUMBERS, batch_sampler=batches, num_workers=num_workers)))
    assert same(list(got), list(expected))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_sampler_is_told_after_iter_counts_as_in_dataloader(cached, num_workers):
    """Before the first batch, as far as it counts there; an epoch that nobody reads, or without a batch, is alike."""
    seen: list[Any] = []
    for kind, data in ((CachedLoader, cached), (DataLoader, NUMBERS)):
        seed_all()
        loader = kind(data, 3, sampler=DistributedSampler(data, 2, 0), num_workers=num_workers)
        for epoch in range(3):
            iterator = iter(loader)
            loader.sampler.set_epoch(epoch)
            seen.append([batch.tolist() for batch in iterator])
        for arguments in ({"shuffle": True}, {"sampler": Lazy(data, 1, 0)}):
            iter(kind(data, 3, num_workers=num_workers, **arguments))
            seen.append(torch.get_rng_state().tolist())
        with pytest.raises(TypeError):  # only who asks for it needs the length
            len(iter(kind(data, batch_sampler=UnequalBatches(LENGTH))))
        assert list(kind(data, 64, drop_last=True, num_workers=num_workers)) == []
        assert list(kind(data, batch_sampler=[], num_workers=num_workers)) == []
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


# ---- gone on with ----


def dealt(indices: Any) -> LocalitySampler:
    """The second of two ranks, each a node with a half of a fold."""
    ring = Ring.cut(16, (0.5, 0.5), (8, 8), Domain(range(2, 18), LENGTH))
    draws = SubsetRandomSampler(indices)
    return LocalitySampler(NUMBERS, 2, 1, batch_size=4, ring=ring, nodes=((0,), (1,)), draws=draws)


WAYS = SAMPLERS | {
    "locality": lambda indices: SAMPLERS["shuffle"](indices) | {"locality": True},
    "a dealt fold": lambda indices: SAMPLERS["subset"](indices) | {"locality": True},
    "dealt, own generator": lambda indices: SAMPLERS["own generator"](indices) | {"locality": True},
    "dealt, two ranks": lambda indices: {"sampler": dealt(indices)},
}


def made(name: str, seed: int, dataset: Any, options: dict[str, Any]) -> Any:
    """A loader as it is in a process of its own, whose generators are where they are by chance."""
    seed_all(seed)
    given = WAYS[name](range(LENGTH))
    return CachedLoader(dataset, **({} if IN_BATCHES & given.keys() else {"batch_size": 4}), **given, **options)


def epochs(loader: Any, begin: int, end: int) -> list[list[Any]]:
    """The batches of some epochs, each told its number."""
    batches = []
    for epoch in range(begin, end):
        loader.set_epoch(epoch)
        batches.append([batch.tolist() for batch in loader])
    return batches


WORKER: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
WITH_WORKERS = [
    *((name, WORKER | {"persistent_workers": True}) for name in ("shuffle", "locality")),
    *((name, WORKER) for name in ("lazy", "own generator")),
]


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in WAYS), *(pytest.param(*way, marks=pytest.mark.processes) for way in WITH_WORKERS)],
)
def test_the_rest_comes_from_any_moment(dataset, name, options):
    """From the state at any batch a loader in another process gives what is left of that epoch, and the next ones."""
    first = made(name, 3, dataset, options)
    first.set_epoch(1)
    batches, whole = iter(first), list[Any]()
    states = [first.state_dict()]  # begun, and nothing handed out
    for batch in batches:
        whole.append(batch.tolist())
        states.append(first.state_dict())
    states.append(first.state_dict())  # at the epoch's end
    following = epochs(first, 2, 4)
    assert len(whole) > 2
    for number in (2, len(whole) + 1) if options else (0, 1, 2, len(whole) - 1, len(whole), len(whole) + 1):
        again = made(name, 77, dataset, options)
        again.load_state_dict(json.loads(json.dumps(states[number])))  # plain values, nothing else
        rest = [] if number > len(whole) else [whole[number:]]
        assert epochs(again, 0, 2 + len(rest)) == [*rest, *following], number
        again.load_state_dict(states[number])  # with workers that are there, where they are persistent
        assert epochs(again, 2 - len(rest), 3) == [*rest, following[0]], number
        again.close()


@pytest.mark.processes
def test_the_rest_comes_from_a_sampler_that_changes_its_batches(cached):
    """Batches that the worker had drawn ahead, too, are those that the sampler gave."""
    first, again = (
        CachedLoader(cached, batch_sampler=OneList(), **WORKER),
        CachedLoader(cached, batch_sampler=OneList()),
    )
    batches = iter(first)
    next(batches)
    again.load_state_dict(first.state_dict())
    assert same(list(again), list(batches))


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    length=st.integers(1, 60),
    before=st.tuples(st.integers(1, 7), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 7), st.integers(1, 4)),
    kind=st.sampled_from(["distributed", "locality", "dealt"]),
)
def test_another_size_goes_on_after_the_same_samples(data, length, before, after, kind):
    """All ranks together go on after the samples that were given; at most what does not divide by them comes twice."""

    def ranks(batch_size: int, world: int) -> list[CachedLoader]:
        numbers: Any = [torch.tensor(number) for number in range(length)]
        draws = random.Random(7).sample(range(length), length) if kind == "dealt" else None  # a list of the user's
        samplers = [
            DistributedSampler(numbers, world, rank, seed=3)
            if kind == "distributed"
            else locality_sampler(numbers, batch_size, True, world, rank, draws=draws)
            for rank in range(world)
        ]
        return [CachedLoader(numbers, batch_size, sampler=sampler) for sampler in samplers]

    then, now = ranks(*before), ranks(*after)
    steps = data.draw(st.integers(0, len(then[0])))
    for epoch in (0, 2):  # the first one is broken off, too
        for loader in then:
            loader.set_epoch(epoch)
        given = [[next(batches).tolist() for _ in range(steps)] for batches in map(iter, then)]
    left = []
    for loader in now:
        loader.load_state_dict(then[0].state_dict())
        left.append([batch.tolist() for batch in loader])
    seen = [index for batches in given for batch in batches for index in batch]
    rest = [index for batches in left for batch in batches for index in batch]
    assert set(seen) | set(rest) == set(range(length))
    assert len({len(batches) for batches in left}) == 1, "a rank that has more batches than another would hang"
    twice = len(seen) + len(rest) - length
    assert twice <= (before[1] - 1) + 2 * (after[1] - 1)  # both pad their epoch


def test_what_is_no_state_is_refused():
    """A state of something else, or of another version, is an error that says so."""
    loader = CachedLoader(NUMBERS)
    for state in (None, {"version": 1, "batches": 3}, loader.state_dict() | {"version": 2}):
        with pytest.raises(ValueError, match="state_dict must be what the state_dict of a CachedLoader gave, got "):
            loader.load_state_dict(state)


def test_a_sampler_is_told_its_epoch_once():
    """`set_epoch` tells the loader's sampler, also one inside of a batch sampler, and tells it once."""

    class Told(DistributedSampler):  # type: ignore[type-arg]
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    sampler = Told(NUMBERS, 1, 0)
    for arguments in ({"batch_size": 4, "sampler": sampler}, {"batch_sampler": BatchSampler(sampler, 4, False)}):
        told: list[int] = []
        CachedLoader(NUMBERS, **arguments).set_epoch(3)  # type: ignore[arg-type]
        assert told == [3]
