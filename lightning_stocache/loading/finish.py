"""What comes after the cache, sample by sample: the tail that was cut off the source, then the user's own transform."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Finish"]


@dataclass(frozen=True)
class Finish:
    """The end of a sample's way.

    Args:
        tail: the random part of the source's transform.
        transform: the user's own, of a CachedDataset.
    """

    tail: Callable[[Any], Any] | None = None
    transform: Callable[[Any], Any] | None = None

    def __bool__(self) -> bool:
        return self.tail is not None or self.transform is not None

    def __call__(self, sample: Any) -> Any:
        """The finished sample."""
        if self.tail is not None:
            sample = self.tail(sample)
        return sample if self.transform is None else self.transform(sample)

    def each(self, samples: Iterable[Any], *, loads_batches: bool) -> Iterable[Any]:
        """The finished samples, each when it is asked for: who puts one away needs no memory for all of them.

        Args:
            samples: those of a batch.
            loads_batches: whether the source loads whole batches: then all of its draws come first, as without a cache.
        """
        if not self:
            return samples
        # Generators, not `map`: a StopIteration of a transform must not end the batch.
        if not loads_batches:
            return (self(sample) for sample in samples)
        done = samples if self.tail is None else [self.tail(sample) for sample in samples]
        return done if self.transform is None else (self.transform(sample) for sample in done)
