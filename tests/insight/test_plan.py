"""The plan: its arithmetic and its advice, from given paces; its table and picture."""

import pytest

from lightning_stocache.insight.measurement import Arm, Curves, Data
from lightning_stocache.insight.plan import aligned, as_text, curves_as_text, save
from tests.insight.planned import paces, planned, row, spread

QUICK = paces(hit=1e-6)


def later(budget: str, measured=None, **changes) -> float:
    return row(planned(measured, **changes), budget).later_epoch.median


def test_the_law_is_linear():
    """Epoch one is all misses; later the missing part is loaded and the rest gathered."""
    quarter = row(planned(), "25%")
    assert quarter.first_epoch.median == pytest.approx(10.0)
    assert quarter.later_epoch.median == pytest.approx(7.5 + 0.25)
    assert (quarter.hit_rate, quarter.budget_bytes) == (0.25, 25_000)
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
    assert four.hit_rate == 1
    assert four.later_epoch.median == pytest.approx(1.0)
    assert row(planned(nodes=4, samples=4000, mode="global"), "25%").hit_rate == 0.25
    assert planned(nodes=4, samples=4000).budget == "25%"


def test_it_pays_when_the_sum_of_epochs_is_smaller():
    """A slow first epoch pays in the first epoch that ends ahead of uncached training."""
    dear = planned(paces(missed=0.03))  # epoch one: 30 s instead of 11, then 1 s instead of 11
    assert [row(dear, budget).pays_in for budget in ("0%", "25%", "100%")] == [None, None, 3]
    assert row(planned(paces(missed=0.012)), "100%").pays_in == 2
    assert row(planned(paces(missed=0.012, uncached=[0.001, 0.021])), "100%").pays_in is None  # cannot be told


def test_what_was_measured_several_times_has_a_range():
    """Seconds and gains reach from the lowest to the highest of what was measured, not only the medians."""
    whole = row(planned(paces(uncached=[0.008, 0.011, 0.02], hit=[0.001, 0.002, 0.004])), "100%")
    assert whole.later_epoch[:3] == pytest.approx((1, 2, 4))
    assert whole.faster[:3] == pytest.approx((8 / 4, 11 / 2, 20 / 1))


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
    """The advised share is calculated from the slowest source and the quickest step."""
    noisy = paces(hit=1e-6, missed=[0.009, 0.01, 0.012])
    assert planned(noisy, step=[0.05, 0.0505, 0.06], num_workers=1).budget == "58%"  # 1 - 1.02 * 5 / 12


def test_the_whole_dataset_is_auto():
    """Where every part of the dataset gains, the advice is auto, and so it is where less is free."""
    assert planned().budget == "auto"
    short = planned(paces(safe_bytes=60_000))
    assert short.budget == "auto"
    assert [row.budget for row in short.rows if row.safe] == ["0%", "25%", "50%", "60%"]
    assert "room for 60.0 %" in short.sentences[0]


def test_what_cannot_be_cached_is_said():
    """Without a codec there is one row, uncached, and the reason."""
    plan = planned(paces(codec=None, reason="Samples hold strings."))
    assert [row.budget for row in plan.rows] == ["0%"]
    assert plan.budget == "0"
    assert "Samples hold strings." in plan.sentences[0]


TABLE = paces(hit=1e-6, uncached=[0.0105, 0.011, 0.0125])
RATES = {
    **{Arm("uncached", 8, n): spread(rates) for n, rates in enumerate(([90, 110], [190, 210], [380, 420], [390, 425]))},
    **{Arm("hit", 8, n): spread([1000, 1200]) for n in range(4)},
    **{Arm("uncached", size, 0): spread([11.25 * size, 13.75 * size]) for size in (16, 128)},
    **{Arm("hit", size, 0): spread([1000, 1200]) for size in (16, 128)},
}
CURVES = Curves(Data(range(1000), 8), RATES, ["One batch was left out."])


def test_ranges_and_deviations_are_shown():
    """The lowest and the highest stand beside each median, with the standard deviation."""
    plan = planned(TABLE)
    lines = {line.split()[0]: line.split()[1:] for line in as_text(plan).splitlines() if line}
    assert lines["uncached"] == ["11.00", "10.50..12.50", "1.04", "ms", "a", "sample"]
    assert lines["hit"] == ["1.0", "1.0..1.0", "0.0", "us", "a", "sample"]
    assert lines["25%"][-4:] == ["1.5x", "[1.4..1.7]", "epoch", "2"]


@pytest.mark.parametrize("safe_bytes", [10**12, 60_000 * 10**6])
def test_the_table_fits_a_terminal(safe_bytes):
    """No line of a plan is wider than 80 characters, also of a large dataset whose measurements vary."""
    wild = paces(uncached=[0.0002, 0.011, 9.5], hit=[1e-6, 2e-5], missed=[0.01, 12.5], safe_bytes=safe_bytes)
    many = {"samples": 10**9, "batch_size": 10**4, "num_workers": 128, "nodes": 16, "ranks": 8}
    text = as_text(planned(wild, step=[0.002, 0.2, 7.0], **many))
    for lines in (text, as_text(planned(wild, **many))):
        assert max(map(len, lines.splitlines())) <= 80
    assert ("75%*" in text) == (safe_bytes < 10**11)


@pytest.mark.parametrize("plan", [planned(step=0.05), planned(paces(safe_bytes=60_000)), planned(paces(codec=None))])
@pytest.mark.parametrize("curves", [None, CURVES])
def test_the_picture_is_a_png(tmp_path, plan, curves):
    """The plan can be drawn with a step and without, where not all is safe, where nothing is, and with curves."""
    pytest.importorskip("matplotlib")
    save(plan, path := tmp_path / "plan.png", curves)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_curves_have_a_table_and_sentences():
    """A row for each loader, with the spread of the rounds; ranges that overlap with the best are as good."""
    text = curves_as_text(CURVES)
    rows = [line.split() for line in text.splitlines()]
    assert ["8", "3", "408", "+-", "25", "1,100", "+-", "141"] in rows
    assert [row[:2] for row in rows[1:7]] == [["8", "0"], ["8", "1"], ["8", "2"], ["8", "3"], ["16", "0"], ["128", "0"]]
    assert max(map(len, text.splitlines())) <= 80
    told = " ".join(text.split())
    assert "Batches from the source: num_workers=2 is as fast as any of these (400 samples/s)." in told
    assert "Batches from the cache: num_workers=0 is as fast as any of these" in told
    assert "from 8 to 128 samples they are 16.0 times as fast per sample." in told
    assert "neither faster nor slower per sample." in told
    assert "One batch was left out." in told


def test_columns_begin_or_end_at_one_place():
    """Columns to the left begin at the same place in every line, the others end at the same place."""
    assert aligned([["part", "ms"], ["forward", "4.00"], ["rest", "12.50"]], left=1) == [
        "part        ms",
        "forward   4.00",
        "rest     12.50",
    ]
