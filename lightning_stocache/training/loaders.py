"""The user's loaders: which of them can be cached, and copies of them that read other datasets, in any nesting.

`cacheable_length` finds the reasons against a cache without reading, drawing or changing anything. Reasons that only
reading a source shows (samples that cannot be kept, an error) are found by `setup.open`.

Users give Lightning a loader, or dicts, lists and tuples of loaders, or a CombinedLoader. `rewrap` keeps nesting and
types.

`loading.loader_copy` makes the copies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.loader_copy import check_loader, copy_over, length_of
from lightning_stocache.loading.loader_tree import Cached, cached_in_leaves, wrapped_loader
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.node.budget import Budget
from lightning_stocache.setup.request import check_budget
from lightning_stocache.source.access import check_stream
from lightning_stocache.torch_internals import unwrapped_pipe

__all__ = [
    "Source",
    "TrainerLoader",
    "TransformedSet",
    "TransformedStream",
    "cacheable_length",
    "rewrap",
    "running_datasets",
    "running_loaders",
    "source_of",
    "title",
    "with_dataset",
]

if TYPE_CHECKING:
    Source: TypeAlias = Dataset[Any] | Callable[[], Dataset[Any]]
else:
    # With Dataset[Any], jsonargparse makes a bare Dataset of --data.train=my.Photos. This alias is not in the
    # module of StocacheDataModule, because jsonargparse reads the TYPE_CHECKING block of that module.
    Source = Dataset | Callable[[], Dataset]

# The batches in a list that is given as a loader.
_IN_MEMORY = (torch.Tensor, np.ndarray, str, bytes, range, set, frozenset)


class TrainerLoader(CachedLoader):
    """The CachedLoader of a Trainer. `resume` keeps its position, also if Lightning creates the loader again.

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
        self.source = source
        self.transform = transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> Any:
        return self.transform(self.source[index])


class TransformedStream(IterableDataset[Any]):
    """An iterable-style dataset with a transform per sample; see `TransformedSet`."""

    def __init__(self, source: Any, transform: Callable[[Any], Any]) -> None:
        self.source = source
        self.transform = transform

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
    inner = wrapped_loader(loaders)
    if inner is not None:
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


def title(leaf: Any) -> str:
    """The name of a loader in messages: the class of its dataset, or its own class if it is no DataLoader."""
    return type(source_of(leaf) if isinstance(leaf, DataLoader) else leaf).__name__


def cacheable_length(leaf: Any, budget: Budget, *, streams: bool) -> int | None:
    """The length of a loader's dataset; -1 for a stream, None if there is nothing to cache.

    Args:
        leaf: the object that Lightning iterates over for a stage.
        budget: the budget of the stage.
        streams: whether streams are cached.

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
    if is_stream and (not streams or budget.off):
        raise TypeError("it is iterable-style. streams=True keeps its samples in epoch one, if all of it fits")
    check_loader(leaf)
    if is_stream:
        check_stream(source_of(leaf), type(None), in_pipe=True)
        check_budget(budget)
        return -1
    return length_of(dataset)


def with_dataset(
    loader: DataLoader[Any], dataset: Dataset[Any], sampler: Sampler[Any] | None = None
) -> DataLoader[Any]:
    """A copy of a loader that reads another dataset of the same length. The copy of a DataLoader is a TrainerLoader.

    With a `sampler` the copy draws from it; the loader must have a `batch_size`.
    """
    return copy_over(loader, dataset, TrainerLoader, sampler)
