"""The Trainer's loaders: walk them, and make one anew around another dataset.

Users hand Lightning a loader, or any nesting of dicts, lists and tuples of them, or a CombinedLoader. `rewrap` keeps
that nesting and its types. A loader cannot have its dataset swapped: Lightning re-creates loaders from their
constructor's arguments to inject a DistributedSampler, and a swapped dataset is silently lost then. So a new loader is
made, by keyword, from the attributes of the old one, of the same class; its sampler object is kept, since it only knows
the length.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, Sampler, Subset

from lightning_stocache.loading.allocation import InFlight
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.stand_in import cached_in

__all__ = ["cached_datasets", "in_flight", "loaders_in", "rewrap", "with_dataset"]

_ALWAYS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator", "in_order")
_WITH_WORKERS = ("multiprocessing_context", "prefetch_factor", "persistent_workers")


def loaders_in(loaders: Any) -> Iterator[DataLoader[Any]]:
    """Every DataLoader in what a user gave the Trainer."""
    if isinstance(loaders, DataLoader):
        yield loaders
    elif hasattr(loaders, "iterables"):  # CombinedLoader, of lightning.pytorch or of pytorch_lightning
        yield from loaders_in(loaders.iterables)
    elif isinstance(loaders, MutableMapping):
        for one in loaders.values():
            yield from loaders_in(one)
    elif isinstance(loaders, list | tuple):
        for one in loaders:
            yield from loaders_in(one)


def rewrap(loaders: Any, wrap: Callable[[DataLoader[Any]], DataLoader[Any]]) -> Any:
    """The same nesting with every DataLoader replaced by `wrap(loader)`."""
    if isinstance(loaders, DataLoader):
        return wrap(loaders)
    if hasattr(loaders, "iterables"):
        return type(loaders)(rewrap(loaders.iterables, wrap), loaders._mode)
    if isinstance(loaders, MutableMapping):
        renewed = copy.copy(loaders)  # an OrderedDict stays one
        renewed.update({name: rewrap(one, wrap) for name, one in loaders.items()})
        return renewed
    if isinstance(loaders, tuple) and hasattr(loaders, "_fields"):
        return type(loaders)(*(rewrap(one, wrap) for one in loaders))
    if isinstance(loaders, list | tuple):
        return type(loaders)([rewrap(one, wrap) for one in loaders])
    return loaders


def cached_datasets(loaders: Any) -> list[CachedDataset]:
    """The CachedDatasets that the loaders read from, through Subset and ConcatDataset; one per cache."""
    found: dict[int, CachedDataset] = {}
    for loader in loaders_in(loaders):
        for dataset in _inside(loader.dataset):
            found.setdefault(id(dataset.counters or dataset), dataset)
    return list(found.values())


def _inside(dataset: Dataset[Any]) -> Iterator[CachedDataset]:
    if (cached := cached_in(dataset)) is not None:
        yield cached
    elif isinstance(dataset, Subset):
        yield from _inside(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _inside(part)


def in_flight(loader: DataLoader[Any]) -> InFlight:
    """What a loader keeps in memory besides the cache."""
    batch_size: Any = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 1)
    context = loader.multiprocessing_context
    method = None if context is None else context.get_start_method()
    return InFlight(batch_size, loader.num_workers, loader.prefetch_factor, method)


def with_dataset(
    loader: DataLoader[Any], dataset: Dataset[Any], sampler: Sampler[Any] | None = None
) -> DataLoader[Any]:
    """A loader of the same class and arguments that reads another dataset of the same length.

    A plain DataLoader becomes a CachedLoader, which gives the same batches.

    Args:
        loader: the user's loader.
        dataset: what the new one reads.
        sampler: what it draws from, if not from the old one's.

    Raises:
        TypeError: the loader's class hides an argument that it needs.
    """
    names = _ALWAYS + (_WITH_WORKERS if loader.num_workers else ())
    arguments = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if getattr(loader, "pin_memory_device", ""):
        arguments["pin_memory_device"] = loader.pin_memory_device
    if loader.batch_sampler is not None and (
        loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler
    ):
        arguments["batch_sampler"] = loader.batch_sampler
    else:
        arguments |= {"batch_size": loader.batch_size, "sampler": sampler or loader.sampler}
        arguments["drop_last"] = loader.drop_last
    if type(loader) is DataLoader:
        return CachedLoader(dataset, **arguments)
    return _of_subclass(loader, dataset, arguments)


def _of_subclass(loader: DataLoader[Any], dataset: Dataset[Any], arguments: dict[str, Any]) -> DataLoader[Any]:
    """A subclass is made from the arguments that it takes; its own ones are read from attributes of the same name."""
    parameters = inspect.signature(type(loader).__init__).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    own: dict[str, Any] = {}
    for name, parameter in list(parameters.items())[1:]:
        if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        if name == "dataset":
            own[name] = dataset
        elif name in arguments:
            own[name] = arguments[name]
        elif name not in ("sampler", "batch_sampler", "batch_size", "shuffle", "drop_last") and hasattr(loader, name):
            own[name] = getattr(loader, name)
        elif parameter.default is inspect.Parameter.empty:
            raise TypeError(
                f"{type(loader).__name__} cannot be made anew around a cached dataset: its argument {name!r} is not "
                "kept as an attribute. Wrap your dataset with CachedDataset where you make the loader instead"
            )
    if takes_all:
        own |= {name: value for name, value in arguments.items() if name not in own}
        own.setdefault("dataset", dataset)
    return type(loader)(**own)
