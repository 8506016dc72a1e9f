"""How dashboards show the metrics: the charts of TensorBoard's Custom Scalars tab, and the axes of W&B.

`LAYOUT` is what `SummaryWriter.add_custom_scalars` takes: category -> chart -> ["Multiline", patterns of tags]. A
writer takes it once; several runs with the same layout share their charts. TensorBoard matches the beginning of a tag,
so each pattern ends with `$`: without it `hit_rate` would bring `hit_rate_expected` along wherever it stands.

TensorBoard smooths by 0.6, by which a hit rate of 0.70 in epoch two reads 0.43:
`/#custom_scalars&_smoothingWeight=0` is the address of the tab without smoothing.

`axes` are what W&B's `run.define_metric` takes, one entry for each call: the values of an epoch are drawn over `epoch`,
live ones over `trainer/global_step`, which Lightning logs beside them. Summaries are the last values, those that have
a best and a worst epoch with these beside it; live values have none.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from lightning_stocache.insight.metrics import LIVE, LIVE_METRICS, NODE_METRICS, ROLLING_METRICS, Tally, rates

__all__ = ["LAYOUT", "axes", "lay_out"]

_laid_out: WeakSet[Any] = WeakSet()


def lay_out(logger: Any, nodes: int = 1) -> None:
    """Tell a dashboard how these metrics are drawn, once for each run. Other loggers are left alone.

    Args:
        logger: of Lightning.
        nodes: how many there are.
    """
    experiment: Any = getattr(logger, "experiment", None)
    has_charts, has_axes = (hasattr(experiment, name) for name in ("add_custom_scalars", "define_metric"))
    if not (has_charts or has_axes) or experiment in _laid_out:
        return
    _laid_out.add(experiment)
    if has_charts:
        experiment.add_custom_scalars(LAYOUT)
    for axis in axes(nodes) if has_axes else ():
        experiment.define_metric(**axis)


def _chart(*metrics: str) -> list[str | list[str]]:
    return ["Multiline", [f"^stocache/{metric}$" for metric in metrics]]


LAYOUT: dict[str, dict[str, list[str | list[str]]]] = {
    "Stochastic cache": {
        "Hit rate, and the share that has a slot": _chart("hit_rate", "coverage"),
        "Fill: slots that are ready": _chart("live/fill_fraction", "fill_fraction"),
        "Bytes from the cache and from the source": _chart("bytes_from_cache", "bytes_from_source"),
        "Seconds of waiting for data and of computing": _chart("data_wait_seconds", "compute_seconds"),
        "Samples per second": _chart("samples_per_second"),
        "Memory and budget, in bytes": _chart("memory_bytes", "budget_bytes"),
    },
    "Stochastic cache: in the epoch so far": {
        "Hit rate": _chart("live/hit_rate"),
        "Seconds of waiting for data and of computing": _chart("live/data_wait_seconds", "live/compute_seconds"),
    },
    "Stochastic cache: validation, test and prediction": {"Hit rate": _chart("(val|test|predict)/hit_rate")},
    "Stochastic cache: nodes": {
        "Hit rate per node": _chart(r"node\d+/hit_rate"),
        "Memory per node, in bytes": _chart(r"node\d+/memory_bytes"),
    },
}
"""The layout: one or two curves a chart, because a run has one colour. Without validation or with one node the last
categories stay empty."""


def axes(nodes: int = 1) -> list[dict[str, Any]]:
    """The axes of all metrics: those of a run that has logged no such value draw nothing.

    Args:
        nodes: how many there are.
    """
    of_stages = [*rates(Tally()), "coverage"]
    of_epochs = [*rates(Tally(ranks=1)), "coverage", "hit_rate_expected"]
    of_epochs += [f"{stage}/{name}" for stage in ("val", "test", "predict") for name in of_stages]
    of_epochs += [f"rolling/{name}" for name in ROLLING_METRICS]
    of_epochs += [f"node{node}/{name}" for node in range(nodes) if nodes > 1 for name in NODE_METRICS]
    extremes = {name: {"summary": "last,min,max"} for name in ("data_wait_seconds", "samples_per_second")}
    # No patterns: of two that match W&B takes one at random, and Lightning has defined `*`.
    return [
        {"name": "epoch"},
        *({"name": f"stocache/{name}", "step_metric": "epoch", **extremes.get(name, {})} for name in of_epochs),
        *({"name": LIVE + name, "step_metric": "trainer/global_step", "summary": "none"} for name in LIVE_METRICS),
    ]
