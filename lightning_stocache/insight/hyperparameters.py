"""What was asked of the caches of some loaders, granted and decided, as plain values that runs are grouped by.

They are nested under one key, `stocache`: those of training directly below it, those of another stage below its name.
Loggers write them as `stocache/budget` (TensorBoard, MLflow) or `stocache.budget` (W&B).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_stocache.cache.store import gathers
from lightning_stocache.growing.rolling_cache import RollingCache
from lightning_stocache.insight.tallies import coverage, samples_of
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.loader_sampler import index_sampler
from lightning_stocache.loading.loader_tree import Cached, cached_in_leaves, leaves_in
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.source.encoded import EncodedSource

__all__ = ["hyperparameters"]

_ADDED = ("samples", "drawn", "slots", "budget_bytes")  # over the datasets of a stage


def hyperparameters(stages: Mapping[str, Any]) -> dict[str, Any]:
    """What the caches behind the loaders of some stages are, as plain values; empty where there are none.

    Args:
        stages: the loaders of each stage, nested as Lightning takes them.

    Returns:
        Under `stocache` the keys `dataset` (its class), `samples` (of the whole dataset), `drawn` (those of them that
        the loader draws, where that is known, else all), `budget` (as it was asked for), `budget_bytes` (granted on
        this node), `slots` (on this node), `coverage` (share of `drawn` that has a slot somewhere),
        `layout` ("rows", "records", "none"), `store` ("decoded", "encoded"), `backend` ("tmpfile", "memfd",
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
    told |= {
        "backend": None if dataset.counters is None else dataset.counters.segment.backend,
        "name": None,
        "dir": None,
    }
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
        told["store"] = "encoded"
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
