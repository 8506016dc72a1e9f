"""Samplers: global batches dealt to the nodes that have the samples, resident samples, and what can be drawn."""

import inspect
import pickle
import signal
import threading
from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch.utils.data import BatchSampler, DistributedSampler, Sampler
from torch.utils.data.sampler import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_stocache.cache.placement import Domain, Ring
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.processes import THREAD_PREFIX, other_threads
from lightning_stocache.sampling.assignment import Dealer
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.sampling.residents import RollingSampler
from lightning_stocache.sampling.sampler_domain import draws_once, sampler_domain
from tests.processes import call, wait_until


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
    st.sampled_from([{}, {}, {}, {"ring": None}]),
)
def test_global_batches_are_those_of_distributed_sampler_and_of_lightning(job, draws, domain, without_ring):
    """Every global batch holds what DistributedSampler, or Lightning's wrapper around the user's sampler, deals for it,
    padding and tail included. On one node, and without a ring, each rank's order is theirs."""
    batch = job["batch_size"]
    samplers = samplers_of(**job | {"size": LENGTH}, domain=domain, draws=draws, **without_ring)
    options = {name: job[name] for name in ("seed", "shuffle", "drop_last")}
    kind, drawn_from = (DistributedSampler, range(LENGTH)) if draws is None else (DistributedSamplerWrapper, draws)
    plains = [kind(drawn_from, len(samplers), rank, **options) for rank in range(len(samplers))]
    mine, theirs = ([pieces(epoch_of(sampler, 1), batch) for sampler in kinds] for kinds in (samplers, plains))
    if without_ring or len(job["nodes"]) == 1:
        assert mine == theirs
    assert [list(map(len, order)) for order in mine] == [list(map(len, order)) for order in theirs]
    for dealt, drawn in zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True):
        assert Counter(chain(*dealt)) == Counter(chain(*drawn))


def test_skip_leaves_out_samples_of_the_next_iteration():
    """Of that only, at its beginning; the length stays. set_epoch after iter() changes nothing, as elsewhere."""
    for sampler in samplers_of(95, nodes_of(1, 1), [0.5, 0.3], 5):
        whole = epoch_of(sampler, 2)
        for batches in (0, 1, 4, 9, 10, 50):
            sampler.skip = batches * 5
            assert len(sampler) == 48
            assert list(sampler) == whole[batches * 5 :]
            begun = iter(sampler)
            sampler.set_epoch(1)
            assert list(begun) == whole
            sampler.set_epoch(2)


@pytest.mark.parametrize("keys", [["a", "b", "c", "d"], [(0, 1), (2, 3)], [(0,), (1, 2)]])
def test_keys_that_are_no_indices_are_dealt_as_by_lightning(keys):
    """What only the source understands has no place on a ring, and stays what it is."""
    samplers = samplers_of(LENGTH, nodes_of(1, 1), [0.5, 0.5], 1, draws=keys)
    assert list(map(list, samplers)) == [list(DistributedSamplerWrapper(keys, 2, rank)) for rank in (0, 1)]


# ---- the deal ----


@settings(max_examples=40)
@given(jobs)
def test_misses_are_even_within_a_node(job):
    """Give or take one, in each batch."""
    assume(len(job["nodes"]) > 1)
    samplers = samplers_of(**job | {"size": job["size"] + 1})
    orders = [pieces(np.array(epoch_of(sampler, 1)), job["batch_size"]) for sampler in samplers]
    arcs = [arc for arc, ranks in zip(samplers[0].ring.arcs, job["nodes"], strict=True) for _ in ranks]
    misses = [[(arc.slots_of(piece) < 0).sum() for piece in order] for arc, order in zip(arcs, orders, strict=True)]
    for ranks in job["nodes"]:
        assert np.ptp(np.array(misses)[list(ranks)], axis=0).max(initial=0) <= 1


@settings(max_examples=60)
@given(jobs, st.none() | folds, st.lists(st.integers(0, LENGTH - 1), min_size=1))
def test_no_deal_hits_more(job, fold, batch):
    """A deal of a batch has as many hits as a maximum matching of its indices and the nodes' places."""
    nodes = job["nodes"]
    batch = np.resize(np.array(batch), sum(map(len, nodes)) * job["batch_size"])
    ring = ring_of(LENGTH, nodes, job["fractions"], None if fold is None else Domain(fold, LENGTH))
    deal = Dealer(ring, nodes).deal(batch)
    has = np.stack([arc.slots_of(batch) >= 0 for arc in ring.arcs], axis=1)
    assert (deal.misses == ~has[np.arange(len(batch)), deal.nodes]).all()
    seats = np.repeat(has, [len(ranks) * job["batch_size"] for ranks in nodes], axis=1)
    assert (~deal.misses).sum() == (maximum_bipartite_matching(csr_matrix(seats), perm_type="column") >= 0).sum()


# ---- large jobs ----

PARTS = 5


@pytest.fixture
def large():
    """The sampler of rank 3 of 16, whose global batches are so large that a thread deals them. An epoch has 5."""
    return samplers_of(PARTS * 4096 - 100, nodes_of(*[4] * 4), [0.3] * 4, 256, seed=1)[3]


def wait_for_the_end_of_threads():
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_PREFIX):
            thread.join()


@pytest.fixture
def deals(monkeypatch):
    """The thread of each deal, in order."""
    made, deal = [], Dealer.deal

    def noted(dealer, batch):
        made.append(threading.current_thread())
        return deal(dealer, batch)

    monkeypatch.setattr(Dealer, "deal", noted)
    return made


def test_a_large_global_batch_is_dealt_like_any_other(large):
    """Each part is what the dealer gives this rank of the global batch, in arrays and one by one, and after a skip."""
    dealer, size = Dealer(large.ring, large.nodes), len(large.dataset)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).numpy()
    whole = np.resize(order, large.total_size)
    expected = []
    for turn, begin in enumerate(range(0, len(whole), 4096)):
        batch = whole[begin : begin + 4096]
        expected.append(batch[dealer.share(dealer.deal(batch), 3, turn)].tolist())
    assert [part.tolist() for part in large.batches()] == expected
    assert list(large) == list(chain(*expected))
    large.skip = 2 * 256
    assert [part.tolist() for part in large.batches()] == expected[2:]
    large.skip = large.num_samples
    assert list(large.batches()) == []


def test_a_thread_deals_one_batch_ahead(large, deals):
    """The consumer deals the first batch, and one thread each other while the consumer has the batch before."""
    parts = large.batches()
    assert not deals
    for number in range(PARTS):
        next(parts)
        if number == 0:
            assert deals[0] is threading.current_thread()
        wait_until(lambda number=number: len(deals) == min(number + 2, PARTS), 60)
    assert next(parts, None) is None
    assert len(set(deals[1:])) == 1
    assert deals[1] is not deals[0]


def test_small_global_batches_are_dealt_by_the_consumer(deals):
    """A job of few ranks has no thread: a deal takes no longer than waking one."""
    list(samplers_of(5000, nodes_of(2, 2), [0.3] * 2, 256)[0])
    assert set(deals) == {threading.current_thread()}


@pytest.mark.parametrize("end", ["exhausted", "dropped", "closed"])
def test_the_thread_ends_with_its_iterator(large, deals, end):
    """It does not run the user's code, so that it does not count as a thread of the user's."""
    parts = large.batches()
    next(parts)
    wait_until(lambda: len(deals) == 2, 60)
    assert deals[1].is_alive()
    assert not other_threads()
    if end == "exhausted":
        list(parts)
    elif end == "closed":
        parts.close()
    del parts
    deals[1].join(60)
    assert not deals[1].is_alive()


def test_ctrl_c_ends_a_wait_for_the_thread(large, monkeypatch):
    """The consumer gets KeyboardInterrupt at once; the next iteration is whole."""
    whole, main, go_on = list(large), threading.main_thread().ident, threading.Event()
    deal = Dealer.deal

    def interrupted(dealer, batch):
        if threading.current_thread() is not threading.main_thread():
            signal.pthread_kill(main, signal.SIGINT)
            go_on.wait()
        return deal(dealer, batch)

    monkeypatch.setattr(Dealer, "deal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(large)
    go_on.set()
    monkeypatch.undo()
    wait_for_the_end_of_threads()
    assert list(large) == whole


@pytest.mark.processes
def test_a_fork_goes_on_without_the_thread(large):
    """A process that is forked in the middle of an epoch draws the rest by itself, and so does its parent."""
    whole, parts = [part.tolist() for part in large.batches()], large.batches()
    assert next(parts).tolist() == whole[0]
    assert call(lambda: [part.tolist() for part in parts]) == whole[1:]
    assert [part.tolist() for part in parts] == whole[1:]


def test_a_sampler_in_the_middle_of_an_epoch_can_be_pickled(large):
    """A worker that is spawned gets the sampler with the dataset; the copy begins anew."""
    whole, drawing = list(large), iter(large)
    next(drawing)
    assert list(pickle.loads(pickle.dumps(large))) == whole
    assert list(drawing) == whole[1:]


def test_an_error_of_a_deal_is_the_consumers(large, monkeypatch):
    """It is raised where the batch is asked for."""
    parts, deal = large.batches(), Dealer.deal

    def failing(dealer, batch):
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no deal")
        return deal(dealer, batch)

    monkeypatch.setattr(Dealer, "deal", failing)
    next(parts)
    with pytest.raises(OSError, match="no deal"):
        next(parts)


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
    """Nodes fill the edges of each other's parts; one with more memory than its share keeps to the same indices."""
    rates = hit_rates(samplers_of(24576, nodes_of(1, 1, 1), [0.5] * 3, 256), 6)
    assert rates[:4] == sorted(rates[:4])
    assert min(rates[4:]) >= 0.99
    rates = hit_rates(samplers_of(24576, nodes_of(1, 1, 1), [0.1, 0.9, 0.1], 256), 2)
    assert rates[1] >= 0.1 + 1 / 3 + 0.1 - 0.02


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
        ({"nodes": ((0,), (0,))}, "nodes must name each of the 2 ranks once, got"),
        ({"nodes": ((0, 1),)}, "ring must have one arc of size 10 for each of the 1 nodes, got"),
        ({"ring": Ring.cut(11, (0.5, 0.5), (5, 5))}, "ring must have one arc of size 10 for each of the 2 nodes, got"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message):
    """An argument that does not fit the others is refused by name, with the value."""
    fitting = {"batch_size": 2, "ring": Ring.cut(10, (0.5, 0.5), (5, 5)), "nodes": ((0,), (1,))}
    with pytest.raises(ValueError, match=message):
        LocalitySampler(range(10), 2, 0, **{**fitting, **changed})


# ---- resident samples ----


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
    """With `epoch_samples`, or while the length is fixed; fewer residents come in several rounds of permutations."""
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
    """Nodes may differ in their resident samples. Fewer samples than ranks are an error: some rank would hang."""
    nodes = nodes_of(*ranks)
    residents = [count + more for count, more in zip(ranks, extra, strict=False)]
    said = [residents[node] // len(group) for node, group in enumerate(nodes) for _ in group]

    class Group(NodeGroup):
        def exchange(self, value):
            return said

    drawn = {}
    for rank in range(sum(ranks)):
        group = Group(rank, nodes)
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


# ---- what a sampler can draw ----


def dealt(draws):
    [sampler] = samplers_of(LENGTH, nodes_of(1), [0.3], 3, draws=draws)
    return sampler


class Other(Sampler):
    """A user's own, with a name that means something else."""

    indices = (1, 2)

    def __iter__(self):
        return iter(range(LENGTH))


class Mine(SubsetRandomSampler):
    """In another order, but from the same indices."""

    def __iter__(self):
        return iter(reversed(list(self.indices)))


@pytest.mark.parametrize(
    ("sampler", "once"),
    [
        (SubsetRandomSampler([3, 9, 4]), True),
        (SubsetRandomSampler(torch.tensor([3, 9, 4, 4])), True),
        (Mine([5, 6]), False),
        (WeightedRandomSampler([0.0, 1.0, 2.0, *[0.0] * (LENGTH - 3)], 200), False),
        (RandomSampler(range(7)), True),
        (SequentialSampler(range(7)), True),
        (DistributedSampler(range(7), 1, 0), True),
        (dealt(SubsetRandomSampler([3, 9])), True),
        (dealt(WeightedRandomSampler([0.0, 1.0, 1.0], 50)), False),
        (BatchSampler(SubsetRandomSampler([3, 9, 4]), 2, False), False),
        ([4, 4, 2], False),
        ([[1, 2], [2, 3, 4]], False),
        (np.array([6, 7]), False),
    ],
)
def test_it_is_what_is_drawn(sampler, once):
    """Torch's samplers without replacement, and LocalitySampler with one, draw each once; a user's class may not."""
    before = torch.get_rng_state()
    domain = sampler_domain(sampler, LENGTH)
    assert torch.equal(torch.get_rng_state(), before)
    assert domain is not None
    drawn = [int(i) for item in sampler for i in (item if isinstance(item, list) else [item])]
    assert set(drawn) == set(domain.indices.tolist())
    assert domain.length == LENGTH
    assert draws_once(sampler) == once


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(LENGTH)),
        RandomSampler(range(LENGTH), num_samples=5),  # others each time
        SequentialSampler(range(LENGTH)),
        DistributedSampler(range(LENGTH), 2, 0),
        SubsetRandomSampler(range(LENGTH)),
        SubsetRandomSampler([]),
        SubsetRandomSampler([LENGTH]),  # the error is the source's
        Other(),
        None,
        ["a", "b"],
    ],
)
def test_else_all_may_be_drawn(sampler):
    """All of the dataset, nothing of it, or nobody knows: then the cache is of the whole."""
    assert sampler_domain(sampler, LENGTH) is None
