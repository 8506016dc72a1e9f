"""Messages to loggers besides values: charts for TensorBoard, axes for W&B, and hyperparameters of the caches.

`LAYOUT` is the argument of `SummaryWriter.add_custom_scalars`: category -> chart -> ["Multiline", patterns of tags].
TensorBoard matches the beginning of a tag, so each pattern ends with `$`. TensorBoard smooths curves by 0.6, so that a
hit rate of 0.70 in epoch two reads 0.43. The address `/#custom_scalars&_smoothingWeight=0` shows them unsmoothed.

`axes` are the arguments of W&B's `run.define_metric`: epoch values are drawn over `epoch`, live values over
`trainer/global_step`. Hyperparameters are nested under `stocache`, those of validation under `stocache/val`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any
from weakref import WeakSet

from lightning_stocache.cache.store import gathers
from lightning_stocache.growing.rolling_cache import RollingCache
from lightning_stocache.insight.metrics import LIVE, LIVE_METRICS, NODE_METRICS, ROLLING_METRICS, Tally, rates
from lightning_stocache.insight.tallies import coverage, samples_of
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.loader_tree import Cached, cached_in_leaves, leaves_in
from lightning_stocache.source.encoded import EncodedSource

__all__ = ["LAYOUT", "axes", "hyperparameters", "lay_out", "log_hyperparameters"]

_ADDED = ("samples", "drawn", "slots", "budget_bytes")  # hyperparameters that are summed over the datasets of a stage
_laid_out: WeakSet[Any] = WeakSet()  # runs of TensorBoard or W&B


def lay_out(logger: Any, nodes: int = 1) -> None:
    """Tell TensorBoard or W&B how to draw the metrics of some nodes, once for each run."""
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
"""Charts of one or two curves, because all curves of a run have one colour. The last two categories stay empty without
validation and with a single node."""


def axes(nodes: int = 1) -> list[dict[str, Any]]:
    """The axes of all metrics of some nodes. An axis without values draws nothing."""
    of_stages = [*rates(Tally()), "coverage"]
    of_epochs = [*rates(Tally(ranks=1)), "coverage", "hit_rate_expected"]
    of_epochs += [f"{stage}/{name}" for stage in ("val", "test", "predict") for name in of_stages]
    of_epochs += [f"rolling/{name}" for name in ROLLING_METRICS]
    of_epochs += [f"node{node}/{name}" for node in range(nodes) if nodes > 1 for name in NODE_METRICS]
    extremes = {name: {"summary": "last,min,max"} for name in ("data_wait_seconds", "samples_per_second")}
    # Not a pattern: if two patterns match, W&B takes one of them at random, and Lightning has defined `*`.
    return [
        {"name": "epoch"},
        *({"name": f"stocache/{name}", "step_metric": "epoch", **extremes.get(name, {})} for name in of_epochs),
        *({"name": LIVE + name, "step_metric": "trainer/global_step", "summary": "none"} for name in LIVE_METRICS),
    ]


def log_hyperparameters(logger: Any, values: dict[str, Any]) -> None:
    """Log hyperparameters. TensorBoard's tab HPARAMS shows them beside the last hit rate.

    Lightning's TensorBoardLogger would log a metric `hp_metric` of -1 for this tab.
    """
    experiment: Any = getattr(logger, "experiment", None)
    if type(experiment).__module__ != "torch.utils.tensorboard.writer":
        logger.log_hyperparams(values)
        return
    summaries: Any = import_module("torch.utils.tensorboard.summary")
    metrics = {"stocache/hit_rate": 0.0}  # the name alone is written
    logger.log_hyperparams(values, metrics={})  # into `logger.hparams` alone
    for summary in summaries.hparams(dict(_flat(values)), metrics):
        experiment.file_writer.add_summary(summary)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def hyperparameters(stages: Mapping[str, Any]) -> dict[str, Any]:
    """The options and decisions of the caches behind loaders, as plain values; empty if no dataset is cached.

    Args:
        stages: the loaders of each stage, nested as Lightning takes them.

    Returns:
        Under `stocache` the keys `dataset` (its class), `samples` (of the whole dataset), `drawn` (samples that the
        loader draws, if that is known, else all samples), `budget` (as the user gave it), `budget_bytes` (granted on
        this node), `slots` (on this node), `coverage` (share of `drawn` that has a slot on some node), `layout`
        ("rows", "records", "stream", "none"), `store` ("decoded", "encoded"), `backend` ("tmpfile", "memfd", "file",
        "disk"), `nodes`, `ranks`, `name` and `dir`, for training; the same keys for another stage below its name.
        Numbers of several datasets are summed.
    """
    found: dict[str, Any] = {}
    for stage, loaders in stages.items():
        if of_stage := _of_stage(loaders):
            found |= of_stage if stage == "train" else {stage: of_stage}
    return {"stocache": found} if found else {}


def _of_stage(loaders: Any) -> dict[str, Any]:
    datasets = [dataset for dataset in cached_in_leaves(loaders) if dataset.counters is not None]
    if not datasets:
        return {}
    leaves = [leaf for leaf in leaves_in(loaders) if hasattr(leaf, "dataset")]
    pools = {id(leaf.dataset.dataset): leaf.dataset for leaf in leaves if isinstance(leaf.dataset, RollingCache)}
    rows = [_of_dataset(dataset, pools.get(id(dataset))) for dataset in datasets]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    joined = {name: sum(values) if name in _ADDED else _common(values) for name, values in columns.items()}
    group = datasets[0].group
    return joined | {"coverage": coverage(datasets), "nodes": len(group.nodes), "ranks": group.world}


def _of_dataset(dataset: Cached, pool: RollingCache | None) -> dict[str, Any]:
    assert dataset.counters is not None
    cache, drawn = dataset.cache, samples_of(dataset)
    row = {"dataset": type(dataset.source).__name__, "samples": drawn, "drawn": drawn, "budget": None}
    row |= {"budget_bytes": dataset.budget_bytes, "slots": 0 if cache is None else len(cache), "store": "decoded"}
    row |= {"layout": "none" if cache is None else "stream", "backend": dataset.counters.segment.backend}
    row |= {"name": None, "dir": None}
    if isinstance(dataset, CachedDataset):
        opened = cached_source(dataset).opened
        request, cache = opened.request, opened.live_cache
        row |= {"samples": request.length, "budget": str(request.budget), "name": request.name, "dir": request.dir}
        row["layout"] = "none" if cache is None else "rows" if gathers(cache) else "records"
        row["backend"] = row["backend"] if request.dir is None else "disk"
        row["store"] = "encoded" if isinstance(opened.source, EncodedSource) else "decoded"
    if pool is not None:
        row |= {"dataset": type(pool.source).__name__, "budget": str(pool.budget)}
    return row


def _common(values: list[Any]) -> Any:
    """The value if all values are the same, or the different values with commas between them."""
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else ", ".join(map(str, different))
