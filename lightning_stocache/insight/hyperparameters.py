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
    leaves = [leaf for leaf in leaves_in(loaders) if hasattr(leaf, "dataset")]
    pools = {id(leaf.dataset.dataset): leaf.dataset for leaf in leaves if isinstance(leaf.dataset, RollingCache)}
    rows = [_of_dataset(dataset, pools.get(id(dataset))) for dataset in datasets]
    joined = {name: sum(values) if name in _ADDED else _common(values) for name, values in _columns(rows).items()}
    group = datasets[0].group
    joined |= {"coverage": coverage(datasets), "sampling": _common([_sampling(leaf) for leaf in leaves])}
    return joined | {"nodes": len(group.nodes), "ranks": group.world}


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
        if cache is not None:
            row["layout"] = "rows" if gathers(cache) else "records"
        if request.dir is not None:
            row["backend"] = "disk"
        if isinstance(opened.source, EncodedSource):
            row["store"] = "encoded"
    if pool is not None:
        row |= {"dataset": type(pool.request.source).__name__, "budget": str(pool.request.budget)}
    return row


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _sampling(loader: Any) -> str | None:
    if not hasattr(loader, "sampler") or not hasattr(loader, "batch_sampler"):
        return None
    sampler = index_sampler(loader)
    return sampler.mode if isinstance(sampler, LocalitySampler) else type(sampler).__name__


def _common(values: list[Any]) -> Any:
    """The value that all have, or the different ones with commas between them."""
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else ", ".join(map(str, different))
