"""The plan: its arithmetic and its advice, from given paces; its table and picture."""

import re

import pytest
import torch

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.insight.measurement import Arm, Curves, Data, Paces, Spread, Steps
from lightning_stocache.insight.plan import Plan, Row, as_text, curves_as_text, plan, save

SPEC = SampleSpec.infer(torch.zeros(96, dtype=torch.uint8))  # 100 bytes with its word


def spread(value: float | list[float]) -> Spread:
    """The spread of one value, or of several measurements."""
    return Spread.across(value if isinstance(value, list) else [value])


def paces(*, plain=0.011, stored=0.01, hit=0.001, codec=SPEC, safe_bytes=10**9, **more) -> Paces:
    """Paces in seconds per sample; a list is several measurements."""
    return Paces(spread(plain), spread(stored), spread(hit), codec, safe_bytes=safe_bytes, **more)


def planned(
    measured: Paces | None = None,
    step: float | list[float] | None = None,
    samples=1000,
    epochs=None,
    slower: float = 0.0,
    start: float = 0.0,
    **data,
) -> Plan:
    """The plan for a dataset of this length; with a plain loader, a batch takes so much longer than by the law."""
    data = Data(range(samples), **{"batch_size": 10, **data})
    measured = measured or paces()
    if step is None:
        return plan(data, measured, None, epochs)
    alone, loading = spread(step), data.batch_size * measured.plain.median
    uncached = max(alone.median, loading) if data.num_workers else alone.median + loading
    return plan(data, measured, Steps(alone, spread(uncached + slower), start), epochs)


def row(made: Plan, budget: str) -> Row:
    """The row of a budget."""
    return next(row for row in made.rows if row.budget == budget)


QUICK = paces(hit=1e-6)
STEPS = {"step": 0.05}


# ---- the law ----


@pytest.mark.parametrize(
    ("budget", "options", "first", "later"),
    [
        ("0%", {}, 11, 11),  # what was measured of a plain loader
        # What has a slot is stored at first, and gathered later; the rest is loaded as without a cache.
        ("25%", {}, 10.75, 8.25 + 0.25),
        ("50%", {}, 10.5, 5.5 + 0.5),
        ("75%", {}, 10.25, 2.75 + 0.75),
        ("100%", {}, 10, 1),
        ("50%", STEPS, 15.5, 5.5 + 0.5 + 5),  # without workers loading and steps add up
        ("50%", STEPS | {"num_workers": 1}, 10.5, 5.5 + 0.5),  # with workers the slower counts
        ("75%", STEPS | {"num_workers": 1}, 10.25, 5),
        ("100%", STEPS, 15, 5),  # so it does where all is cached
        ("25%", {"nodes": 4, "samples": 4000}, 10, 1),  # four quarters are the whole
    ],
)
def test_the_law_is_linear(budget, options, first, later):
    """The seconds of epoch one and of later epochs, by the budget, the step, the workers and the nodes."""
    found = row(planned(**options), budget)
    assert (found.first_epoch.median, found.later_epoch.median) == pytest.approx((first, later))


def test_what_loading_and_steps_take_from_each_other_is_counted_with_what_is_loaded():
    """The uncached row is what was measured; an epoch of hits has none of it. Workers start in the first epoch."""
    made = planned(**STEPS, slower=0.02, start=0.5, num_workers=1)  # 100 batches
    assert row(made, "0%").later_epoch.median == pytest.approx(11 + 2)
    assert row(made, "50%").first_epoch.median == pytest.approx(10.5 + 2 + 0.5)
    assert row(made, "50%").later_epoch.median == pytest.approx(5.5 + 0.5 + 1)
    assert row(made, "100%").later_epoch.median == pytest.approx(5)
    quicker = planned(**STEPS, slower=-0.02, num_workers=1)
    assert row(quicker, "0%").later_epoch.median == pytest.approx(11)


def test_hit_rates_gains_and_bytes():
    """Hits are those of all nodes, gains reach from the lowest to the highest, and a slow first epoch pays later."""
    without, quarter = row(planned(), "0%"), row(planned(), "25%")
    assert (without.hit_rate, without.faster.median, without.pays_with) == (0, 1, None)
    assert (quarter.hit_rate, quarter.budget_bytes) == (0.25, 25_000)
    four = planned(nodes=4, samples=4000)
    assert (row(four, "25%").hit_rate, four.budget) == (1, "25%")
    whole = row(planned(paces(plain=[0.008, 0.011, 0.02], hit=[0.001, 0.002, 0.004])), "100%")
    assert whole.later_epoch[:3] == pytest.approx((1, 2, 4))
    assert whole.faster[:3] == pytest.approx((8 / 4, 11 / 2, 20 / 1))
    dear = planned(paces(stored=0.03))  # epoch one: 30 s instead of 11, then 1 s instead of 11
    assert [row(dear, budget).pays_with for budget in ("0%", "25%", "100%")] == [None, 3, 3]
    assert row(planned(paces(stored=0.012)), "100%").pays_with == 2
    assert row(planned(paces(stored=0.012, plain=[0.001, 0.021])), "100%").pays_with is None  # cannot be told


# ---- the advice ----

NOTHING = "No budget gains anything: "
NOISY = "Cannot tell whether a budget gains anything: repeated measurements differ by more than a cache would gain."
ENOUGH = "of the dataset nothing is gained: training waits for its steps."


@pytest.mark.parametrize(
    ("measured", "step", "budget", "sentences"),
    [
        # With steps of half the loading time, a part of the dataset gains all there is, and 2 % less is no loss.
        (QUICK, 0.0505, "54%", [f"Beyond 54 % {ENOUGH}"]),
        # The share is calculated from the slowest source and the quickest step: 1 - 1.02 * 5 / 13.
        (paces(hit=1e-6, plain=[0.0105, 0.011, 0.013]), [0.05, 0.0505, 0.06], "61%", [f"Beyond 61 % {ENOUGH}"]),
        (QUICK, 0.2, "0", [NOTHING + "training waits for its steps, not for data."]),
        (paces(plain=0.001, stored=0.0011), None, "0", [NOTHING + "the source is as fast as the cache."]),
        # Where measurements differ by more than a cache would gain, there is no advice.
        (paces(hit=1e-6, plain=[0.01, 0.011, 0.03]), 0.2, "auto", [NOISY]),
        (QUICK, [0.09, 0.2, 0.3], "auto", [NOISY]),
        (paces(plain=[0.009, 0.011], hit=[0.001, 0.01]), None, "auto", [NOISY]),
        # Ranges that do not overlap are no doubt, however wide they are.
        (paces(plain=[0.009, 0.011, 0.03], hit=[0.001, 0.002]), None, "auto", []),
        (paces(), None, "auto", []),
    ],
)
def test_the_advice_is_the_budget_that_is_enough(measured, step, budget, sentences):
    """It is a value for the config, with the reason for it, and a row of the table."""
    made = planned(measured, step, num_workers=1)
    assert (made.budget, list(made.sentences)) == (budget, sentences)
    assert budget in ("0", "auto") or row(made, budget)


@pytest.mark.parametrize(
    ("epochs", "stored", "budget", "words"),
    [
        (1, 0.011, "0", "A cache helps from the second epoch on, and trainer.max_epochs is 1."),
        (2, 0.011, "auto", ""),
        (2, 0.03, "0", "trainer.max_epochs=2 is too few: 3 epochs win back what the first one stores."),
        (3, 0.03, "auto", ""),
        (None, 0.03, "auto", ""),
    ],
)
def test_the_number_of_epochs_decides(epochs, stored, budget, words):
    """What the first epoch stores has to be won back."""
    made = planned(paces(stored=stored), epochs=epochs)
    assert (made.budget, " ".join(made.sentences)) == (budget, words)


def test_the_advice_is_what_is_free_or_can_be_cached():
    """Rows beyond the free memory are not safe; without a codec there is one row, uncached, and the reason."""
    short = planned(paces(safe_bytes=60_000))
    assert short.budget == "auto"
    assert [row.budget for row in short.rows if row.safe] == ["0%", "25%", "50%", "60%"]
    assert "room for 60.0 %" in short.sentences[0]
    nothing = planned(paces(codec=None, reason="Samples hold strings."))
    assert [row.budget for row in nothing.rows] == ["0%"]
    assert nothing.budget == "0"
    assert "Samples hold strings." in nothing.sentences[0]


# ---- tables and pictures ----

RATES = {
    **{
        Arm("plain", 8, n, False): spread(rates)
        for n, rates in enumerate(([90, 110], [190, 210], [380, 420], [390, 425]))
    },
    **{Arm("hit", 8, n, False): spread([1000, 1200]) for n in range(4)},
    **{Arm("plain", size, 0, False): spread([11.25 * size, 13.75 * size]) for size in (16, 128)},
    **{Arm("hit", size, 0, False): spread([1000, 1200]) for size in (16, 128)},
    Arm("plain", 8, 0, True): spread([180, 220]),
}
CURVES = Curves(Data(range(1000), 8), RATES, ["One batch was left out."])


def test_ranges_and_deviations_are_shown():
    """The lowest and the highest stand beside each median, with the standard deviation."""
    text = as_text(planned(paces(hit=1e-6, plain=[0.0105, 0.011, 0.0125])))
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines() if "  " in line.strip())
    assert lines["plain loader"].split() == ["11.00", "10.50..12.50", "1.04", "ms", "a", "sample"]
    assert lines["from the cache"].split() == ["1.0", "1.0..1.0", "0.0", "us", "a", "sample"]
    assert lines["25%"].split()[-4:] == ["1.3x", "[1.3..1.3]", "2", "epochs"]


def test_what_is_slower_is_called_slower():
    """Not 0.2 times as fast."""
    text = as_text(planned(paces(plain=0.001, stored=0.01, hit=0.005)))
    assert re.search(r"\n100% .* 5\.0x slower\n", text)
    assert "0.2x" not in text


@pytest.mark.parametrize("safe_bytes", [10**12, 60_000 * 10**6])
def test_the_table_fits_a_terminal(safe_bytes):
    """No line of a plan is wider than 80 characters, also of a large dataset whose measurements vary."""
    wild = paces(plain=[0.0002, 0.011, 9.5], hit=[1e-6, 2e-5], stored=[0.01, 12.5], safe_bytes=safe_bytes)
    many = {"samples": 10**9, "batch_size": 10**4, "num_workers": 128, "nodes": 16, "ranks": 8}
    text = as_text(planned(wild, step=[0.002, 0.2, 7.0], **many))
    for lines in (text, as_text(planned(wild, **many))):
        assert max(map(len, lines.splitlines())) <= 80
    assert ("75%*" in text) == (safe_bytes < 10**11)


@pytest.mark.parametrize(
    ("measured", "curves"), [(paces(safe_bytes=60_000), CURVES), (paces(codec=None), None)], ids=["all", "nothing"]
)
def test_the_picture_is_a_png(tmp_path, measured, curves):
    """The plan can be drawn without a step, where not all is safe and with curves, and where nothing can be cached."""
    pytest.importorskip("matplotlib")
    save(planned(measured), path := tmp_path / "plan.png", curves)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_curves_have_a_table_and_sentences():
    """A row for each loader, with the spread of the rounds; what overlaps with the best is as good."""
    text = curves_as_text(CURVES)
    assert text.splitlines()[:8] == [
        "batch_size  num_workers  pin_memory  from the source  from the cache",
        "         8            0       False        100 +- 14    1,100 +- 141",
        "         8            1       False        200 +- 14    1,100 +- 141",
        "         8            2       False        400 +- 28    1,100 +- 141",
        "         8            3       False        408 +- 25    1,100 +- 141",
        "        16            0       False        200 +- 28    1,100 +- 141",
        "       128            0       False     1,600 +- 226    1,100 +- 141",
        "         8            0        True        200 +- 28",
    ]
    assert max(map(len, text.splitlines())) <= 80
    told = " ".join(text.split())
    assert "Batches from the source: num_workers=2 is as fast as any of these (400 samples/s)." in told
    assert "Batches from the cache: num_workers=0 is as fast as any of these" in told
    assert "from 8 to 128 samples they are 16.0 times as fast per sample." in told
    assert "neither faster nor slower per sample." in told
    assert "Batches from the source: with pin_memory=True they are 2.0 times as fast per sample." in told
    assert "One batch was left out." in told
