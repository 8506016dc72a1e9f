"""How TensorBoard's Custom Scalars tab shows the metrics: the layout of its charts, as plain data.

`LAYOUT` is what `SummaryWriter.add_custom_scalars` takes: category -> chart -> ["Multiline", patterns of tags]. A
writer takes it once; several runs with the same layout share their charts. TensorBoard matches the beginning of a tag,
so each pattern ends with `$`: without it `hit_rate` would bring `hit_rate_expected` along wherever it stands.

TensorBoard cuts an axis to what is drawn, where 0.698 and 0.700 look like nothing and everything. So each chart draws
`ZERO`, too, and a rate its ceiling. A single zero would not do: "Ignore outliers", which is on, leaves out what is less
than a twentieth of a chart's points. So there is one wherever values are logged (`mark_zero`).

TensorBoard smooths by 0.6, by which a hit rate of 0.70 in epoch two reads 0.43:
`/#custom_scalars&_smoothingWeight=0` is the address of the tab without smoothing.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LAYOUT", "ZERO", "mark_zero"]

ZERO = "stocache/zero"
"""The tag that has axes start at zero: no metric, and for TensorBoard alone."""


def mark_zero(logger: Any, step: int) -> None:
    """Beside values that were logged at a step: the zero of their charts, if the logger is TensorBoard's.

    Args:
        logger: of Lightning.
        step: that of the values.
    """
    writer: Any = getattr(logger, "experiment", None)
    if hasattr(writer, "add_custom_scalars"):
        writer.add_scalar(ZERO, 0.0, step)


def _chart(*metrics: str, stage: str = "") -> list[str | list[str]]:
    return ["Multiline", [*(f"^stocache/{stage}{metric}$" for metric in metrics), f"^{ZERO}$"]]


LAYOUT: dict[str, dict[str, list[str | list[str]]]] = {
    "Stochastic cache": {
        "Hit rate, its ceiling and what theory expects": _chart("hit_rate", "coverage", "hit_rate_expected"),
        "Fill: slots that are ready": _chart("fill_fraction"),
        "Bytes from cache and from source": _chart("bytes_from_cache", "bytes_from_source"),
        "Seconds of waiting for data and of computing": _chart("data_wait_seconds", "compute_seconds"),
        "Samples per second": _chart("samples_per_second"),
        "Memory and budget, in bytes": _chart("memory_bytes", "budget_bytes"),
    },
    "Stochastic cache: samples": {
        "Hits, misses and bypasses": _chart("hits", "misses", "bypasses"),
        "Fills": _chart("fills"),
        "Seconds of loading, over all processes: source, fill and gather": _chart(
            "source_seconds", "fill_seconds", "gather_seconds"
        ),
    },
    "Stochastic cache: validation and test": {
        "Hit rate and its ceiling": _chart("hit_rate", "coverage", stage="(val|test)/"),
        "Memory and budget, in bytes": _chart("memory_bytes", "budget_bytes", stage="(val|test)/"),
    },
    "Stochastic cache: nodes": {
        "Hit rate per node": _chart("hit_rate", stage=r"node\d+/"),
        "Fill per node": _chart("fill_fraction", stage=r"node\d+/"),
        "Memory per node, in bytes": _chart("memory_bytes", stage=r"node\d+/"),
    },
}
"""The layout. With one node or no validation the last categories stay empty."""
