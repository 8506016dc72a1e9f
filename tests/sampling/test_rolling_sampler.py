"""Every epoch draws the resident samples: the same number on all ranks, and no sample twice on a node."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.node.group import NodeGroup
from lightning_stocache.sampling.residents import RollingSampler


class Pool(list):
    """A pool: the resident slots of each epoch that is to come."""

    group = NodeGroup()

    def resident(self):
        return np.array(self[0])

    def begin_epoch(self):
        return np.array(self.pop(0))

    def look_after(self):
        """Nothing to look after."""


def test_each_epoch_draws_what_is_resident_then():
    """Each resident sample comes once, in an order that follows from seed and epoch. The length is the epoch's."""
    sampler = RollingSampler(Pool([*[range(50)] * 3, [3, 5, 8]]))
    assert len(sampler) == 50
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert sorted(sampler) == [3, 5, 8]
    assert len(sampler) == 3
    assert list(RollingSampler(Pool([range(50)]), seed=1)) != first
    assert list(RollingSampler(Pool([range(50)]), shuffle=False)) == list(range(50))


def test_a_fixed_number_is_drawn_again_and_again():
    """With `epoch_samples`, or while the length is fixed, all epochs have that length where more or fewer samples are
    resident. Fewer come in several rounds, each of which is another permutation."""
    sampler = RollingSampler(Pool([range(4), range(40)]), epoch_samples=10)
    assert len(sampler) == 10
    drawn = list(sampler)
    assert sorted(drawn[:4]) == sorted(drawn[4:8]) == [0, 1, 2, 3]
    assert len(drawn) == 10
    assert len(set(sampler)) == 10
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
    """Nodes may differ in their resident samples. The shares of a node's ranks are disjoint. Fewer samples than ranks
    are an error: an epoch without a batch for some rank would hang the others."""
    nodes, numbers = [], iter(range(sum(ranks)))
    for count in ranks:
        nodes.append(tuple(islice(numbers, count)))
    residents = [count + more for count, more in zip(ranks, extra, strict=False)]
    said = [residents[node] // len(group) for node, group in enumerate(nodes) for _ in group]

    class Group(NodeGroup):
        def exchange(self, value):
            return said

    drawn = {}
    for rank in range(sum(ranks)):
        group = Group(rank, tuple(nodes))
        pool = Pool([range(residents[group.node])] * 2)
        pool.group = group
        drawn[rank] = list(RollingSampler(pool, epoch_samples=epoch_samples))
    assert {len(indices) for indices in drawn.values()} == {min(said) if epoch_samples is None else epoch_samples}
    if epoch_samples is None:
        for group in nodes:
            together = [index for rank in group for index in drawn[rank]]
            assert len(set(together)) == len(together)
    said = [0] * sum(ranks)
    with pytest.raises(RuntimeError, match="fewer samples resident than ranks"):
        RollingSampler(pool)
