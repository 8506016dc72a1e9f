"""The plan's arithmetic and its advice, from given paces."""

import pytest

from tests.insight.planned import paces, planned, row

QUICK = paces(hit=1e-6)


def later(budget: str, measured=None, **changes) -> float:
    return row(planned(measured, **changes), budget).later_epoch.median


def test_the_law_is_linear():
    """Epoch one is all misses; later the missing part is loaded and the rest gathered."""
    quarter = row(planned(), "25%")
    assert quarter.first_epoch.median == pytest.approx(10.0)
    assert quarter.later_epoch.median == pytest.approx(7.5 + 0.25)
    assert (quarter.hit_rate, quarter.samples, quarter.budget_bytes) == (0.25, 250, 25_000)
    assert [later(f"{percent}%") for percent in (50, 75, 100)] == pytest.approx([5.5, 3.25, 1.0])


def test_a_budget_of_zero_goes_by_what_was_measured_uncached():
    """Every epoch costs the uncached loader's time, and nothing is gained."""
    without = row(planned(), "0%")
    assert (without.first_epoch.median, without.later_epoch.median) == pytest.approx((11.0, 11.0))
    assert (without.hit_rate, without.faster.median, without.pays_in) == (0, 1, None)


def test_the_step_hides_loading_only_where_workers_load():
    """Without workers loading and steps add up; with workers, and where all is cached, the slower counts."""
    assert later("50%", step=0.05) == pytest.approx(5 + 0.5 + 5)
    assert later("50%", step=0.05, num_workers=1) == pytest.approx(5 + 0.5)
    assert later("75%", step=0.05, num_workers=1) == pytest.approx(5)
    assert later("100%", step=0.05) == pytest.approx(5)


def test_several_nodes_add_up():
    """Four nodes with a quarter each hit everything; samples that are dealt at random hit a quarter."""
    four = row(planned(nodes=4, samples=4000), "25%")
    assert (four.samples, four.hit_rate) == (4000, 1)
    assert four.later_epoch.median == pytest.approx(1.0)
    assert row(planned(nodes=4, samples=4000, mode="global"), "25%").hit_rate == 0.25
    assert planned(nodes=4, samples=4000).budget == "25%"


def test_validation_shares_the_budget():
    """Bytes of a row are for all sets that draw on the budget; the samples are the training set's."""
    half = row(planned(other_bytes=100_000), "50%")
    assert (half.budget_bytes, half.samples) == (100_000, 500)


def test_it_pays_when_the_sum_of_epochs_is_smaller():
    """A dear first epoch is paid back in the epoch whose end finds training ahead of uncached training."""
    dear = planned(paces(missed=0.03))  # epoch one: 30 s instead of 11, then 1 s instead of 11
    assert [row(dear, budget).pays_in for budget in ("0%", "25%", "100%")] == [None, None, 3]
    assert row(planned(paces(missed=0.012)), "100%").pays_in == 2
    assert row(planned(paces(missed=0.012, uncached=[0.001, 0.021])), "100%").pays_in is None  # cannot be told


def test_what_was_measured_several_times_has_a_range():
    """Seconds and gains reach from the lowest to the highest of what was measured, not only the medians."""
    whole = row(planned(paces(uncached=[0.008, 0.011, 0.02], hit=[0.001, 0.002, 0.004])), "100%")
    assert whole.later_epoch.values == pytest.approx((1, 2, 4))
    assert whole.faster.values == pytest.approx((8 / 4, 11 / 2, 20 / 1))


def test_the_budget_that_is_enough_is_where_the_step_takes_over():
    """With workers and a step of half the loading time, half of the dataset gains all there is to gain."""
    plan = planned(QUICK, step=0.0505, num_workers=1)
    assert plan.budget == "49%"  # loading the rest takes as long as the steps, and 2 % longer
    assert "Beyond 49 % of the dataset nothing is gained: training waits for its steps." in plan.sentences
    assert row(plan, plan.budget)


def test_training_that_waits_for_its_steps_needs_no_budget():
    """If loading hides behind the step already, the advice is 0, and without a model the source is said to be fast."""
    plan = planned(QUICK, step=0.2, num_workers=1)
    assert plan.budget == "0"
    assert plan.sentences == ("No budget gains anything: training waits for its steps, not for data.",)
    plan = planned(paces(uncached=0.001, missed=0.0011))
    assert plan.budget == "0"
    assert plan.sentences == ("No budget gains anything: the source is as fast as the cache.",)


@pytest.mark.parametrize(
    ("measured", "step"),
    [
        (paces(hit=1e-6, uncached=[0.01, 0.011, 0.03]), 0.2),
        (QUICK, [0.09, 0.2, 0.3]),
        (paces(uncached=[0.009, 0.011], hit=[0.001, 0.01]), None),
    ],
)
def test_ranges_that_overlap_are_no_advice(measured, step):
    """Where measurements differ by more than a cache would gain, the advice is auto, and why."""
    plan = planned(measured, step, num_workers=1)
    assert plan.budget == "auto"
    [sentence] = plan.sentences
    assert sentence.startswith("Cannot tell whether a budget gains anything: repeated measurements differ")


def test_a_gain_that_is_larger_than_the_noise_is_told():
    """Ranges that do not overlap are no doubt, however wide they are."""
    plan = planned(paces(uncached=[0.009, 0.011, 0.03], hit=[0.001, 0.002]))
    assert (plan.budget, plan.sentences) == ("auto", ())
    assert row(plan, "100%").faster.low > 1


def test_a_part_is_advised_only_if_it_is_enough_by_all_measurements():
    """The share beyond which nothing is gained is that for the slowest source and the quickest step."""
    noisy = paces(hit=1e-6, missed=[0.009, 0.01, 0.012])
    assert planned(noisy, step=[0.05, 0.0505, 0.06], num_workers=1).budget == "58%"  # 1 - 1.02 * 5 / 12


def test_the_whole_dataset_is_auto():
    """Where every part of the dataset gains, the advice is auto, and so it is where less is free."""
    assert planned().budget == "auto"
    short = planned(safe_bytes=60_000)
    assert short.budget == "auto"
    assert [row.budget for row in short.rows if row.safe] == ["0%", "25%", "50%", "60%"]
    assert "room for 60.0 %" in short.sentences[0]


def test_what_cannot_be_cached_is_said():
    """Without a codec there is one row, uncached, and the reason."""
    plan = planned(paces(codec=None, reason="Samples hold strings."), other_bytes=100)
    assert [row.budget for row in plan.rows] == ["0%"]
    assert plan.budget == "0"
    assert "Samples hold strings." in plan.sentences[0]


def test_a_source_that_came_from_a_disk_may_be_faster_later():
    """It is said that the page cache may serve later epochs."""
    assert any("page cache" in sentence for sentence in planned(paces(disk_bytes=10**6)).sentences)
