"""Every epoch draws the resident samples: the same number on all ranks, and no sample twice on a node."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.node.group import NodeGroup
from lightning_stocache.sampling.residents import RollingSampler


def group_of(rank, nodes, said):
    """The group of a rank, whose exchange returns given values."""

    class Group(NodeGroup):
        def exchange(self, value):
            return said

    return Group(rank, nodes)


class Pool:
    """A pool with given resident slots for each epoch."""

    def __init__(self, residents: Sequence[Sequence[int]], group: NodeGroup | None = None) -> None:
        self.residents, self.group = list(residents), group or NodeGroup()

    def __len__(self) -> int:
        return len(self.residents[0])

    def resident(self):
        return np.array(self.residents[0])

    def begin_epoch(self):
        return np.array(self.residents.pop(0))

    def look_after(self):
        """Nothing to look after."""


def test_each_epoch_draws_what_is_resident_then():
    """Each resident sample comes once, in another order each time. The length is that of the epoch."""
    sampler = RollingSampler(Pool([range(50), range(50), [3, 5, 8]]))
    assert len(sampler) == 50
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert sorted(sampler) == [3, 5, 8]
    assert len(sampler) == 3


def test_the_order_follows_from_seed_and_epoch():
    """`set_epoch` decides."""
    sampler = RollingSampler(Pool([range(50)] * 3))
    first, _ = list(sampler), list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(RollingSampler(Pool([range(50)]), seed=1)) != first
    assert list(RollingSampler(Pool([range(50)]), shuffle=False)) == list(range(50))


def test_a_fixed_number_is_drawn_again_and_again():
    """With `epoch_samples` all epochs have that length. Each round is another permutation."""
    sampler = RollingSampler(Pool([range(4), range(40)]), epoch_samples=10)
    assert len(sampler) == 10
    drawn = list(sampler)
    assert sorted(drawn[:4]) == sorted(drawn[4:8]) == [0, 1, 2, 3]
    assert len(drawn) == 10
    assert len(set(sampler)) == 10


def test_a_length_stays_while_it_is_fixed():
    """A fixed length holds where more or fewer samples are resident by then. Fewer come in several rounds."""
    sampler = RollingSampler(Pool([range(9), range(4), range(3)]))
    sampler.fixed = 6
    more, fewer = list(sampler), list(sampler)
    assert len(set(more)) == 6
    assert sorted(fewer[:4]) == [0, 1, 2, 3]
    assert len(fewer) == len(sampler) == 6
    sampler.fixed = None
    assert sorted(sampler) == [0, 1, 2]


@given(
    ranks=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    extra=st.lists(st.integers(0, 20), min_size=3, max_size=3),
    epoch_samples=st.none() | st.integers(1, 30),
)
def test_all_ranks_draw_the_same_number_and_none_twice_on_a_node(ranks, extra, epoch_samples):
    """Nodes may differ in their resident samples. The shares of a node's ranks are disjoint."""
    nodes, first = [], 0
    for count in ranks:
        nodes.append(tuple(range(first, first + count)))
        first += count
    residents = [count + more for count, more in zip(ranks, extra, strict=False)]
    said = [residents[node] // len(group) for node, group in enumerate(nodes) for _ in group]
    drawn = {}
    for rank in range(first):
        group = group_of(rank, tuple(nodes), said)
        drawn[rank] = list(RollingSampler(Pool([range(residents[group.node])] * 2, group), epoch_samples=epoch_samples))
    assert {len(indices) for indices in drawn.values()} == {min(said) if epoch_samples is None else epoch_samples}
    if epoch_samples is None:
        for group in nodes:
            together = [index for rank in group for index in drawn[rank]]
            assert len(set(together)) == len(together)


def test_fewer_samples_than_ranks_are_an_error():
    """An epoch without a batch for some rank would hang the others."""
    with pytest.raises(RuntimeError, match="fewer samples resident than ranks"):
        RollingSampler(Pool([[1]], group_of(0, ((0, 1),), [0, 0])))
