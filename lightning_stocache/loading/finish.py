"""What comes after the cache, sample by sample: the tail that was cut off the source, then the user's own transform."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from lightning_stocache.loading.opened import Opened

__all__ = ["Finish"]


@dataclass(frozen=True)
class Finish:
    """The end of a sample's way.

    Args:
        opened: what has served the sample; it knows the random part of the source's transform.
        source: the user's dataset, with its whole transform.
        transform: the user's own, of a CachedDataset.
    """

    opened: Opened
    source: Dataset[Any]
    transform: Callable[[Any], Any] | None = None

    def __bool__(self) -> bool:
        return self.opened.tail is not None or self.transform is not None

    def __call__(self, sample: Any) -> Any:
        """The finished sample."""
        return self.transformed(self.opened.finished(sample, self.source))

    def transformed(self, sample: Any) -> Any:
        """A sample of the whole source with the user's own transform alone."""
        return sample if self.transform is None else self.transform(sample)

    def each(self, samples: Iterable[Any]) -> Iterable[Any]:
        """The finished samples of a batch, each when it is asked for: who puts one away needs no memory for all."""
        opened, source = self.opened, self.source
        # Generators, not `map`: a StopIteration of a transform must not end the batch.
        if opened.fetch is None and self:
            return (self(sample) for sample in samples)
        # Where the source loads whole batches, all of its draws come first, as without a cache.
        if opened.live_cache is not None or opened.tail is not None:
            samples = [opened.finished(sample, source) for sample in samples]
        return samples if self.transform is None else (self.transformed(sample) for sample in samples)
