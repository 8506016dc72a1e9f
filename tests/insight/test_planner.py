"""The plan's arithmetic, from given costs: seconds per epoch, the budget that is enough, and what follows."""

import dataclasses
import json

import pytest
import torch

from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.insight.costs import Costs, Job, Reads, Step
from lightning_stocache.insight.planner import Planner, largest_safe
from lightning_stocache.insight.timetable import as_json, as_text, save

SPEC = SampleSpec.infer(torch.zeros(99, dtype=torch.uint8))  # 100 bytes with its state
READS = Reads(first=0.01, repeated=0.01, cpu=0.0)
COSTS = Costs(SPEC, READS, transform=0.0, uncached=0.011, missed=0.01, hit=0.001, start=0.5)
JOB = Job(samples=1000, batch_size=10, safe_bytes=10**9, epochs=4, cores=4)


def planner(step: Step | None = None, costs: Costs = COSTS, **changes) -> Planner:
    return Planner(dataclasses.replace(JOB, **changes), costs, step)


def test_without_workers_misses_and_hits_follow_one_another():
    """Epoch one is all misses; later the missing part is loaded and the rest gathered, in turn."""
    row = planner().row(0.25)
    assert row.first_epoch == pytest.approx(10.0 + 0.5)
    assert row.later_epoch == pytest.approx(7.5 + 0.25)
    assert row.hit_rates == (0.0, 0.25, 0.25, 0.25)


def test_with_workers_the_slower_counts():
    """Workers load while the main process gathers; with a transform they make whole batches, one after the other."""
    assert planner(num_workers=2).row(0.95).later_epoch == pytest.approx(1.0)  # gathering 1000, while 50 are loaded
    made = dataclasses.replace(COSTS, made_by_workers=True)
    assert planner(num_workers=2, costs=made).row(0.95).later_epoch == pytest.approx(0.5 + 0.95)


def test_uncached_goes_by_what_was_measured_uncached():
    """Every epoch with budget 0 costs the uncached loader's time; the workers start once."""
    row = planner(num_workers=2).row(0.0)
    assert (row.first_epoch, row.later_epoch) == pytest.approx((11.5, 11.0))
    assert planner(num_workers=2, persistent=False).row(0.0).later_epoch == pytest.approx(11.5)


def test_the_step_hides_loading_only_where_workers_load():
    """Without workers loading and steps add up; with workers, and where all is cached, the slower counts."""
    step = Step(0.05)
    assert planner(step).row(0.5).later_training == pytest.approx(5 + 0.5 + 5)
    assert planner(step, num_workers=1).row(0.75).later_training == pytest.approx(1 + 5)
    assert planner(step).row(1.0).later_training == pytest.approx(5)


def test_nothing_is_faster_than_the_cores():
    """Processor time of all ranks of a node is a floor."""
    busy = dataclasses.replace(COSTS, reads=Reads(0.01, 0.01, cpu=0.01))
    alone, crowded = (planner(num_workers=8, ranks=ranks, cores=1, costs=busy).row(0.5) for ranks in (1, 4))
    assert alone.later_epoch == pytest.approx(1000 * 0.5 * 0.01 + 0.5)
    assert crowded.later_epoch == pytest.approx(alone.later_epoch)  # four ranks share samples, and the core


def test_what_the_page_cache_holds_is_read_as_repeated():
    """Files that came from a disk and fit into memory cost later epochs what repeated reads cost."""
    cold = dataclasses.replace(COSTS, reads=Reads(0.01, 0.002, cpu=0.0))
    assert planner(costs=cold, hot=True).row(0.0).later_epoch == pytest.approx(11.0 / 5)
    assert planner(costs=cold, hot=True).row(0.0).first_epoch == pytest.approx(11.5)
    assert planner(costs=cold).row(0.0).later_epoch == pytest.approx(11.0)


def test_the_budget_that_is_enough_is_where_the_step_takes_over():
    """With workers and a step of half the loading time, half of the dataset gains all there is to gain."""
    quick = dataclasses.replace(COSTS, hit=1e-6)
    plan = planner(Step(0.0505), num_workers=1, costs=quick).plan()
    assert plan.budget == "49%"  # loading the rest takes as long as the steps, and 2 % longer
    assert any("Beyond 49 %" in sentence for sentence in plan.sentences)
    assert any(row.budget == plan.budget for row in plan.rows)


def test_training_that_waits_for_its_steps_needs_no_budget():
    """If loading hides behind the step already, the advice is 0."""
    plan = planner(Step(0.2), num_workers=1, costs=dataclasses.replace(COSTS, hit=1e-6)).plan()
    assert plan.budget == "0"
    assert "No budget gains anything" in plan.sentences[0]


def test_the_whole_dataset_is_auto():
    """Where every part of the dataset gains, the advice is auto, and so it is where less is free."""
    assert planner().plan().budget == "auto"
    short = planner(safe_bytes=60_000).plan()
    assert short.budget == "auto"
    assert [row.budget for row in short.rows if row.safe] == ["0%", "25%", "50%", "60%"]
    assert "room for 60.0 %" in short.sentences[0]
    assert "(largest safe)" in as_text(short)


def test_several_nodes_add_up():
    """Four nodes with a quarter each hit nearly everything, and a quarter is enough; global dealing hits less."""
    row = planner(nodes=4, samples=4000, batch_size=64).row(0.25)
    assert row.samples == 4000
    assert 0.9 < row.hit_rates[1] < row.hit_rates[2] < 1
    assert planner(nodes=4, samples=4000, batch_size=64).plan().budget == "25%"
    assert planner(nodes=4, samples=4000, mode="global").row(0.25).hit_rates[1] == pytest.approx(1 / 16)


def test_validation_shares_the_budget():
    """Bytes of a row are for all sets that draw on the budget; the samples are the training set's."""
    row = planner(other_bytes=100_000).row(0.5)
    assert (row.budget_bytes, row.samples) == (100_000, 500)


def test_it_pays_when_the_sum_of_epochs_is_smaller():
    """A dear first epoch is paid back in the epoch whose end finds training ahead of uncached training."""
    dear = dataclasses.replace(COSTS, missed=0.03)  # epoch one: 30 s instead of 11, then 1 s instead of 11
    assert [planner(costs=dear).row(share).pays_in for share in (0.0, 0.25, 1.0)] == [None, None, 3]


def test_advice_on_workers():
    """As many as let loading keep up with the step, and no more than the cores can feed."""
    assert planner(Step(0.05)).plan().num_workers == 2
    busy = dataclasses.replace(COSTS, reads=Reads(0.01, 0.01, cpu=0.01))
    plan = planner(Step(0.01), costs=busy).plan()
    assert plan.num_workers == 4
    assert "would take 10" in plan.sentences[-1]


def test_what_cannot_be_cached_is_said():
    """Without a spec there is one row, uncached, and the reason."""
    never = Costs(None, READS, 0.0, 0.01, 0.01, 0.01, reason="Samples hold strings.")
    plan = planner(costs=never).plan()
    assert [row.budget for row in plan.rows] == ["0%"]
    assert plan.budget == "0"
    assert "Samples hold strings." in as_text(plan)


def test_the_last_line_is_for_the_config():
    """The table ends with cache.budget=..., alone on its line, and JSON has the same."""
    plan = planner(Step(0.045), num_workers=1, costs=dataclasses.replace(COSTS, hit=1e-6)).plan()
    assert as_text(plan).splitlines()[-1] == "cache.budget=55%"
    values = json.loads(json.dumps(as_json(plan)))
    assert values["budget"] == "55%"
    assert [row["samples"] for row in values["rows"]] == [0, 250, 500, 550, 750, 1000]


def test_the_picture_is_a_png(tmp_path):
    """The plan can be drawn, with and without a step, and where not all is safe."""
    for number, plan in enumerate((planner(Step(0.05)).plan(), planner(safe_bytes=60_000).plan())):
        save(plan, path := tmp_path / f"{number}.png")
        assert path.read_bytes().startswith(b"\x89PNG")


def test_largest_safe_keeps_room_for_batches():
    """What the loader's own batches take is not granted."""
    free = largest_safe(2**62, 0, 0, None, 1)
    assert 0 < largest_safe(2**62, 2**20, 2, None, 1) < free
    assert largest_safe(100, 0, 0, None, 1) == 100
