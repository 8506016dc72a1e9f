"""The hyperparameters of the caches, for loggers: nested under `stocache`, those of validation under `stocache/val`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from lightning_stocache.growing.rolling_cache import RollingCache
from lightning_stocache.insight.tallies import coverage, samples_of
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.loader_tree import Cached, cached_in_leaves, leaves_in
from lightning_stocache.source.encoded import EncodedSource

__all__ = ["hyperparameters", "log_hyperparameters"]

_ADDED = ("samples", "drawn", "slots", "budget_bytes")  # hyperparameters that are summed over the datasets of a stage


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
        row |= {
            "samples": request.length,
            "budget": str(request.budget.written),
            "name": request.name,
            "dir": request.dir,
        }
        row["layout"] = "none" if cache is None else "rows" if cache.codec.is_fixed else "records"
        row["backend"] = row["backend"] if request.dir is None else "disk"
        row["store"] = "encoded" if isinstance(opened.source, EncodedSource) else "decoded"
    if pool is not None:
        row |= {"dataset": type(pool.source).__name__, "budget": str(pool.budget.written)}
    return row


def _common(values: list[Any]) -> Any:
    """The value if all values are the same, or the different values with commas between them."""
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else ", ".join(map(str, different))
