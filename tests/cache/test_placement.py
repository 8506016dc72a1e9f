"""An arc gives every slot to one index, without a table; a domain is a set of indices that costs little to send."""

import pickle
import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
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


@given(ring=rings())
def test_every_slot_belongs_to_exactly_one_index(ring: Ring) -> None:
    """Each slot leads to one drawn index and back; other indices, and those outside, have no slot. Many indices have
    the slots that each has, whatever the integer type and shape of the array. Coverage counts what has a home."""
    domain = ring.arcs[0].domain
    drawn = set(range(ring.arcs[0].length) if domain is None else domain.indices.tolist())
    homes = set[int]()
    for arc in ring.arcs:
        every = range(-arc.length, arc.length)
        expected = [arc.slot(index) for index in every]
        held = {index: slot for index, slot in zip(every, expected, strict=True) if slot != NO_SLOT}
        assert sorted(held.values()) == list(range(arc.slots))
        assert held.keys() <= drawn
        assert all(arc.index(slot) == index for index, slot in held.items())
        assert set(expected[: arc.length]) == {NO_SLOT}  # -1 may be the source's own padding
        assert arc.slot(arc.length) == arc.slot(-arc.length - 1) == NO_SLOT
        homes |= held.keys()
        for dtype in (np.int64, np.int32):
            indices = np.array(every, dtype=dtype)
            slots = arc.slots_of(indices.reshape(2, -1))
            assert slots.dtype == np.int64
            assert slots.reshape(-1).tolist() == expected
            assert indices.tolist() == list(every)
    assert ring.coverage == pytest.approx(len(homes) / len(drawn))


@given(size=sizes, ranks=st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_arcs_as_long_as_the_shares_cover_everything_once(size: int, ranks: list[int]) -> None:
    """With slots for exactly its share of the indices on every node, each index lives on one node."""
    ends = [round(Fraction(size * sum(ranks[: node + 1]), sum(ranks))) for node in range(len(ranks))]
    slots = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    ring = Ring.cut(size, [own / sum(ranks) for own in ranks], slots)
    homes = [sum(arc.slot(index) != NO_SLOT for arc in ring.arcs) for index in range(size)]
    assert ring.coverage == 1
    assert homes == [1] * size


@example(size=1_281_167, share=0.37)
@given(size=st.one_of(st.integers(1, 5000), st.sampled_from([16_384, 30_030, 65_536])), share=st.floats(0, 1))
def test_a_class_sorted_dataset_is_cached_evenly(size: int, share: float) -> None:
    """Of any block of consecutive indices (a class of a sorted folder) an arc takes its share, to within 8."""
    arc = Ring.cut(size, (1.0,), (round(size * share),)).arcs[0]
    taken = np.zeros(size + 1)
    taken[1:] = (arc.slots_of(np.arange(size)) != NO_SLOT).cumsum(0)
    surplus = taken - np.arange(size + 1) * (arc.slots / size)  # up to each index; a block's is a difference of two
    assert surplus.max() - surplus.min() <= 8


@pytest.mark.parametrize("size", [10**9, 3 * 10**9 + 17, 3_800_000_000])
def test_billions_of_indices_do_not_overflow(size: int) -> None:
    """In 64 bits the slots of many indices are those of exact arithmetic, and they are the same for ever."""
    ring = Ring.cut(1000, (0.25, 0.75), (100, 900))
    assert [(arc.start, arc.slots, arc.step) for arc in ring.arcs] == [(0, 100, 633), (250, 900, 633)]
    arc = Ring.cut(size, (0.5, 0.5), (size // 3, size)).arcs[1]
    indices = [0, 1, size // 2, size - 2, size - 1, *range(7, size, size // 97)]
    assert arc.slots_of(np.array(indices)).tolist() == [arc.slot(index) for index in indices]
    assert all(arc.slot(index) == (index * arc.step - arc.start) % size for index in indices)


# ---- domains ----


lists = st.lists(st.integers(-100, 99), max_size=60)
ranges = st.builds(range, st.integers(0, 99), st.integers(0, 99), st.integers(1, 9)) | st.builds(
    range, st.integers(-1, 99), st.integers(-1, 99), st.integers(-9, -1)
)
domains = (lists | ranges).map(lambda indices: Domain(indices, 100))


@given(domain=domains, right=domains)
def test_domains_are_sets_in_the_order_of_the_dataset(domain: Domain, right: Domain) -> None:
    """The indices of a domain have the ranks 0, 1, 2 ..., all others have none; `|` and `covers` are those of sets."""
    order = {index: rank for rank, index in enumerate(sorted(domain.indices.tolist()))}
    expected = [order.get(index, NO_RANK) for index in range(100)]
    assert [domain.rank(index) for index in range(100)] == expected
    other = pickle.loads(pickle.dumps(domain))
    assert other.ranks(np.arange(100)).tolist() == expected
    assert (other, other.digest, hash(other)) == (domain, domain.digest, hash(domain))
    with pytest.raises(ValueError, match="read-only"):
        other.indices[:] = 0
    sets = [set(domain.indices.tolist()) for domain in (domain, right)]
    assert set((domain | right).indices.tolist()) == sets[0] | sets[1]
    assert domain.covers(right) == (sets[0] >= sets[1])
    assert (domain == right) == (sets[0] == sets[1])
    assert domain.covers(None) == (len(sets[0]) == 100) == domain.is_whole
    assert Domain(list(domain.indices), 100) == domain
    assert [domain[rank] for rank in range(len(domain))] == sorted(sets[0])
    assert domain.ranks(np.array([[-1, 100], [-101, 10**12]])).tolist() == [[NO_RANK] * 2] * 2


@pytest.mark.parametrize(
    "indices",
    [range(50), range(10**9 // 2, 10**9), range(0, 10**9, 2), [3, 10**9 - 1, 17], range(-4, 0), None],
    ids=["the first", "the second half", "every other", "three", "the last", "all"],
)
def test_a_long_dataset_costs_nothing_by_its_length(indices: Any) -> None:
    """An arc of a dataset of 10^9, or 10^12, samples has all its slots, and takes memory by what is drawn."""
    for length in (10**9, 10**12):
        tracemalloc.start()
        domain = None if indices is None else Domain(indices, length)
        size = length if domain is None else len(domain)
        arc = pickle.loads(pickle.dumps(Ring.cut(size, (0.5, 0.5), (8, 2), domain))).arcs[0]
        known = [arc.index(slot) for slot in range(arc.slots)]
        assert [arc.slot(index) for index in known] == arc.slots_of(np.array(known)).tolist() == list(range(arc.slots))
        assert domain is None or (domain | domain, domain.covers(domain), len(domain.digest)) == (domain, True, 16)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**20


def test_impossible_arcs_and_domains_are_refused() -> None:
    """The error for wrong sizes, masks, fractions and foreign indices tells the rule and the numbers."""
    wrong: list[dict[str, Any]] = [{"slots": 11}, {"slots": -1}, {"start": 10}, {"step": 4}, {"step": 2**61 + 1}]
    for arguments in (*wrong, {"domain": Domain([1, 2], 15)}):
        with pytest.raises(ValueError, match=r"an arc needs slots of 0 to size.*got Arc\(size=10, slots="):
            Arc(**{"size": 10, "slots": 1} | arguments)
    for indices, words in (
        ([1, 10], "must lie in the dataset of 10 samples, got 10"),
        ([-11], "must lie in the dataset of 10 samples, got -11"),
        ([0.5], "must be whole numbers, one after the other; got float64"),
        ([True, False], "must be whole numbers, one after the other; got bool"),
    ):
        with pytest.raises(ValueError, match=words):
            Domain(indices, 10)  # type: ignore[arg-type]
