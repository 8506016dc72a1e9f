"""The sentences at the end of a run."""

import pytest

from lightning_stocache.insight.verdict import verdict


def epoch(hits=0, misses=0, bypasses=0, source=0.0, coverage=1.0, wait=1.0, compute=1.0, **more):
    served = hits + misses + bypasses
    counts = {"hits": hits, "misses": misses, "bypasses": bypasses, "hit_rate": hits / served}
    memory = {"coverage": coverage, "fill_fraction": 1.0, "memory_bytes": 2**20, "budget_bytes": 2**20}
    seconds = {"source_seconds": source, "compute_seconds": compute, "epoch_seconds": wait + compute}
    return counts | memory | seconds | {"data_wait_seconds": wait} | more


COLD, WARM = epoch(misses=10, source=4.0), epoch(hits=10)
HALF = epoch(hits=5, bypasses=5, coverage=0.5)
EVEN = epoch(misses=10, wait=0.0, compute=5.0)
UNHEARD = {name: value for name, value in EVEN.items() if name != "data_wait_seconds"}


@pytest.mark.parametrize(
    ("epochs", "sentence"),
    [
        ([COLD, WARM], "100 % of 10 samples are cached, 1 MiB in use; hit rate per epoch: 0, 100 %"),
        ([COLD, WARM | {"memory_bytes": 0}], "100 % of 10 samples are cached; hit rate per epoch: 0, 100 %"),  # a disk
        (
            [COLD, HALF | {"fill_fraction": 0.4}],
            "50 % of 10 samples have a slot, 40 % of the slots are filled, 1 MiB in use; hit rate per epoch: 0, 50 %",
        ),
        ([epoch(bypasses=10, coverage=0.0)] * 2, "nothing was cached: the warnings above say why"),
        (
            [COLD, WARM, epoch(bypasses=10, coverage=0.0)],  # it has changed, or was replaced too often
            "nothing is cached any more: the warnings above say why; hit rate per epoch: 0, 100, 0 %",
        ),
        (
            [WARM | {"rolling/resident": 1200, "rolling/times_seen": 2.5}],
            "1,200 samples are in the rolling cache; training read each loaded sample 2.5 times on average",
        ),
    ],
)
def test_the_first_sentence_has_slots_fill_memory_and_hit_rates(epochs, sentence):
    """A rolling cache has a sentence without slots and first epochs. With budget=0 there is no advice to raise it."""
    assert verdict(epochs, 10)[0] == sentence
    assert verdict(epochs, 10, off=True) == ["the cache is off (budget=0)"]


SHORTER = "epoch one took 6.8 s, later epochs 2.2 s each"
LESS_WAITING = "epoch one took 5.0 s and waited 4.0 s for data; later epochs took 1.5 s and waited 0.5 s each"
HARDLY = "training hardly waited for data even in its first epoch: a cache cannot make it faster"
IS_WARM = "epoch one came from the cache already: this run does not tell how long training waits without it"


def test_hits_of_epoch_one_that_are_no_earlier_cache_are_not_called_one():
    """A sampler with replacement hits what it has stored itself, and a small set is stored at set-up."""
    drawn_twice = epoch(hits=30, misses=10, fills=10, wait=0.5)
    assert IS_WARM not in verdict([drawn_twice, WARM], 10)
    from_setup = epoch(hits=10, fills=0, wait=0.5)
    assert IS_WARM not in verdict([from_setup, WARM], 10, setup_fills=10)
    assert IS_WARM in verdict([from_setup, WARM], 10)


@pytest.mark.parametrize(
    ("epochs", "sentences"),
    [
        ([epoch(misses=10, wait=4.0), epoch(hits=10, wait=0.5)], [LESS_WAITING]),
        # Workers that load behind the step take the processor from it: no wait is saved, and the epochs are shorter.
        ([epoch(misses=10, wait=0.0, compute=6.8), epoch(hits=10, wait=0.0, compute=2.2)], [SHORTER]),
        ([EVEN, EVEN], [HARDLY]),
        ([epoch(misses=10, wait=0.01), WARM], [HARDLY]),
        # Without waits, no sentence says that training hardly waited.
        ([UNHEARD, EVEN], []),
        ([EVEN, UNHEARD], []),
        ([COLD], ["a cache helps from the second epoch on; this run had one"]),
        ([COLD, HALF], ["a budget of 2 MiB would hold every sample"]),
        ([COLD, HALF | {"node0/hit_rate": 0.5}], ["a budget of 2 MiB, over all nodes, would hold every sample"]),
        ([WARM, WARM], [IS_WARM]),  # a cache that was there before
        ([epoch(hits=4, misses=6, wait=0.04), epoch(hits=10, wait=0.0)], []),  # of 0.1 s that a cold one waits
        (
            [COLD, epoch(hits=10, bypasses=20, coverage=1 / 3)],
            ["the dataset has grown, and what is new has no slot. For data that grows there is RollingCache"],
        ),
    ],
)
def test_advice_fits_what_went_wrong(epochs, sentences):
    """The gain in seconds and waits, or the one thing to do. A run that was helped gets no advice."""
    assert verdict(epochs, 10)[1:] == sentences
