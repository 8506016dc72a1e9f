"""The sentences at the end of a run."""

import pytest

from lightning_stocache.insight.verdict import verdict


def epoch(hits=0, misses=0, bypasses=0, source=0.0, coverage=1.0, wait=1.0, compute=1.0):
    served = hits + misses + bypasses
    return {
        "hits": hits,
        "misses": misses,
        "bypasses": bypasses,
        "source_seconds": source,
        "coverage": coverage,
        "hit_rate": hits / served if served else 0.0,
        "fill_fraction": 1.0,
        "memory_bytes": 2**20,
        "budget_bytes": 2**20,
        "data_wait_seconds": wait,
        "compute_seconds": compute,
        "samples_per_second": served / (wait + compute) if wait + compute else 0.0,
    }


def test_a_run_that_was_helped_gets_no_advice():
    """The sentences have slots, fill, memory, hit rates, and the seconds and waits of epochs, and nothing else."""
    said = verdict([epoch(misses=10, wait=4.0), epoch(hits=10, wait=0.5)], samples=10)
    assert said == [
        "100 % of 10 samples are cached, 1 MiB in use; hit rate per epoch: 0, 100 %",
        "epoch one took 5.0 s and waited 4.0 s for data; later epochs took 1.5 s and waited 0.5 s each",
    ]


def test_epochs_that_became_shorter_without_waiting_are_said_to_have():
    """Workers that load behind the step take the processor from it: no wait is saved, and the epochs are shorter."""
    said = verdict([epoch(misses=10, wait=0.0, compute=6.8), epoch(hits=10, wait=0.0, compute=2.2)], samples=10)[1:]
    assert said == ["epoch one took 6.8 s, later epochs 2.2 s each"]


def test_waits_that_were_not_logged_are_not_told():
    """Without waits, no sentence says that training hardly waited."""
    epochs = [epoch(misses=10, wait=0.0, compute=5.0), epoch(hits=10, wait=0.0, compute=5.0)]
    assert "hardly waited" in verdict(epochs, 10)[-1]
    for unheard in ([0], [1], [0, 1]):
        told = [{name: value for name, value in each.items() if name != "data_wait_seconds"} for each in epochs]
        assert len(verdict([told[n] if n in unheard else epochs[n] for n in (0, 1)], 10)) == 1


def test_a_rolling_cache_has_words_of_its_own():
    """A rolling cache has a sentence without slots and first epochs."""
    pool = {"rolling/resident": 1200, "rolling/times_seen": 2.5}
    assert verdict([epoch(hits=10) | pool], 10) == [
        "1,200 samples are in the rolling cache; training read each loaded sample 2.5 times on average"
    ]


def test_a_cache_that_is_off_gets_one_sentence():
    """With budget=0 there is no advice to raise it."""
    assert verdict([epoch(bypasses=10, coverage=0.0)] * 2, 10, off=True) == ["the cache is off (budget=0)"]


def test_advice_fits_what_went_wrong():
    """One epoch, nothing cached, no wait for data, and half of the dataset each have advice of their own."""
    first, second = epoch(misses=10, source=4.0), epoch(hits=10)
    assert "second epoch" in verdict([first], 10)[-1]
    assert verdict([epoch(bypasses=10, coverage=0.0)] * 2, 10) == ["nothing was cached: the warnings above say why"]
    assert "hardly waited" in verdict([epoch(misses=10, wait=0.01), second], 10)[-1]
    half = epoch(hits=5, bypasses=5, coverage=0.5)
    assert verdict([first, half], 10)[-1] == "a budget of 2 MiB would hold every sample"
    nodes = {"node0/hit_rate": 0.5, "node1/hit_rate": 0.5}
    assert verdict([first, half | nodes], 10)[-1] == "a budget of 2 MiB, over all nodes, would hold every sample"
    assert (
        "50 % of 10 samples have a slot, 40 % of the slots are filled"
        in verdict([first, half | {"fill_fraction": 0.4}], 10)[0]
    )


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_that_began_warm_is_not_told_that_a_cache_is_of_no_use(epochs):
    """A run on a cache that was full already does not say how long training waits without it."""
    said = verdict([epoch(hits=9, misses=1, wait=0.0)] * epochs, 10)[1:]
    assert said == ["epoch one came from the cache already: this run does not tell how long training waits without it"]
    assert verdict([epoch(hits=4, misses=6, wait=0.04), epoch(hits=10, wait=0.0)], 10)[1:] == []  # of 0.1 a cold one


def test_of_a_cache_on_a_disk_no_memory_is_told():
    """The sentences on a cache on a disk have no memory in use."""
    [said, *_] = verdict([epoch(misses=10) | {"memory_bytes": 0}, epoch(hits=10) | {"memory_bytes": 0}], 10)
    assert "in use" not in said
    assert "are cached; hit rate" in said


def test_a_dataset_that_has_grown_is_said_to_have():
    """A dataset that has grown since the cache opened gets no advice on the budget."""
    epochs = [epoch(misses=10), epoch(hits=10, bypasses=10, coverage=0.5), epoch(hits=10, bypasses=20, coverage=1 / 3)]
    sentence = verdict(epochs, 30)[-1]
    assert "has grown" in sentence
    assert "RollingCache" in sentence
