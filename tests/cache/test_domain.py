"""A domain is a set of indices, with a rank for each, that costs little to send."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.cache.placement import NO_RANK, Domain


@st.composite
def parts(draw: st.DrawFn, length: int | None = None) -> Domain:
    """Some of the indices of a dataset, in any order, some more than once, some counted from the end."""
    length = draw(st.integers(1, 500)) if length is None else length
    return Domain(draw(st.lists(st.integers(-length, length - 1), max_size=60)), length)


@given(domain=parts())
def test_ranks_are_the_order_of_the_dataset(domain: Domain) -> None:
    """The indices of a domain have the ranks 0, 1, 2 ..., all others have none, one by one or many at once."""
    order = {index: rank for rank, index in enumerate(sorted(domain.indices.tolist()))}
    expected = [order.get(index, NO_RANK) for index in range(domain.length)]
    assert [domain.rank(index) for index in range(domain.length)] == expected
    assert domain.ranks(np.arange(domain.length)).tolist() == expected


@given(domain=parts())
def test_a_domain_is_the_same_in_another_process(domain: Domain) -> None:
    """What comes out of a pickle is equal, has the same digest and hash, and is as read-only."""
    other = pickle.loads(pickle.dumps(domain))
    assert other == domain
    assert (other.digest, hash(other)) == (domain.digest, hash(domain))
    with pytest.raises(ValueError, match="read-only"):
        other.indices[:] = 0


def test_many_indices_are_sent_as_bits() -> None:
    """Half a million of a million indices travel in an eighth of a megabyte."""
    assert len(pickle.dumps(Domain(np.arange(0, 10**6, 2), 10**6))) < 130_000


@given(st.data())
def test_unions_and_subsets_are_those_of_sets(data: st.DataObject) -> None:
    """`|` and `covers` do what they do with sets."""
    left, right = data.draw(parts(100)), data.draw(parts(100))
    sets = [set(domain.indices.tolist()) for domain in (left, right)]
    assert set((left | right).indices.tolist()) == sets[0] | sets[1]
    assert left.covers(right) == (sets[0] >= sets[1])
    assert (left == right) == (sets[0] == sets[1])
    assert left.covers(None) == (len(sets[0]) == 100) == left.is_whole


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([1, 10], "must lie in the dataset of 10 samples, got 10"),
        ([-11], "must lie in the dataset of 10 samples, got -11"),
        ([0.5], "must be whole numbers, one after the other; got float64"),
        ([[1, 2], [3, 4]], r"must be whole numbers, one after the other; got int64 \(2, 2\)"),
        ([True, False], "must be whole numbers, one after the other; got bool"),
    ],
)
def test_what_are_no_indices_is_refused(indices: list[int], words: str) -> None:
    """A mask, fractions, or indices of another dataset are named with the rule."""
    with pytest.raises(ValueError, match=words):
        Domain(indices, 10)
