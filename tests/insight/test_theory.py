"""Predicted hit rates: closed forms, and their agreement with dealt batches."""

import math

import numpy as np
import pytest
import torch

from lightning_stocache.cache.domain import Domain
from lightning_stocache.cache.placement import NO_SLOT, Ring
from lightning_stocache.insight.theory import expected_hit_rate, moved_share
from tests.insight.simulation import simulated


def equal(nodes, part, size=100_000):
    return Ring.cut(size, [1 / nodes] * nodes, [round(size * part)] * nodes)


def ranks(nodes):
    return tuple((rank,) for rank in range(nodes))


@pytest.mark.parametrize("mode", ["locality", "global", "sticky"])
def test_nothing_is_hit_in_epoch_one(mode):
    """In the first epoch nothing is cached, whatever the mode."""
    assert expected_hit_rate(equal(4, 1), [0.25] * 4, 0, mode=mode) == 0


def test_locality_pays_the_moved_share_twice_in_epoch_two():
    """Epoch two loses the samples that are moved now and those that were moved in epoch one; later ones the former."""
    ring, shares = equal(4, 0.25), [0.25] * 4
    rates = [expected_hit_rate(ring, shares, epoch, moved=0.022) for epoch in (1, 2, 3)]
    assert rates == pytest.approx([0.956, 0.978, 0.978], abs=0.001)


def test_locality_reaches_what_share_and_memory_allow():
    """With nothing moved, a node hits the smaller of what it trains on and what it holds."""
    ring = Ring.cut(1000, [0.5, 0.25, 0.25], [300, 500, 250])
    assert expected_hit_rate(ring, [0.5, 0.25, 0.25], 1) == pytest.approx(0.3 + 0.25 + 0.25)
    assert expected_hit_rate(ring, [0.5, 0.25, 0.25], 1, moved=0.5, mode="sticky") == pytest.approx(0.8)
    assert expected_hit_rate(Ring.cut(10, [0.5, 0.5], [0, 0]), [0.5, 0.5], 3, moved=0.1) == 0


def test_one_node_moves_nothing():
    """On one node the hit rate is the part that fits, in epoch two already, and no share moves."""
    assert expected_hit_rate(equal(1, 0.6), [1.0], 1, moved=0.3) == pytest.approx(0.6)
    assert moved_share(equal(1, 0.6), ((0, 1),), 32) == 0


def test_random_deal_fills_by_and_by():
    """Dealt at random, a node has met `1 - (1 - s)^e` of its slots' indices after e epochs."""
    rates = [expected_hit_rate(equal(4, 0.25), [0.25] * 4, epoch, mode="global") for epoch in (1, 2, 1000)]
    assert rates == pytest.approx([0.0625, 0.109375, 0.25])
    uneven = expected_hit_rate(Ring.cut(100, [0.75, 0.25], [50, 100]), [0.75, 0.25], 2, mode="global")
    assert uneven == pytest.approx(0.75 * 0.5 * (1 - 0.25**2) + 0.25 * 1 * (1 - 0.75**2))


def test_a_cache_per_rank_is_a_random_deal_to_nodes_of_one_rank():
    """Full caches that do not share anything reach 1 - (1 - 1/R)^e."""
    rates = [expected_hit_rate(equal(4, 1), [0.25] * 4, epoch, mode="global") for epoch in (1, 2, 3)]
    assert rates == pytest.approx([1 - 0.75**epoch for epoch in (1, 2, 3)])


@pytest.mark.parametrize(
    ("nodes", "batch_size", "share"), [(2, 256, 0.017), (4, 256, 0.021), (8, 64, 0.047), (32, 32, 0.069)]
)
def test_moved_share_is_that_of_the_formula(nodes, batch_size, share):
    """Dealt batches move the share that the normal approximation gives, for nodes that hold the dataset once."""
    moved = moved_share(equal(nodes, 1 / nodes), ranks(nodes), batch_size, batches=400)
    assert moved == pytest.approx(share, abs=0.002)
    assert moved == pytest.approx(math.sqrt((nodes - 1) / (2 * math.pi * nodes * batch_size)), rel=0.06)


def test_moved_share_of_small_datasets_is_smaller():
    """A batch that is a large part of the dataset is closer to its proportions: the whole dataset moves nothing."""
    assert moved_share(equal(4, 0.25, size=1024), ranks(4), 256) == 0
    assert 0 < moved_share(equal(4, 0.25, size=2048), ranks(4), 256) < 0.017
    assert moved_share(equal(4, 0.25, size=3), ranks(4), 256) == 0


def test_overlapping_arcs_move_nothing():
    """Where a neighbour has the surplus too, no sample goes to a node that lacks it."""
    assert moved_share(equal(3, 0.5), ranks(3), 256) < 0.001


def test_of_a_domain_as_much_is_moved_as_of_a_dataset_of_its_size():
    """A tenth of a dataset, on two nodes with half of the tenth each."""
    domain = Domain(np.arange(7, 100_000, 10), 100_000)
    part = Ring.cut(len(domain), [0.5, 0.5], [5_000, 5_000], domain)
    assert moved_share(part, ranks(2), 64) == moved_share(equal(2, 0.5, size=10_000), ranks(2), 64) > 0.02


def test_what_nodes_cannot_hold_or_train_on_is_not_moved():
    """The moved share counts what levelling loses, neither uncached samples nor memory beyond a node's training."""
    assert moved_share(equal(4, 0.125), ranks(4), 256) < 0.001
    uneven = Ring.cut(100_000, [1 / 3] * 3, [10_000, 90_000, 10_000])
    assert moved_share(uneven, ranks(3), 256) < 0.005


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shares": [1.0]}, "shares must have one number for each of the 2 arcs"),
        ({"epoch": -1}, "epoch must be 0 or more, got -1"),
        ({"moved": 1.5}, "moved must be between 0 and 1, got 1.5"),
        ({"drawn": [1.0, 1.0]}, "drawn must have one share for each of the 1 epochs before"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message):
    """An argument out of range is refused by name, with the value."""
    with pytest.raises(ValueError, match=message):
        expected_hit_rate(**{"ring": equal(2, 0.5), "shares": [0.5, 0.5], "epoch": 1, **changed})


def test_a_part_of_the_dataset_per_epoch_is_met_by_and_by():
    """Epochs of half, a third and all of the samples, anew each time: what is expected is what a simulation says."""
    parts, generator = (0.5, 1 / 3, 0.5, 1.0, 0.5), torch.Generator().manual_seed(0)
    for fits in (1, 0.6):
        ring = equal(1, fits, size=30_000)
        has_slot = ring.arcs[0].slots_of(np.arange(30_000)) != NO_SLOT
        epochs = [torch.randperm(30_000, generator=generator)[: round(30_000 * part)] for part in parts]
        expected = [expected_hit_rate(ring, [1.0], epoch, drawn=parts[:epoch]) for epoch in range(5)]
        assert expected == pytest.approx(simulated(has_slot, epochs), abs=0.01)
        assert expected[4] == pytest.approx(fits)


def test_a_part_of_the_dataset_is_dealt_to_nodes_that_meet_theirs():
    """With half of the samples per epoch, two nodes meet half of what they would meet, in each mode."""
    ring, shares, halves = equal(2, 0.5), [0.5, 0.5], (0.5, 0.5)
    assert expected_hit_rate(ring, shares, 2, mode="sticky", drawn=halves) == pytest.approx(0.75)
    assert expected_hit_rate(ring, shares, 2, mode="global", drawn=halves) == pytest.approx(0.5 * (1 - 0.75**2))
    assert expected_hit_rate(ring, shares, 2, moved=0.02, drawn=halves) == pytest.approx(0.98 * (1 - 0.51**2), abs=0.01)
