"""An arc gives every slot to one index, without a table; a domain is a set of indices that costs little to send."""

import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.cache.placement import NO_RANK, NO_SLOT, Arc, Domain, Ring

sizes = st.integers(1, 300)


@st.composite
def rings(draw: st.DrawFn) -> Ring:
    """Any number of indices, or some of a dataset's; nodes of any number of ranks, and of slots for each."""
    length = draw(sizes)
    drawn = draw(st.none() | st.lists(st.integers(-length, length - 1), min_size=1, max_size=length))
    domain = None if drawn is None else Domain(drawn, length)
    size = length if domain is None else len(domain)
    ranks = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    slots = draw(st.lists(st.integers(0, 2 * size), min_size=len(ranks), max_size=len(ranks)))
    return Ring.cut(size, [own / sum(ranks) for own in ranks], slots, domain)


def indices_of(arc: Arc) -> set[int]:
    """The indices that may have a slot."""
    return set(range(arc.length)) if arc.domain is None else set(arc.domain.indices.tolist())


@given(ring=rings())
def test_every_slot_belongs_to_exactly_one_index(ring: Ring) -> None:
    """Each slot leads to one drawn index and back. Other indices have no slot."""
    for arc in ring.arcs:
        slots = {index: arc.slot(index) for index in range(arc.length)}
        held = {index: slot for index, slot in slots.items() if slot != NO_SLOT}
        assert sorted(held.values()) == list(range(arc.slots))
        assert held.keys() <= indices_of(arc)
        assert all(arc.index(slot) == index for index, slot in held.items())


@given(ring=rings())
def test_many_indices_are_placed_as_one_is(ring: Ring) -> None:
    """`slots_of` is `slot` for each index, whatever the integer type and shape of the array; outside there is none."""
    for arc in ring.arcs:
        expected = [arc.slot(index) for index in range(arc.length)]
        for dtype in (np.int64, np.int32):
            indices = np.arange(arc.length, dtype=dtype)
            slots = arc.slots_of(indices)
            assert slots.dtype == np.int64
            assert slots.tolist() == expected
            assert arc.slots_of(indices.reshape(-1, 1)).tolist() == [[slot] for slot in expected]
            assert indices.tolist() == list(range(arc.length))
        assert [arc.slot(index) for index in range(-arc.length, arc.length)] == expected * 2
        assert arc.slot(arc.length) == arc.slot(-arc.length - 1) == NO_SLOT
        if arc.domain is not None:
            assert arc.slots_of(np.arange(-arc.length, arc.length)).tolist() == expected * 2


@given(ring=rings())
def test_coverage_is_the_share_of_indices_that_have_a_home(ring: Ring) -> None:
    """Coverage equals what counting every index that is drawn on every node gives."""
    indices = indices_of(ring.arcs[0])
    homes = sum(any(arc.slot(index) != NO_SLOT for arc in ring.arcs) for index in indices)
    assert ring.coverage == pytest.approx(homes / len(indices))


@given(size=sizes, ranks=st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_arcs_as_long_as_the_shares_cover_everything_once(size: int, ranks: list[int]) -> None:
    """With slots for exactly its share of the indices on every node, each index lives on one node."""
    ends = [round(Fraction(size * sum(ranks[: node + 1]), sum(ranks))) for node in range(len(ranks))]
    slots = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    ring = Ring.cut(size, [own / sum(ranks) for own in ranks], slots)
    homes = [sum(arc.slot(index) != NO_SLOT for arc in ring.arcs) for index in range(size)]
    assert sum(homes) == size
    assert ring.coverage == 1
    assert homes == [1] * size


@given(
    size=st.one_of(st.integers(1, 5000), st.sampled_from([2775, 16_384, 30_030, 65_536, 510_510, 1_281_167])),
    share=st.floats(0, 1),
)
def test_a_class_sorted_dataset_is_cached_evenly(size: int, share: float) -> None:
    """Of any block of consecutive indices (a class of a sorted folder) an arc takes its share, to within 8."""
    arc = Ring.cut(size, (1.0,), (round(size * share),)).arcs[0]
    taken = np.zeros(size + 1)
    taken[1:] = (arc.slots_of(np.arange(size)) != NO_SLOT).cumsum(0)
    surplus = taken - np.arange(size + 1) * (arc.slots / size)  # up to each index; a block's is a difference of two
    assert surplus.max() - surplus.min() <= 8


@pytest.mark.parametrize("size", [10**9, 3 * 10**9 + 17, 3_800_000_000])
def test_billions_of_indices_do_not_overflow(size: int) -> None:
    """In 64 bits the slots of many indices are those of exact arithmetic."""
    arc = Ring.cut(size, (0.5, 0.5), (size // 3, size)).arcs[1]
    indices = [0, 1, size // 2, size - 2, size - 1, *range(7, size, size // 97)]
    assert arc.slots_of(np.array(indices)).tolist() == [arc.slot(index) for index in indices]
    assert all(arc.slot(index) == (index * arc.step - arc.start) % size for index in indices)


def test_more_indices_than_64_bits_can_place_are_refused() -> None:
    """The constructor refuses sizes for which 64-bit arithmetic would be wrong."""
    with pytest.raises(ValueError, match=r"size \* step below 2\*\*63, .*got Arc\(size=4000000000"):
        Ring.cut(4 * 10**9, (1.0,), (10,))
    assert Arc(4 * 10**9, 10).slot(9) == 9  # in the order of the dataset there is room


@pytest.mark.parametrize(
    "arguments", [{"slots": 11}, {"slots": -1}, {"start": 10}, {"step": 4}, {"domain": Domain([1, 2], 15)}]
)
def test_impossible_arcs_are_refused(arguments: dict[str, Any]) -> None:
    """The error tells the rule and the numbers."""
    with pytest.raises(ValueError, match=r"an arc needs slots of 0 to size.*got Arc\(size=10, slots="):
        Arc(**{"size": 10, "slots": 1} | arguments)


def test_every_process_lays_the_same_ring() -> None:
    """The placement is fixed: a cache that is read by another process finds its samples."""
    ring = Ring.cut(1000, (0.25, 0.75), (100, 900))
    assert [(arc.start, arc.slots, arc.step) for arc in ring.arcs] == [(0, 100, 633), (250, 900, 633)]


# ---- domains ----


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
    """An unpickled domain is equal, has the same digest and hash, and is read-only."""
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
    """The error for a mask, fractions, or indices of another dataset tells the rule."""
    with pytest.raises(ValueError, match=words):
        Domain(indices, 10)
