"""What a plan advises, and when it says that it cannot tell."""

import pytest

from lightning_stocache.insight.advice import advise
from tests.insight.planned import measured, planner

QUICK = measured(hit=1e-6)


def test_the_budget_that_is_enough_is_where_the_step_takes_over():
    """With workers and a step of half the loading time, half of the dataset gains all there is to gain."""
    plan = advise(planner(QUICK, step=0.0505, num_workers=1))
    assert plan.budget == "49%"  # loading the rest takes as long as the steps, and 2 % longer
    assert any("Beyond 49 %" in sentence for sentence in plan.sentences)
    assert any(row.budget == plan.budget for row in plan.rows)


def test_training_that_waits_for_its_steps_needs_no_budget():
    """If loading hides behind the step already, the advice is 0, and without a model the source is said to be fast."""
    plan = advise(planner(QUICK, step=0.2, num_workers=1))
    assert plan.budget == "0"
    assert plan.sentences[0] == "No budget gains anything: training waits for its steps, not for data."
    plan = advise(planner(measured(uncached=0.001)))
    assert plan.budget == "0"
    assert plan.sentences[0] == "No budget gains anything: the source is as fast as the cache."


@pytest.mark.parametrize(
    ("costs", "step"),
    [
        (measured(hit=1e-6, uncached=[0.01, 0.011, 0.03]), 0.2),
        (QUICK, [0.09, 0.2, 0.3]),
        (measured(uncached=[0.009, 0.011], hit=[0.001, 0.01]), None),
    ],
)
def test_ranges_that_overlap_are_no_advice(costs, step):
    """Where measurements differ by more than a cache would gain, the advice is auto, and why; workers are advised."""
    plan = advise(planner(costs, step, num_workers=1))
    assert plan.budget == "auto"
    assert plan.sentences[0].startswith("Cannot tell whether a budget gains anything: repeated measurements differ")
    assert plan.sentences[0].endswith("Run it again when the machine is quiet.")
    assert "num_workers=" in plan.sentences[1]


def test_a_gain_that_is_larger_than_the_noise_is_told():
    """Spreads that do not overlap are no doubt, however long it takes to read a sample again."""
    plan = advise(planner(measured(uncached=[0.009, 0.011, 0.03], hit=[0.001, 0.002], again=0.02)))
    assert plan.budget == "auto"
    assert not any("Cannot tell" in sentence for sentence in plan.sentences)


def test_a_part_is_advised_only_if_it_is_enough_by_all_measurements():
    """The share beyond which nothing is gained is that for the slowest source and the quickest step."""
    noisy = measured(hit=1e-6, missed=[0.009, 0.01, 0.012])
    assert advise(planner(noisy, step=[0.05, 0.0505, 0.06], num_workers=1)).budget == "58%"  # 1 - 1.02 * 5 / 12


def test_the_whole_dataset_is_auto():
    """Where every part of the dataset gains, the advice is auto, and so it is where less is free."""
    assert advise(planner()).budget == "auto"
    short = advise(planner(safe_bytes=60_000))
    assert short.budget == "auto"
    assert [row.budget for row in short.rows if row.safe] == ["0%", "25%", "50%", "60%"]
    assert "room for 60.0 %" in short.sentences[0]


def test_several_nodes_need_a_part_each():
    """Of four nodes each needs a quarter."""
    assert advise(planner(nodes=4, samples=4000, batch_size=64)).budget == "25%"


def test_advice_on_workers():
    """As many as let loading keep up with the step, and no more than the cores can feed."""
    assert advise(planner(step=0.05)).num_workers == 2
    plan = advise(planner(measured(cpu=0.01), step=0.01))
    assert plan.num_workers == 4
    assert "would take 10" in plan.sentences[-1]


def test_what_cannot_be_cached_is_said():
    """Without a spec there is one row, uncached, and the reason."""
    plan = advise(planner(measured(spec=None, reason="Samples hold strings.")))
    assert [row.budget for row in plan.rows] == ["0%"]
    assert plan.budget == "0"
    assert "Samples hold strings." in plan.sentences[0]
