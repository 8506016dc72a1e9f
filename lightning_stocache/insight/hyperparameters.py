"""What was asked of the caches of some loaders, granted and decided, as plain values that runs are grouped by.

They are nested under one key, `stocache`: those of training directly below it, those of another stage below its name.
Loggers write them as `stocache/budget` (TensorBoard, MLflow) or `stocache.budget` (W&B).

A run may be told them more than once, with other values where other memory is free: by a second `fit`, or by a job that
goes on in the run of an earlier one. MLflow refuses another value for a name, so the first values stay there.
TensorBoard's HPARAMS tab shows the first record of a run alone: where a module has saved hyperparameters it is theirs,
and ours are in the TEXT tab.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from lightning_stocache.cache.store import gathers
from lightning_stocache.insight.layout import ZERO, mark_zero
from lightning_stocache.insight.tallies import coverage, samples_of
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.loader_sampler import index_sampler
from lightning_stocache.loading.loader_tree import Cached, cached_in_leaves, leaves_in
from lightning_stocache.loading.rolling_cache import RollingCache
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.source.encoded import EncodedSource

__all__ = ["hyperparameters", "log_hyperparameters"]

_ADDED = ("samples", "drawn", "slots", "budget_bytes")  # over the datasets of a stage

_told: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()  # what a logger has been told in this process


def hyperparameters(stages: Mapping[str, Any]) -> dict[str, Any]:
    """What the caches behind the loaders of some stages are, as plain values; empty where there are none.

    Args:
        stages: the loaders of each stage, nested as Lightning takes them.

    Returns:
        Under `stocache` the keys `dataset` (its class), `samples` (of the whole dataset), `drawn` (those of them that
        the loader draws, where that is known, else all), `budget` (as it was asked for), `budget_bytes` (granted on
        this node), `slots` (on this node), `coverage` (share of `drawn` that has a slot somewhere),
        `layout` ("rows", "records", "none"), `store` ("decoded", "encoded", "mixed"), `backend` ("tmpfile", "memfd",
        "file", "disk"), `sampling` (the mode of a LocalitySampler, else the sampler's class), `nodes`, `ranks`, `name`
        and `dir`, for training; for another stage the same below its name. Of several datasets numbers are summed.

    Example:
        >>> from lightning_stocache import CachedDataset, CachedLoader
        >>> dataset = CachedDataset([1.0, 2.0, 3.0, 4.0], budget="50%")
        >>> found = hyperparameters({"train": CachedLoader(dataset)})["stocache"]
        >>> found["dataset"], found["budget"], found["slots"], found["coverage"], found["sampling"]
        ('list', '50%', 2, 0.5, 'SequentialSampler')
        >>> dataset.close()
    """
    found: dict[str, Any] = {}
    for stage, loaders in stages.items():
        if of_stage := _of_stage(loaders):
            found |= of_stage if stage == "train" else {stage: of_stage}
    return {"stocache": found} if found else {}


def log_hyperparameters(logger: Any, values: Mapping[str, Any], step: int = 0) -> None:
    """Tell a logger hyperparameters, unless it knows them.

    Args:
        logger: of Lightning or Fabric; one that takes none is left alone.
        values: as `hyperparameters` gives them.
        step: where TensorBoard notes them.
    """
    if not values or _is_told(logger, values):
        return
    writer: Any = getattr(logger, "experiment", None)
    try:
        if hasattr(writer, "add_custom_scalars") and getattr(logger, "hparams", None):
            logger.log_hyperparams(dict(values), metrics={})  # for its `hparams` alone
            rows = "\n".join(f"|{name}|{value}|" for name, value in _flat(values))
            writer.add_text("stocache", f"|hyperparameter|value|\n|---|---|\n{rows}", step)
        elif hasattr(writer, "add_custom_scalars"):
            # TensorBoard has hyperparameters beside a metric only: without one given here it would be `hp_metric`.
            logger.log_hyperparams(dict(values), metrics={ZERO: 0.0})
            mark_zero(logger, 0, logged=True)
        elif any(kind.__name__ == "MLFlowLogger" for kind in type(logger).__mro__):
            logger.log_hyperparams(_new_to_mlflow(logger, values))
        else:
            logger.log_hyperparams(dict(values))
    except NotImplementedError:  # Fabric's CSVLogger
        pass


def _is_told(logger: Any, values: Mapping[str, Any]) -> bool:
    """Whether a logger has been told these values already; it is from now on."""
    try:
        known = _told.get(logger)
        _told[logger] = dict(values)
    except TypeError:  # a user's own, which cannot be hashed or referred to weakly
        return False
    return known == values


def _new_to_mlflow(logger: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the run has no value for."""
    known = logger.experiment.get_run(logger.run_id).data.params
    return {name: value for name, value in _flat(values) if name not in known}


def _flat(values: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}/")
        else:
            yield above + name, value


def _of_stage(loaders: Any) -> dict[str, Any]:
    datasets = [dataset for dataset in cached_in_leaves(loaders) if dataset.counters is not None]
    if not datasets:
        return {}
    leaves = list(leaves_in(loaders))
    read = [getattr(leaf, "dataset", None) for leaf in leaves]
    pools = {id(dataset.dataset): dataset for dataset in read if isinstance(dataset, RollingCache)}
    told = [_of_pool(pools[id(dataset)]) if id(dataset) in pools else _of_dataset(dataset) for dataset in datasets]
    columns = {name: [each[name] for each in told] for name in told[0]}
    joined = {name: sum(values) if name in _ADDED else _common(values) for name, values in columns.items()}
    group = datasets[0].group
    return joined | {
        "coverage": coverage(datasets),
        "sampling": _common([_sampling(leaf) for leaf in leaves if hasattr(leaf, "dataset")]),
        "nodes": len(group.nodes),
        "ranks": group.world,
    }


def _of_dataset(dataset: Cached) -> dict[str, Any]:
    drawn = samples_of(dataset)
    told: dict[str, Any] = {"dataset": type(dataset.source).__name__, "samples": drawn, "drawn": drawn}
    told |= {"budget": None, "budget_bytes": dataset.budget_bytes, "slots": 0, "layout": "none", "store": "decoded"}
    told |= {"backend": None if dataset.counters is None else dataset.counters.backend, "name": None, "dir": None}
    if isinstance(dataset, CachedDataset):
        return told | _of_opened(cached_source(dataset).opened)
    return told if dataset.cache is None else told | {"slots": len(dataset.cache), "layout": "stream"}


def _of_opened(opened: OpenCache) -> dict[str, Any]:
    request, cache = opened.request, opened.live_cache
    told: dict[str, Any] = {"samples": request.length, "budget": str(request.budget)}
    told |= {"name": request.name, "dir": request.dir}
    if request.dir is not None:
        told["backend"] = "disk"
    if cache is not None:
        told |= {"slots": len(cache), "layout": "rows" if gathers(cache) else "records"}
    if isinstance(opened.source, EncodedSource):
        told["store"] = opened.source.form
    return told


def _of_pool(pool: RollingCache) -> dict[str, Any]:
    told = _of_dataset(pool.dataset)
    return told | {"dataset": type(pool.request.source).__name__, "budget": str(pool.request.budget)}


def _sampling(loader: Any) -> str | None:
    if not hasattr(loader, "sampler") or not hasattr(loader, "batch_sampler"):
        return None
    sampler = index_sampler(loader)
    if isinstance(sampler, LocalitySampler):
        return sampler.mode
    return type(sampler).__name__


def _common(values: list[Any]) -> Any:
    """The value that all have, or the different ones with commas between them."""
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else ", ".join(map(str, different))
