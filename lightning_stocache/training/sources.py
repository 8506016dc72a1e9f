"""What a user may give as the data of a stage: a map-style dataset, a function that makes one, or a list of either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils.data import Dataset, IterableDataset

__all__ = ["Source", "Stream", "made"]

if TYPE_CHECKING:
    Source: TypeAlias = Dataset[Any] | Callable[[], Dataset[Any]]
else:
    # Of a class with a parameter, jsonargparse makes the class itself: LightningCLI's --data.train=my.Photos would be a
    # bare Dataset.
    Source = Dataset | Callable[[], Dataset]


class Stream(IterableDataset[Any]):
    """An iterable-style dataset with a transform per sample."""

    def __init__(self, source: IterableDataset[Any], transform: Callable[[Any], Any]) -> None:
        self.source, self.transform = source, transform

    def __iter__(self) -> Iterator[Any]:
        return map(self.transform, self.source)


def made(sources: Source | Sequence[Source], *, several: bool) -> list[Dataset[Any]]:
    """The datasets themselves; functions are called.

    Args:
        sources: what was given. A list of samples is a dataset, not a list of datasets.
        several: whether a list of datasets is allowed here.

    Example:
        >>> samples = [(0.5, 1), (0.25, 0)]
        >>> (
        ...     made(samples, several=True) == [samples],
        ...     made([lambda: samples, lambda: samples], several=True) == [samples] * 2,
        ... )
        (True, True)
    """
    if not (isinstance(sources, list | tuple) and sources and all(map(_is_source, sources))):
        return [_make(sources)]
    if not several:
        raise TypeError(f"train must be one dataset, got {len(sources)}: join them with torch's ConcatDataset")
    return list(map(_make, sources))


def _is_source(one: Any) -> bool:
    return isinstance(one, Dataset) or callable(one)


def _make(source: Any) -> Dataset[Any]:
    made: Dataset[Any] = source() if callable(source) and not hasattr(source, "__getitem__") else source
    return made
