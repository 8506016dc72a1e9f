"""Why a loader cannot be cached, or a job not be run, in words. Nothing is read, drawn or changed to find out.

What is found only by reading a source (samples that cannot be kept, an error) is the business of `setup.open`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_stocache.loading.loader_sampler import index_sampler
from lightning_stocache.loading.loader_tree import cached_behind
from lightning_stocache.setup.open_stream import check_budget
from lightning_stocache.torch_internals import is_loader_iterator
from lightning_stocache.training.lightning_internals import starts_ranks_itself
from lightning_stocache.training.loaders import hides_dataset, source_of
from lightning_stocache.training.options import CacheOptions
from lightning_stocache.training.sampling import check_sampler

__all__ = ["cacheable_length", "check_sweep", "title"]

_IN_MEMORY = (torch.Tensor, np.ndarray, str, bytes, range, set, frozenset)  # a list of batches, given as a loader


def title(leaf: Any) -> str:
    """What a loader reads, for messages: the class of its dataset, or its own if it is no DataLoader."""
    return type(source_of(leaf) if isinstance(leaf, DataLoader) else leaf).__name__


def cacheable_length(leaf: Any, stage: str, options: CacheOptions, world: int) -> int | None:
    """The length of a loader's dataset; -1 for a stream, None where there is nothing to be cached.

    `leaf` is what Lightning iterates over for a stage, and divides among `world` ranks.

    Raises:
        TypeError: it cannot be cached; what is in the way, and what to do about it.
        ValueError: its dataset is empty, or the budget is a share of a size that nobody knows.
    """
    if not isinstance(leaf, DataLoader):
        _check_other(leaf)
        return None
    if cached_behind(leaf):
        return None
    if isinstance(leaf.dataset, IterableDataset):
        if not options.streams or options.is_off(stage):
            raise TypeError("it is iterable-style. streams=True keeps it as it passes, if all of it fits")
        check_budget(options.budgets[options.pot(stage)])
        _check_copy(leaf, "CachedStream")
        return -1
    try:
        length = len(leaf.dataset)  # type: ignore[arg-type]
    except Exception as error:  # of the user's, and without a cache nobody may ask
        raise TypeError(f"it has no length: {error!r}. Give it a __len__") from error
    if not hasattr(leaf.dataset, "__getitem__"):
        raise TypeError("it is not map-style: it has no __getitem__")
    if length == 0:
        raise ValueError("it is empty")
    if not hasattr(key := _first_key(leaf), "__index__"):
        raise TypeError(f"its sampler gives keys such as {key!r}, and a cache knows samples by number")
    _check_copy(leaf, "CachedDataset")
    check_sampler(leaf, world)
    return length


def check_sweep(trainer: Any) -> None:
    """Refuse a sweep (`-m`) under a strategy that starts its ranks by the program's own command line, as `ddp` does.

    It starts them once and for all jobs, `-m` and all: they go through the sweep beside rank zero, and where one rank's
    job fails, the ranks train different jobs together, on caches of different jobs. `trainer` is None outside of one.

    Raises:
        ValueError: this is such a sweep.
    """
    hydra: Any = sys.modules.get("hydra.core.hydra_config")  # never imported: then this is no job of Hydra's
    if trainer is None or hydra is None or not hydra.HydraConfig.initialized():
        return
    if trainer.num_devices > 1 and starts_ranks_itself(trainer) and hydra.HydraConfig.get().mode.name == "MULTIRUN":
        raise ValueError(
            f"a sweep (-m) on {trainer.num_devices} devices needs a strategy that starts its ranks anew for every job, "
            "but trainer.strategy starts them once, by this command line.\nUse trainer.strategy=ddp_spawn, or run the "
            "program once per job, without -m"
        )


def _check_other(leaf: Any) -> None:
    """Refuse what Lightning would iterate over and is no DataLoader, unless it lies in memory or is cached already."""
    iterable = isinstance(leaf, Iterable) or hasattr(leaf, "__getitem__")
    if not iterable or isinstance(leaf, _IN_MEMORY) or cached_behind(leaf):
        return
    dataset = getattr(leaf, "dataset", None)
    wrap = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    advice = f"Wrap its {type(dataset).__name__} with CachedDataset where you make it" if wrap else "Use a DataLoader"
    raise TypeError(f"it is no torch.utils.data.DataLoader. {advice}")


def _check_copy(loader: DataLoader[Any], cached: str) -> None:
    """Refuse a loader of which no copy can read something else, and name what can be put in it by hand."""
    kind = type(loader).__name__
    process = getattr(loader.multiprocessing_context, "Process", None)
    if isinstance(process, type) and issubclass(process, Thread):  # MONAI's ThreadDataLoader
        raise TypeError(f"the workers of {kind} are threads, and a cache is shared by processes")
    if any(is_loader_iterator(value) for name, value in vars(loader).items() if name != "_iterator"):
        raise TypeError(f"{kind} reads it already. Wrap it with {cached} where you make the loader")
    if hides_dataset(loader):
        raise TypeError(f"{kind} makes it by itself. Wrap it with {cached} there")


def _first_key(loader: DataLoader[Any]) -> Any:
    """The first key that a sampler gives, where that can be seen without drawing from it; else 0."""
    keys = index_sampler(loader)
    while isinstance(keys, Sequence) and not isinstance(keys, str):
        if not keys:
            return 0
        keys = keys[0]
    return 0 if isinstance(keys, Iterable) and not isinstance(keys, str | torch.Tensor) else keys
