"""The user's loaders: which of them can be cached, and copies of them that read other datasets, in any nesting.

`cacheable_length` finds the reasons against a cache without reading, drawing or changing anything. Reasons that only
reading a source shows (samples that cannot be kept, an error) are found by `setup.open`.

Users give Lightning a loader, or dicts, lists and tuples of loaders, or a CombinedLoader. `rewrap` keeps nesting and
types.

A copy is made attribute by attribute, without a constructor: a constructor may draw random numbers (MONAI), remove
arguments (torch_geometric's `collate_fn`) or keep none of them. Sampler, generator and the user's own attributes are
the same objects. Lightning itself re-creates loaders to insert a sampler, from the arguments that it recorded in a
loader hook. So these arguments of the copy contain the new dataset, too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from threading import Thread
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.loader_sampler import batches_of
from lightning_stocache.loading.loader_tree import Cached, cached_in_leaves, wrapped_loader
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.loading.worker_pool import InitOnSource
from lightning_stocache.node.errors import description
from lightning_stocache.setup.request import LoaderSettings, check_budget
from lightning_stocache.source.access import check_stream
from lightning_stocache.torch_internals import is_loader_iterator, unwrapped_pipe
from lightning_stocache.training.lightning_internals import ARG_NAMES, ARGS, DATASET, KWARGS
from lightning_stocache.training.options import CacheOptions

__all__ = [
    "TrainerLoader",
    "TransformedSet",
    "TransformedStream",
    "cacheable_length",
    "rewrap",
    "running_datasets",
    "running_loaders",
    "settings_of",
    "source_of",
    "title",
    "with_dataset",
]

# The batches in a list that is given as a loader.
_IN_MEMORY = (torch.Tensor, np.ndarray, str, bytes, range, set, frozenset)


class TrainerLoader(CachedLoader):
    """A CachedLoader of a door. `resume` keeps its position; a loader that Lightning re-creates gets the same position.

    It has no `state_dict` for Lightning, which would store it in the checkpoint, and refuse to load it into another
    number of loaders.
    """

    state_dict = None  # type: ignore[assignment]  # None: not supported, as with `__hash__ = None`
    load_state_dict = None  # type: ignore[assignment]

    def __init__(self, dataset: Dataset[Any], *, position: LoaderState | None = None, **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        self.position = LoaderState() if position is None else position


class TransformedSet(Dataset[Any]):
    """A map-style dataset with a transform per sample. The cache holds samples of `source`, before `transform`."""

    def __init__(self, source: Any, transform: Callable[[Any], Any]) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> Any:
        return self.transform(self.source[index])


class TransformedStream(IterableDataset[Any]):
    """An iterable-style dataset with a transform per sample; see `TransformedSet`."""

    def __init__(self, source: Any, transform: Callable[[Any], Any]) -> None:
        self.source, self.transform = source, transform

    def __iter__(self) -> Iterator[Any]:
        return map(self.transform, self.source)


def source_of(loader: DataLoader[Any]) -> Any:
    """The dataset of a loader, without the transform of a `TransformedSet` or `TransformedStream`."""
    dataset = loader.dataset
    return dataset.source if isinstance(dataset, TransformedSet | TransformedStream) else unwrapped_pipe(dataset)


def rewrap(loaders: Any, wrap: Callable[[DataLoader[Any]], DataLoader[Any]]) -> Any:
    """The same nesting of loaders, with every DataLoader replaced by `wrap(loader)`."""
    if isinstance(loaders, DataLoader):
        return wrap(loaders)
    if (inner := wrapped_loader(loaders)) is not None:
        renewed = copy.copy(loaders)
        renewed.loader = wrap(inner)
        return renewed
    if hasattr(loaders, "iterables"):
        renewed = copy.copy(loaders)
        renewed.flattened = [rewrap(inner, wrap) for inner in loaders.flattened]
        return renewed
    if isinstance(loaders, MutableMapping):
        renewed = copy.copy(loaders)  # an OrderedDict stays one
        renewed.update({name: rewrap(inner, wrap) for name, inner in loaders.items()})
        return renewed
    if isinstance(loaders, list | tuple):
        inside = [rewrap(inner, wrap) for inner in loaders]
        return type(loaders)(*inside) if hasattr(loaders, "_fields") else type(loaders)(inside)
    return loaders


def running_loaders(trainer: Any, stage: str) -> Any:
    """The loaders of a running stage, nested as the user gave them to the Trainer."""
    return getattr(trainer, "train_dataloader" if stage == "train" else f"{stage}_dataloaders")


def running_datasets(trainer: Any, stage: str) -> list[Cached]:
    """The cached datasets and streams of a running stage's loaders."""
    return cached_in_leaves(running_loaders(trainer, stage))


def settings_of(loader: DataLoader[Any], stage: str = "") -> LoaderSettings:
    """The settings of a loader that determine its memory besides the cache."""
    draws_lists = loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler)
    batch_size: Any = loader.batch_size or getattr(batches_of(loader), "batch_size", 1)
    context: Any = loader.multiprocessing_context
    init: Any = loader.worker_init_fn
    method = None if context is None else context.get_start_method()
    workers = loader.num_workers, loader.prefetch_factor
    return LoaderSettings(batch_size, *workers, method, init, stage, draws_lists=draws_lists)


def title(leaf: Any) -> str:
    """The name of a loader in messages: the class of its dataset, or its own class if it is no DataLoader."""
    return type(source_of(leaf) if isinstance(leaf, DataLoader) else leaf).__name__


def cacheable_length(leaf: Any, stage: str, options: CacheOptions) -> int | None:
    """The length of a loader's dataset; -1 for a stream, None if there is nothing to cache.

    `leaf` is the object that Lightning iterates over for a stage.

    Raises:
        TypeError: the loader cannot be cached; the message has the reason and the remedy.
        ValueError: the dataset is empty, or the budget is a share of an unknown size.
    """
    if cached_in_leaves(leaf):
        return None
    dataset = getattr(leaf, "dataset", None)
    is_stream = isinstance(dataset, IterableDataset)
    if not isinstance(leaf, DataLoader):
        if isinstance(leaf, _IN_MEMORY) or not (isinstance(leaf, Iterable) or hasattr(leaf, "__getitem__")):
            return None
        advice = "Use a DataLoader"
        if hasattr(dataset, "__getitem__") and not is_stream:
            advice = f"Wrap its {type(dataset).__name__} with CachedDataset where you make it"
        raise TypeError(f"it is no torch.utils.data.DataLoader. {advice}")
    kind = type(leaf).__name__
    cached = "CachedStream" if is_stream else "CachedDataset"
    process = getattr(leaf.multiprocessing_context, "Process", None)
    if is_stream and (not options.streams or options.is_off(stage)):
        raise TypeError("it is iterable-style. streams=True keeps its samples in epoch one, if all of it fits")
    if isinstance(process, type) and issubclass(process, Thread):  # MONAI's ThreadDataLoader
        raise TypeError(f"the workers of {kind} are threads, and a cache is shared by processes")
    if any(is_loader_iterator(value) for name, value in vars(leaf).items() if name != "_iterator"):
        raise TypeError(f"{kind} reads it already. Wrap it with {cached} where you make the loader")
    if is_stream:
        check_stream(source_of(leaf), type(None), in_pipe=True)
        check_budget(options.budgets[options.pot(stage)])
        return -1
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except Exception as error:  # the user's code raised it; a training without a cache may never ask
        raise TypeError(
            f"it has no length: {description(error)}. Give it a __len__, if its sampler draws indices"
        ) from error
    if length == 0:
        raise ValueError("it is empty: check the path or filter it is made from")
    return length


def with_dataset(
    loader: DataLoader[Any], dataset: Dataset[Any], sampler: Sampler[Any] | None = None
) -> DataLoader[Any]:
    """A copy of a loader that reads another dataset of the same length. The copy of a DataLoader is a CachedLoader.

    With a `sampler` the copy draws from it; the loader must have a `batch_size`.
    """
    renewed: DataLoader[Any] = object.__new__(TrainerLoader if type(loader) is DataLoader else type(loader))
    state = dict(vars(loader)) | {"dataset": dataset, "_iterator": None}
    for name, value in state.items():
        if inspect.ismethod(value) and value.__self__ is loader:  # `collate_fn=self.collate`
            state[name] = MethodType(value.__func__, renewed)
    if ARGS in state:
        state |= _replaced_arguments(loader, dataset)
    if isinstance(renewed, TrainerLoader):
        state["position"] = LoaderState()
        if ARGS in state:
            state[KWARGS] |= {"position": state["position"]}
    else:
        state["worker_init_fn"] = InitOnSource.of(loader.worker_init_fn)
    if sampler is not None:
        state |= {"sampler": sampler, "batch_sampler": BatchSampler(sampler, state["batch_size"], loader.drop_last)}
    # Without __setattr__: DataLoader's refuses to change a dataset, and Lightning's records the change.
    vars(renewed).update(state)
    return renewed


def _replaced_arguments(loader: DataLoader[Any], dataset: Dataset[Any]) -> dict[str, Any]:
    """The arguments from which Lightning would re-create the copy."""
    state = vars(loader)
    args = tuple(dataset if value is loader.dataset else value for value in state[ARGS])
    kwargs = {name: dataset if value is loader.dataset else value for name, value in state[KWARGS].items()}
    names = state[ARG_NAMES]
    if type(loader) is DataLoader:  # CachedLoader takes most of them by keyword only
        args, kwargs, names = (), dict(zip(names, args, strict=True)) | kwargs, ()
    return {ARGS: args, KWARGS: kwargs, ARG_NAMES: names, DATASET: dataset}
