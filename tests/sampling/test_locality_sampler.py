"""LocalitySampler: DistributedSampler's global batches, dealt to the nodes that have the samples."""

import inspect
from collections import Counter
from itertools import chain, islice
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch.utils.data import DistributedSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_stocache.cache.placement import Domain, Ring
from lightning_stocache.sampling.assignment import Dealer
from lightning_stocache.sampling.locality_sampler import LocalitySampler, Mode

MODES = get_args(Mode)


def nodes_of(*ranks_per_node):
    """Ranks 0, 1, ... laid over nodes with these many ranks each."""
    ranks = iter(range(sum(ranks_per_node)))
    return tuple(tuple(islice(ranks, number)) for number in ranks_per_node)


def ring_of(size, nodes, fractions, domain=None):
    """A ring of all indices, or of a domain, of which each node caches a fraction."""
    world, drawn = sum(map(len, nodes)), size if domain is None else len(domain)
    shares, slots = [len(ranks) / world for ranks in nodes], [round(drawn * part) for part in fractions]
    return Ring.cut(drawn, shares, slots, domain)


def samplers_of(size, nodes, fractions, batch_size, domain=None, **options):
    """The samplers of all ranks."""
    world = sum(map(len, nodes))
    options = {"batch_size": batch_size, "ring": ring_of(size, nodes, fractions, domain), "nodes": nodes} | options
    return [LocalitySampler(range(size), world, rank, **options) for rank in range(world)]


def epoch_of(sampler, epoch):
    """An epoch of a rank whose generators are those of the others."""
    torch.default_generator.manual_seed(epoch)  # torch.manual_seed asks each device, which takes longer than an epoch
    sampler.set_epoch(epoch)
    return list(sampler)


def pieces(order, batch_size):
    return [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]


def hit_rates(samplers, epochs):
    """Train for a few epochs with caches that are only filled by a node that has the slot and loads the sample."""
    ring, nodes = samplers[0].ring, samplers[0].nodes
    caches = np.zeros((len(nodes), ring.arcs[0].length), dtype=bool)
    rates = []
    for epoch in range(epochs):
        hits = served = 0
        for arc, ranks, cache in zip(ring.arcs, nodes, caches, strict=True):
            for rank in ranks:
                order = np.array(epoch_of(samplers[rank], epoch))
                hits += cache[order].sum()
                served += len(order)
                cache[order[arc.slots_of(order) >= 0]] = True
        rates.append(hits / served)
    return rates


LENGTH = 120

folds = st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=LENGTH)
worlds = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(lambda ranks: nodes_of(*ranks))
jobs = worlds.flatmap(
    lambda nodes: st.fixed_dictionaries(
        {
            "size": st.integers(0, 150),
            "nodes": st.just(nodes),
            "fractions": st.lists(st.sampled_from([0, 0.1, 0.3, 0.5, 1]), min_size=len(nodes), max_size=len(nodes)),
            "batch_size": st.integers(1, 20),
            "seed": st.integers(0, 3),
            "shuffle": st.booleans(),
            "drop_last": st.booleans(),
        }
    )
)
drawing = st.one_of(
    folds,
    folds.map(SubsetRandomSampler),
    st.integers(1, 9).map(lambda n: WeightedRandomSampler([float(i % n) + 0.1 for i in range(LENGTH)], 75)),
)


# ---- the order ----


@given(
    jobs,
    st.none() | drawing,
    st.none() | folds.map(lambda fold: Domain(fold, LENGTH)),
    st.sampled_from(MODES),
    st.sampled_from([{}, {}, {}, {"ring": None}]),
)
def test_global_batches_are_those_of_distributed_sampler_and_of_lightning(job, draws, domain, mode, without_ring):
    """Without a sampler of the user's or with any, whatever part of the dataset is on the ring: every global batch
    holds what DistributedSampler, or Lightning's wrapper, deals to the ranks for it, padding and tail included. On one
    node, without a ring, and in `global` mode each rank's order is theirs."""
    batch = job["batch_size"]
    samplers = samplers_of(**job | {"size": LENGTH}, domain=domain, mode=mode, draws=draws, **without_ring)
    options = {name: job[name] for name in ("seed", "shuffle", "drop_last")}
    kind, drawn_from = (DistributedSampler, range(LENGTH)) if draws is None else (DistributedSamplerWrapper, draws)
    plains = [kind(drawn_from, len(samplers), rank, **options) for rank in range(len(samplers))]
    mine, theirs = ([pieces(epoch_of(sampler, 1), batch) for sampler in kinds] for kinds in (samplers, plains))
    if mode == "global" or without_ring or len(job["nodes"]) == 1:
        assert mine == theirs
    assert [list(map(len, order)) for order in mine] == [list(map(len, order)) for order in theirs]
    if mode != "sticky":
        for dealt, drawn in zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True):
            assert Counter(chain(*dealt)) == Counter(chain(*drawn))


@settings(max_examples=40)
@given(jobs)
def test_sticky_nodes_keep_to_their_part(job):
    """In `sticky` mode a node sees the same part of the dataset in every epoch, and the parts make up the whole."""
    size, world = job["size"], sum(map(len, job["nodes"]))
    samplers = samplers_of(**job, mode="sticky")
    parts = []
    for ranks in job["nodes"]:
        orders = [list(chain(*(epoch_of(samplers[rank], epoch) for rank in ranks))) for epoch in range(2)]
        assert {len(order) for order in orders} == {samplers[0].num_samples * len(ranks)}
        if size >= world and not job["drop_last"]:
            assert set(orders[0]) == set(orders[1])
            parts.append(set(orders[0]))
    if parts:
        assert set().union(*parts) == set(range(size))
        assert sum(map(len, parts)) == size


@pytest.mark.parametrize("mode", MODES)
def test_skip_leaves_out_samples_of_the_next_iteration(mode):
    """`skip` leaves out that many samples at the beginning of the next iteration only, and the length stays. set_epoch
    after iter() changes nothing for the iteration that has begun, as in DistributedSampler."""
    for sampler in samplers_of(95, nodes_of(1, 1), [0.5, 0.3], 5, mode=mode):
        whole = epoch_of(sampler, 2)
        for batches in (0, 1, 4, 9, 10, 50):
            sampler.skip = batches * 5
            assert len(sampler) == 48
            assert list(sampler) == whole[batches * 5 :]
            begun = iter(sampler)
            sampler.set_epoch(1)
            assert list(begun) == whole
            sampler.set_epoch(2)


@pytest.mark.parametrize(
    ("keys", "mode"), [(["a", "b", "c", "d"], "global"), ([(0, 1), (2, 3)], "locality"), ([(0,), (1, 2)], "locality")]
)
def test_keys_that_are_no_indices_are_dealt_as_by_lightning(keys, mode):
    """What only the source understands has no place on a ring, and stays what it is."""
    samplers = samplers_of(LENGTH, nodes_of(1, 1), [0.5, 0.5], 1, mode=mode, draws=keys)
    assert list(map(list, samplers)) == [list(DistributedSamplerWrapper(keys, 2, rank)) for rank in (0, 1)]


# ---- the deal ----


@settings(max_examples=40)
@given(jobs)
def test_misses_are_even_within_a_node(job):
    """The ranks of a node have equally many misses in each batch, give or take one; `imbalance` counts all ranks."""
    size, nodes, batch_size = job["size"] + 1, job["nodes"], job["batch_size"]
    dealer = Dealer(ring_of(size, nodes, job["fractions"]), nodes)
    batch = np.random.default_rng(job["seed"]).integers(0, size, sum(map(len, nodes)) * batch_size)
    deal = dealer.deal(batch)
    misses = [[deal.misses[dealer.share(deal, rank, turn=3)].sum() for rank in ranks] for ranks in nodes]
    assert all(max(node) - min(node) <= 1 for node in misses)
    assert max(map(max, misses)) - min(map(min, misses)) == deal.imbalance


def test_sampler_reports_the_imbalance_of_its_latest_iteration():
    """`imbalance` is the largest difference of misses between two ranks in any batch of the latest iteration."""
    samplers = samplers_of(4096, nodes_of(1, 1, 1, 1), [0.25] * 4, 64)
    arcs, orders = samplers[0].ring.arcs, [np.array(epoch_of(sampler, 1)).reshape(-1, 64) for sampler in samplers]
    misses = np.stack([(arc.slots_of(order) < 0).sum(1) for arc, order in zip(arcs, orders, strict=True)])
    assert [sampler.imbalance for sampler in samplers] == [np.ptp(misses, axis=0).max()] * 4
    assert 0 < samplers[0].imbalance < 64


@settings(max_examples=60)
@given(jobs, st.none() | folds, st.lists(st.integers(0, LENGTH - 1), min_size=1))
def test_no_deal_hits_more(job, fold, batch):
    """As many indices of a batch go to a node that has them as in a maximum matching of indices and places; others, and
    those from outside of a fold, are misses wherever they go."""
    nodes = job["nodes"]
    batch = np.resize(np.array(batch), sum(map(len, nodes)) * job["batch_size"])
    ring = ring_of(LENGTH, nodes, job["fractions"], None if fold is None else Domain(fold, LENGTH))
    deal = Dealer(ring, nodes).deal(batch)
    has = np.stack([arc.slots_of(batch) >= 0 for arc in ring.arcs], axis=1)
    assert (deal.misses == ~has[np.arange(len(batch)), deal.nodes]).all()
    seats = np.repeat(has, [len(ranks) * job["batch_size"] for ranks in nodes], axis=1)
    assert (~deal.misses).sum() == (maximum_bipartite_matching(csr_matrix(seats), perm_type="column") >= 0).sum()


# ---- hit rates ----


@pytest.mark.parametrize(
    ("nodes", "fractions", "batch_size", "second", "third"),
    [
        ((2, 2, 2, 2), [0.25] * 4, 128, 0.95, 0.97),
        ((2, 2), [0.5, 0.5], 64, 1 - 2.2 * 0.025, 1 - 1.2 * 0.025),
        ((1, 1, 1), [0.5, 0.25, 0.25], 256, 5 / 6 - 0.02, 5 / 6 - 0.01),
        ((3, 1), [0.5, 0.5], 64, 0.75 - 0.025, 0.75 - 0.0125),
    ],
)
def test_memory_of_the_nodes_adds_up(nodes, fractions, batch_size, second, third):
    """Simulated with lazy filling, nodes that each hold a part of the dataset hit nearly all that they hold."""
    size = 32 * batch_size * sum(nodes)
    rates = hit_rates(samplers_of(size, nodes_of(*nodes), fractions, batch_size), 3)
    assert rates[0] == 0
    assert second <= rates[1] <= rates[2] + 0.01
    assert third <= rates[2] <= sum(min(s / sum(nodes), a) for s, a in zip(nodes, fractions, strict=True))


def test_overlapping_memory_ends_at_ninety_nine_percent():
    """Three nodes with half of the dataset each hit 0.99 once they have filled the edges of each other's parts. A node
    whose memory exceeds its training keeps to the same indices, so that its hits are there in epoch two."""
    rates = hit_rates(samplers_of(24576, nodes_of(1, 1, 1), [0.5] * 3, 256), 6)
    assert rates[:4] == sorted(rates[:4])
    assert min(rates[4:]) >= 0.99
    rates = hit_rates(samplers_of(24576, nodes_of(1, 1, 1), [0.1, 0.9, 0.1], 256), 2)
    assert rates[1] >= 0.1 + 1 / 3 + 0.1 - 0.02


def test_a_sticky_fold_is_drawn_once_per_epoch_by_the_nodes_that_have_it():
    """Two nodes with half of a fold each: each epoch has each index of it once, and later ones hit all."""
    fold = list(range(3, LENGTH, 5))
    options = {"domain": Domain(fold, LENGTH), "draws": SubsetRandomSampler(fold), "mode": "sticky"}
    samplers = samplers_of(LENGTH, nodes_of(1, 1), [0.5, 0.5], 8, **options)
    assert sorted(chain(*(epoch_of(sampler, 1) for sampler in samplers))) == fold
    assert hit_rates(samplers, 4) == [0, 1, 1, 1]


# ---- arguments ----


def test_arguments_are_those_of_distributed_sampler():
    """It takes what DistributedSampler takes, in the same order and with the same defaults, and more by keyword."""
    theirs = list(inspect.signature(DistributedSampler.__init__).parameters.values())
    mine = list(inspect.signature(LocalitySampler.__init__).parameters.values())
    assert [(own.name, own.default) for own in mine[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in mine[len(theirs) :])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"mode": "near"}, "mode must be one of locality, global, sticky, got 'near'"),
        ({"nodes": ((0,), (0,))}, "nodes must name each of the 2 ranks once, got"),
        ({"nodes": ((0, 1),)}, "ring must have one arc of size 10 for each of the 1 nodes, got"),
        ({"ring": Ring.cut(11, (0.5, 0.5), (5, 5))}, "ring must have one arc of size 10 for each of the 2 nodes, got"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message):
    """An argument that does not fit the others is refused by name, with the value."""
    fitting = {"batch_size": 2, "ring": Ring.cut(10, (0.5, 0.5), (5, 5)), "nodes": ((0,), (1,)), "mode": "locality"}
    with pytest.raises(ValueError, match=message):
        LocalitySampler(range(10), 2, 0, **{**fitting, **changed})
