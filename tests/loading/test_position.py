"""A loader that goes on where another one stood gives the batches that would have come."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, SubsetRandomSampler

from lightning_stocache import CachedDataset, CachedLoader, SampleSpec
from lightning_stocache.cache.placement import Domain, Ring
from lightning_stocache.loading.loader_sampler import locality_sampler
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from tests.loading.twins import SAMPLERS, seed_all, with_batches

LENGTH = 23
FOLD = range(2, 18)
NUMBERS: Any = [torch.tensor(number) for number in range(LENGTH)]


def dealt(draws: Any, rank: int, batch_size: int = 4) -> LocalitySampler:
    """One of two ranks, each a node with a half of a fold."""
    fold = Domain(FOLD, LENGTH)
    ring = Ring.cut(len(FOLD), (0.5, 0.5), (8, 8), fold)
    return LocalitySampler(NUMBERS, 2, rank, batch_size=batch_size, ring=ring, nodes=((0,), (1,)), draws=draws)


def dealing(name: str) -> Callable[[Any], dict[str, Any]]:
    """A sampler whose indices are dealt."""
    return lambda indices: SAMPLERS[name](indices) | {"sampling": "locality"}


WAYS = SAMPLERS | {
    "locality": dealing("shuffle"),
    "a dealt fold": dealing("subset"),
    "dealt, own generator": dealing("own generator"),
    "dealt, two ranks": lambda indices: {"sampler": dealt(SubsetRandomSampler(indices), 1)},
}


def made(name: str, dataset: Any = NUMBERS, **more: Any) -> Any:
    """A loader as it is in a process of its own, whose generators are where they are by chance."""
    return CachedLoader(dataset, **with_batches(WAYS[name](range(LENGTH)), batch_size=4), **more)


def made_elsewhere(state: Any, name: str, dataset: Any = NUMBERS, **more: Any) -> Any:
    """Such a loader in another process, which is to go on from a state."""
    torch.manual_seed(77), np.random.seed(77), random.seed(77)  # type: ignore[func-returns-value]
    loader = made(name, dataset, **more)
    loader.load_state_dict(json.loads(json.dumps(state)))  # plain values, nothing else
    return loader


def epochs(loader: Any, begin: int, end: int) -> list[list[Any]]:
    """The batches of some epochs, each told its number."""
    batches = []
    for epoch in range(begin, end):
        loader.set_epoch(epoch)
        batches.append([batch.tolist() for batch in loader])
    return batches


@pytest.fixture(params=["cached", "plain"])
def dataset(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Where batches are made by the package, and where by DataLoader."""
    if request.param == "plain":
        yield NUMBERS
        return
    cached = CachedDataset(NUMBERS, spec=SampleSpec.infer(NUMBERS[0]))
    yield cached
    cached.close()


@pytest.mark.parametrize("name", WAYS)
def test_the_rest_comes_from_any_moment(dataset, name):
    """From a state that is taken when an epoch begins, after any of its batches or at its end, a loader in a process
    with other random states gives what is left of that epoch, and the next one."""
    seed_all()
    first = made(name, dataset)
    first.set_epoch(0)
    batches, whole = iter(first), list[Any]()
    states = [first.state_dict()]  # begun, and nothing handed out
    for batch in batches:
        whole.append(batch.tolist())
        states.append(first.state_dict())
    states.append(first.state_dict())
    following = epochs(first, 1, 2)
    assert len(whole) > 2
    for number, state in enumerate(states):
        again = made_elsewhere(state, name, dataset)
        if number > len(whole):
            assert epochs(again, 1, 2) == following
        else:
            assert epochs(again, 0, 2) == [whole[number:], *following], number


@pytest.mark.parametrize(
    ("name", "persistent"),
    [("shuffle", True), ("a generator", False), ("lazy", True), ("own generator", False), ("locality", True)],
)
@pytest.mark.processes
def test_workers_draw_on_from_where_they_had_drawn(dataset, name, persistent):
    """What workers have loaded and nobody has been given comes again. What they had drawn ahead is drawn again before
    the generators go on, and persistent workers, which draw no seed between two epochs, draw none after a break."""
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": persistent}
    seed_all()
    first = made(name, dataset, **options)
    whole, states = list[Any](), list[Any]()
    for batch in first:
        whole.append(batch.tolist())
        states.append(first.state_dict())
    states.append(first.state_dict())
    following = epochs(first, 1, 3)
    for number in (2, len(whole) - 1, len(whole) + 1):  # the last: at the epoch's end
        again = made_elsewhere(states[number - 1], name, dataset, **options)
        rest = [] if number > len(whole) else [whole[number:]]
        assert epochs(again, 1 - len(rest), 3) == [*rest, *following], number
        again.load_state_dict(states[number - 1])  # with workers that are there, where they are persistent
        assert epochs(again, 1 - len(rest), 2) == [*rest, following[0]], number
        again.close()


@pytest.mark.parametrize("dataset", ["cached"], indirect=True)
def test_an_epoch_that_was_closed_has_not_ended(dataset):
    """Who asks a closed iterator for more gets nothing, and the position stays where it was."""
    loader = made("shuffle", dataset)
    batches = iter(loader)
    got = [next(batches).tolist()]
    batches.close()
    assert next(batches, None) is None
    again = made_elsewhere(loader.state_dict(), "shuffle", dataset)
    assert sorted(chain(*got, *(batch.tolist() for batch in again))) == list(range(LENGTH))


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    length=st.integers(1, 60),
    before=st.tuples(st.integers(1, 7), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 7), st.integers(1, 4)),
    kind=st.sampled_from(["distributed", "locality"]),
)
def test_another_size_goes_on_after_the_same_samples(data, length, before, after, kind):
    """With another batch size and other ranks, all ranks together go on after the samples that were given; what does
    not divide by the ranks of now, at most, comes twice."""

    def ranks(batch_size: int, world: int) -> list[CachedLoader]:
        numbers: Any = [torch.tensor(number) for number in range(length)]
        samplers = [
            DistributedSampler(numbers, world, rank, seed=3)
            if kind == "distributed"
            else locality_sampler(numbers, batch_size, True, world, rank)
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


@pytest.mark.parametrize("start", [0, 2], ids=["absolute", "from zero"])
def test_callers_may_count_epochs_on_or_from_zero(start):
    """Where each process counts epochs from zero, as Fabric does, later epochs are those that would have come."""
    first = made("distributed")
    whole = epochs(first, 0, 5)
    first.set_epoch(2)
    batches = iter(first)
    for _ in range(2):
        next(batches)
    again = made_elsewhere(first.state_dict(), "distributed")
    assert epochs(again, 2 - start, 5 - start) == [whole[2][2:], *whole[3:]]


WHOLE = {"version": 1, "batches": 2, "batch_size": 4, "replicas": 1, "length": 23}


@pytest.mark.parametrize("state", [{}, None, {"batches": 3}, {"_snapshot": {}}, WHOLE | {"version": 2}])
def test_what_is_no_state_is_refused(state):
    """A state of something else is an error that says so."""
    with pytest.raises(ValueError, match="state_dict must be what the state_dict of a CachedLoader gave, got "):
        CachedLoader(NUMBERS).load_state_dict(state)


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


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_fold_that_is_dealt_to_nodes_goes_on_after_the_same_samples(batch_size: int) -> None:
    """With another batch size, too, the ranks train together on what was left of the fold."""
    before, after = list[int](), list[int]()
    for rank in (0, 1):
        torch.manual_seed(3)
        loader = CachedLoader(NUMBERS, 2, sampler=dealt(SubsetRandomSampler(FOLD), rank, 2))
        drawing = iter(loader)
        before += [number for _ in range(2) for number in next(drawing).tolist()]
        state = loader.state_dict()
        torch.manual_seed(rank)  # what the order was drawn from is in the state
        resumed = CachedLoader(NUMBERS, batch_size, sampler=dealt(SubsetRandomSampler(FOLD), rank, batch_size))
        resumed.load_state_dict(state)
        after += [number for batch in resumed for number in batch.tolist()]
    assert len(before) == 8
    assert sorted(before + after) == list(FOLD)
