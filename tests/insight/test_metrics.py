"""Rates from counts: sums first, then the division. The layout of TensorBoard's Custom Scalars tab."""

import math
import re

from lightning_stocache.cache.counters import Counts
from lightning_stocache.insight.dashboards import LAYOUT
from lightning_stocache.insight.metrics import Tally, rates, summarise

OF_LOOPS = {"data_wait_seconds", "compute_seconds", "samples_per_second"}


def test_rates_of_one_tally():
    """Bypasses count against the hit rate. Nanoseconds become seconds; bytes stay bytes. A rate over nothing is 0."""
    counts = Counts(hits=1, misses=1, bypasses=2, source_ns=1_500_000_000, fill_ns=250_000_000, gather_ns=125_000_000)
    values = rates(Tally(counts=counts, slots=4, filled=2, memory_bytes=9, budget_bytes=11))
    assert (values["hit_rate"], values["fill_fraction"]) == (0.25, 0.5)
    assert (values["source_seconds"], values["fill_seconds"], values["gather_seconds"]) == (1.5, 0.25, 0.125)
    assert (values["memory_bytes"], values["budget_bytes"]) == (9, 11)
    assert {rates(Tally())[name] for name in ("hit_rate", "fill_fraction")} == {0}


def test_seconds_of_the_loop_are_the_mean_over_ranks():
    """Ranks wait and compute at the same time, and what one of them does not know has no metric."""
    loops = [
        Tally(0, Counts(hits=30), wait_seconds=1, compute_seconds=2, loop_seconds=4, ranks=1),
        Tally(0, Counts(hits=10), wait_seconds=3, compute_seconds=4, loop_seconds=6, ranks=1),
    ]
    job = summarise(loops)
    assert (job["data_wait_seconds"], job["compute_seconds"], job["samples_per_second"]) == (2, 3, 8)
    assert OF_LOOPS & set(summarise([*loops, Tally(wait_seconds=math.nan, ranks=1)])) == {"samples_per_second"}
    assert OF_LOOPS & set(summarise([Tally(counts=Counts(hits=1))])) == set()
    known, unknown = (set(rates(Tally(counts=Counts(bypasses=2), unsized=unsized))) for unsized in (0, 2))
    assert known - unknown == {"bytes_from_source"}


def test_several_nodes_have_three_keys_each():
    """Each of several nodes has hit_rate, fill_fraction and memory_bytes, from its own ranks alone."""
    assert not [key for key in summarise([Tally(0), Tally(0)]) if key.startswith("node")]
    job = summarise(
        [
            Tally(0, Counts(hits=1), slots=4, filled=2, memory_bytes=10),
            Tally(0, Counts(misses=1)),
            Tally(1, Counts(hits=3, misses=1), slots=4, filled=4, memory_bytes=30),
        ]
    )
    assert (job["node0/hit_rate"], job["node0/fill_fraction"], job["node0/memory_bytes"]) == (0.5, 0.5, 10)
    assert (job["node1/hit_rate"], job["node1/fill_fraction"], job["node1/memory_bytes"]) == (0.75, 1, 30)
    assert (job["hit_rate"], job["fill_fraction"], job["memory_bytes"]) == (4 / 6, 0.75, 40)
    assert (job["hits"], job["misses"], job["bypasses"], job["fills"]) == (4, 2, 0, 0)


CHARTS = {(category, chart): tags for category, charts in LAYOUT.items() for chart, (_, tags) in charts.items()}


def test_every_tag_is_shown_in_its_category_alone():
    """Training, live values, other stages and nodes have a category each, whose patterns match what is logged."""
    names = [*summarise([Tally(node, ranks=1) for node in (0, 1)]), "coverage", "hit_rate_expected"]
    tags = [f"stocache/{prefix}{name}" for prefix in ("", "val/", "predict/", "live/") for name in names]
    shown = {tag: {name for (name, _), of in CHARTS.items() if any(re.match(one, tag) for one in of)} for tag in tags}
    of_stages = {"Stochastic cache: validation, test and prediction"}
    assert shown["stocache/hit_rate"] == shown["stocache/samples_per_second"] == {"Stochastic cache"}
    assert shown["stocache/hit_rate_expected"] == set()
    assert shown["stocache/live/hit_rate"] == {"Stochastic cache: in the epoch so far"}
    assert shown["stocache/val/hit_rate"] == shown["stocache/predict/hit_rate"] == of_stages
    assert shown["stocache/node1/memory_bytes"] == {"Stochastic cache: nodes"}
    assert [one for of in CHARTS.values() for one in of if not any(re.match(one, tag) for tag in tags)] == []
