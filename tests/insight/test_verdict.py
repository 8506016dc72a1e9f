"""The sentences at the end of a run."""

from lightning_stocache.insight.verdict import saved_seconds, verdict


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
    }


def test_saved_time_is_hits_times_the_mean_load():
    """Every hit saves what a sample took in the source on average, bypasses included."""
    epochs = [epoch(misses=5, bypasses=5, source=5.0), epoch(hits=5, bypasses=5, source=2.5)]
    assert saved_seconds(epochs) == 2.5
    assert saved_seconds([epoch()]) == 0


def test_a_run_that_was_helped_gets_no_advice():
    """Slots, fill, memory, hit rates and the time saved, and nothing else."""
    said = verdict([epoch(misses=10, source=4.0), epoch(hits=10)], samples=10)
    assert said == [
        "100 % of 10 samples have a slot, 100 % of the slots are filled, 1 MiB in use; hit rate per epoch: 0, 100 %",
        "about 4.0 s of loading were saved, summed over processes",
    ]


def test_advice_fits_what_went_wrong():
    """One epoch, nothing cached, no wait for data, and half of the dataset each have advice of their own."""
    first, second = epoch(misses=10, source=4.0), epoch(hits=10)
    assert "second epoch" in verdict([first], 10)[-1]
    assert "raise the budget" in verdict([epoch(bypasses=10, coverage=0.0)] * 2, 10)[-1]
    assert "hardly waited" in verdict([epoch(misses=10, wait=0.01), second], 10)[-1]
    assert "2 MiB" in verdict([first, epoch(hits=5, bypasses=5, coverage=0.5)], 10)[-1]
