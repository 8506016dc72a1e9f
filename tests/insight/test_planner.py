"""The plan's arithmetic, from given costs: hit rates and seconds per epoch."""

import pytest

from tests.insight.planned import measured, planner


def test_without_workers_misses_and_hits_follow_one_another():
    """Epoch one is all misses; later the missing part is loaded and the rest gathered, in turn."""
    row = planner().row(0.25)
    assert row.first_epoch.median == pytest.approx(10.0 + 0.5)
    assert row.later_epoch.median == pytest.approx(7.5 + 0.25)
    assert row.hit_rates == (0.0, 0.25, 0.25, 0.25)


def test_with_workers_the_slower_counts():
    """Workers load while the main process gathers; with a transform they make whole batches, one after the other."""
    assert planner(num_workers=2).row(0.95).later_epoch.median == pytest.approx(1.0)  # gathering, while 50 are loaded
    made = measured(made_by_workers=True)
    assert planner(made, num_workers=2).row(0.95).later_epoch.median == pytest.approx(0.5 + 0.95)


def test_uncached_goes_by_what_was_measured_uncached():
    """Every epoch with budget 0 costs the uncached loader's time; the workers start once."""
    row = planner(num_workers=2).row(0.0)
    assert (row.first_epoch.median, row.later_epoch.median) == pytest.approx((11.5, 11.0))
    assert planner(num_workers=2, persistent=False).row(0.0).later_epoch.median == pytest.approx(11.5)


def test_the_step_hides_loading_only_where_workers_load():
    """Without workers loading and steps add up; with workers, and where all is cached, the slower counts."""
    assert planner(step=0.05).row(0.5).later_epoch.median == pytest.approx(5 + 0.5 + 5)
    assert planner(step=0.05, num_workers=1).row(0.75).later_epoch.median == pytest.approx(1 + 5)
    assert planner(step=0.05).row(1.0).later_epoch.median == pytest.approx(5)


def test_nothing_is_faster_than_the_cores():
    """Processor time of all ranks of a node is a floor."""
    busy = measured(cpu=0.01)
    alone, crowded = (planner(busy, num_workers=8, ranks=ranks, cores=1).row(0.5) for ranks in (1, 4))
    assert alone.later_epoch.median == pytest.approx(1000 * 0.5 * 0.01 + 0.5)
    assert crowded.later_epoch == pytest.approx(alone.later_epoch)  # four ranks share samples, and the core


def test_what_the_page_cache_holds_is_read_as_repeated():
    """Files that came from a disk and fit into memory cost later epochs what repeated reads cost, never more."""
    cold, noisy = measured(again=0.002), measured(again=0.02)
    assert planner(cold, hot=True).row(0.0).later_epoch.median == pytest.approx(11.0 / 5)
    assert planner(cold, hot=True).row(0.0).first_epoch.median == pytest.approx(11.5)
    assert planner(cold).row(0.0).later_epoch.median == pytest.approx(11.0)
    assert planner(noisy, hot=True).row(0.0).later_epoch.median == pytest.approx(11.0)


def test_several_nodes_add_up():
    """Four nodes with a quarter each hit everything; global dealing hits less."""
    row = planner(nodes=4, samples=4000, batch_size=64).row(0.25)
    assert row.samples == 4000
    assert row.hit_rates == (0, 1, 1, 1)
    assert planner(nodes=4, samples=4000, mode="global").row(0.25).hit_rates[1] == pytest.approx(1 / 16)


def test_validation_shares_the_budget():
    """Bytes of a row are for all sets that draw on the budget; the samples are the training set's."""
    row = planner(other_bytes=100_000).row(0.5)
    assert (row.budget_bytes, row.samples) == (100_000, 500)


def test_it_pays_when_the_sum_of_epochs_is_smaller():
    """A dear first epoch is paid back in the epoch whose end finds training ahead of uncached training."""
    dear = measured(missed=0.03)  # epoch one: 30 s instead of 11, then 1 s instead of 11
    assert [planner(dear).row(share).pays_in for share in (0.0, 0.25, 1.0)] == [None, None, 3]


def test_what_was_measured_several_times_has_a_spread():
    """Seconds and gains reach from the lowest to the highest of what was measured, not only the medians."""
    row = planner(measured(uncached=[0.008, 0.011, 0.02], hit=[0.001, 0.002, 0.004])).row(1.0)
    assert (row.later_epoch.low, row.later_epoch.median, row.later_epoch.high) == pytest.approx((1, 2, 4))
    assert (row.faster.low, row.faster.median, row.faster.high) == pytest.approx((8 / 4, 11 / 2, 20 / 1))


def test_what_cannot_be_told_pays_in_no_epoch():
    """Where the spreads overlap, no epoch is named in which a budget pays."""
    assert planner(measured(missed=0.012)).row(1.0).pays_in == 2
    assert planner(measured(missed=0.012, uncached=[0.001, 0.021])).row(1.0).pays_in is None
