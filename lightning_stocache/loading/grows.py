"""What a loader asks of a dataset that grows. The room `growing` has those that there are; this one knows none.

The names of the questions are dunder names of classes, which no dataset of a user's has.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

from lightning_stocache.cache.counters import Counters
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.sampling.residents import StreamBatches

__all__ = ["Stream", "is_rolling", "is_stream"]


class Stream(Protocol):
    """An iterable-style dataset that is kept as it passes: `CachedStream`."""

    def __kept__(self, batch_size: int, drop_last: bool) -> tuple[CachedDataset, StreamBatches] | None:
        """Begin the next epoch: the samples in memory and this rank's batches, or None where the stream is read."""

    @property
    def source(self) -> Any:
        """The user's stream."""

    @property
    def cache(self) -> Any:
        """What is kept; None while samples pass through."""

    @property
    def counters(self) -> Counters | None:
        """What has been served and kept."""

    @property
    def group(self) -> NodeGroup:
        """The ranks that share the memory."""

    @property
    def budget_bytes(self) -> int:
        """Memory that was granted on this node."""

    def share(self, group: NodeGroup | None = None) -> None:
        """Have the ranks of a node share the memory. Collective."""


def is_rolling(dataset: Any) -> bool:
    """Whether a dataset has samplers of its own, as a RollingCache has: `__loader_sampler__(shuffle=)` gives one."""
    return hasattr(type(dataset), "__loader_sampler__")


def is_stream(dataset: Any) -> TypeGuard[Stream]:
    """Whether a dataset is a stream that is kept."""
    return hasattr(type(dataset), "__kept__")
