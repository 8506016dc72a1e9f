"""Rates from counts: sums first, then the division."""

import math
import re
from pathlib import Path

from lightning_stocache.cache.counters import Counts
from lightning_stocache.insight.metrics import LIVE_METRICS, NODE_METRICS, ROLLING_METRICS, Tally, rates, summarise

OF_LOOPS = {"data_wait_seconds", "compute_seconds", "samples_per_second", "epoch_seconds"}


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
        Tally(0, Counts(hits=30), wait_seconds=1, loop_seconds=4, ranks=1),
        Tally(0, Counts(hits=10), wait_seconds=3, loop_seconds=6, ranks=1),
    ]
    job = summarise(loops)
    assert [job[name] for name in ("data_wait_seconds", "compute_seconds", "epoch_seconds")] == [2, 3, 5]
    assert job["samples_per_second"] == 8
    of_unknown = OF_LOOPS & set(summarise([*loops, Tally(wait_seconds=math.nan, ranks=1)]))
    assert of_unknown == {"epoch_seconds", "samples_per_second"}
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


def names_in(text: str) -> set[str]:
    """The names in code, without their prefixes."""
    return {name.rpartition("/")[2] for name in re.findall(r"`([a-z_/]+)`", text)}


def test_the_reference_lists_what_is_logged():
    """Each key of an epoch, of live values and of a node, and no other."""
    page = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert names_in("".join(rows)) == {*rates(Tally(ranks=1)), "coverage", *ROLLING_METRICS}
    live = page.partition("## While an epoch runs")[2].partition(" are logged")[0]
    assert names_in(live) == set(LIVE_METRICS)
    of_nodes = page.partition("`stocache/node<k>/` with")[2].partition(".")[0].partition("(")[0]
    assert names_in(of_nodes) == set(NODE_METRICS)
