"""A source and its cache, open in this process."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.utils.data import Dataset

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.placement import Ring
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.store import Store
from lightning_stocache.console import say
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.group import NodeGroup, job_ranks
from lightning_stocache.node.named import clean_command
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.source.access import Odd, batch_reader
from lightning_stocache.source.transform_split import Tail
from lightning_stocache.source.witness import Sums

__all__ = ["OpenCache"]

_COUNTED = 1 << 22  # slots of which the stored ones are counted: on a disk that reads 24 bytes each

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenCache:
    """A source, a stream or a rolling cache, and the memory in which its samples are kept.

    Args:
        request: the request that was answered.
        source: the dataset that loads samples: the request's source, or its deterministic part.
        tail: the random part, applied after the cache.
        cache: None if the source passes through uncached.
        counters: counters of all processes of the node; None on Windows, or without any memory.
        ring: the arcs of all nodes.
        group: the ranks that share the cache.
        budget_bytes: memory that was granted on this node.
        borrowed: whether this is a copy, which does not close the memory.
        state: a digest of each place of the source's state at opening; empty for a stream.
        machinery: places of that state that reads have moved at set-up.
        serves_lists: whether the source gives, for a list of indices, the stack of their samples.
        expected_ring: the arcs, with only the slots for which there will be room. With records these may be fewer.
    """

    request: CacheRequest
    source: Dataset[Any]
    tail: Callable[[Any, int], Any] | None = None
    cache: Store | None = None
    counters: Counters | None = None
    ring: Ring | None = None
    group: NodeGroup = field(default_factory=NodeGroup)
    budget_bytes: int = 0
    borrowed: bool = False
    expected_ring: Ring | None = None
    state: Sums = field(default_factory=dict)
    machinery: frozenset[str] = frozenset()
    serves_lists: bool = False

    @classmethod
    def without(cls, request: CacheRequest, group: NodeGroup | None = None) -> OpenCache:
        """A request without memory: samples come from its source, and nothing is counted."""
        return cls(request, request.source, group=NodeGroup() if group is None else group)

    @property
    def live_cache(self) -> Store | None:
        """The cache, unless this process has closed it."""
        return None if self.cache is None or self.cache.closed else self.cache

    def given_up(self) -> OpenCache:
        """This record without its cache: samples come from the request's source, and are counted."""
        return replace(
            self, source=self.request.source, tail=None, cache=None, ring=None, expected_ring=None, budget_bytes=0
        )

    def with_tail(self, sample: Any, index: int) -> Any:
        """Apply the tail to a sample of the source, or to an `Odd`."""
        if type(sample) is not Odd:
            return sample if self.tail is None else self.tail(sample, index)
        if self.tail is None:
            return sample.sample
        if sample.has_all_places:
            return self.tail(sample.sample, index)
        # The tail would not find its fields in this sample, so the whole source reads it again.
        whole: Any = self.request.source
        return whole[sample.index] if batch_reader(self.source) is None else whole.__getitems__([sample.index])[0]

    def with_tails(self, samples: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """Apply the tail to a batch that the source loads in one call."""
        if self.tail is None and Odd not in set(map(type, samples)):
            return list(samples)
        tail, loaded = self.tail, [sample.sample if type(sample) is Odd else sample for sample in samples]
        is_odd = any(type(sample) is Odd and not sample.has_all_places for sample in samples)
        is_read_anew = any(sample is None for sample in loaded)
        if not isinstance(tail, Tail) or is_read_anew or (tail.heads and is_odd):
            return list(map(self.with_tail, samples, indices))
        return tail.finish_batch(loaded, indices)

    @property
    def known_ring(self) -> Ring | None:
        """The ring with the slots for which there will be room. On one node the estimate improves with every sample."""
        cache, ring = self.live_cache, self.ring
        if cache is None or ring is None or len(ring.arcs) > 1:
            return self.expected_ring or ring
        return Ring((replace(ring.arcs[0], slots=cache.capacity),))

    def describe(self) -> str:
        """Describe the cache in one line. With several nodes, the line names the node and its arc of the ring."""
        source: Any = self.request.source
        if isinstance(self.cache, RollingStore):
            name, count = "RollingCache" if source is None else type(source).__name__, f"{self.cache.capacity:,}"
            return f"{name}: a pool of at most {count} samples, in at most {format_bytes(self.budget_bytes)}"
        if self.request.as_stream:
            return f"{self.request.title}: a stream, stored as it passes, in at most {format_bytes(self.budget_bytes)}"
        name, samples, cache, group = type(source).__name__, f"{len(source):,}", self.live_cache, self.group
        if self.request.reader is not None and self.request.reader.stage:
            name += f" ({self.request.reader.stage})"
        if cache is None:
            return f"{name}: {samples} samples, not cached"
        if self.request.domain is not None:
            samples = f"the {self.request.samples:,} that are drawn of {samples}"
        where, arc = "", ""
        if len(group.nodes) > 1:
            where = f" on node{group.node} (ranks {', '.join(map(str, group.nodes[group.node]))})"
            arc = "" if self.ring is None else f" in an arc that starts at {self.ring.arcs[group.node].start:,}"
        about = "about " if not cache.codec.is_fixed and cache.capacity < self.request.samples else ""
        room = "all" if cache.capacity == self.request.samples else f"{about}{cache.capacity:,} of"
        size = format_bytes(self.budget_bytes)
        if self.request.dir is not None:
            size += " on the disk" + (", until the job ends (name= keeps it)" if self.request.name is None else "")
        ready = ""
        if self.request.name is not None and len(cache) <= _COUNTED:
            earlier = cache.filled - (0 if self.counters is None else self.counters.totals().setup_fills)
            ready = f", {earlier:,} stored already" if earlier > 0 else ""
        after = f"; after the cache: {self.tail}" if isinstance(self.tail, Tail) else ""
        return f"{name}{where}: room for {room} {samples} samples{arc}, {size}{ready}{after}"

    def tell(self) -> None:
        """Describe the cache once per node, in a line for people.

        In a job of several ranks, a cache of one rank is not described, because `share` replaces it.
        """
        if self.group.is_leader and self.cache is not None and self.group.world >= job_ranks()[0]:
            say(f"caching {self.describe()}")

    def close(self) -> None:
        """Close cache and counters in this process; a cache with a name stays for the next job."""
        if self.borrowed:
            return
        cache, name = self.live_cache, self.request.name
        if cache is not None and name is not None and self.group.is_leader:
            log.info(
                "the cache is kept as %s, %d of %d slots filled. To remove it: %s",
                name,
                cache.filled,
                len(cache),
                clean_command(name, self.request.dir),
            )
        for part in (self.cache, self.counters):
            if part is not None:
                part.close()

    def __getstate__(self) -> dict[str, Any]:
        # Closed memory cannot be sent to another process: samples pass through there, too. A copy may share the memory
        # of this process, so it does not close it.
        counters = None if self.counters is None or self.counters.closed else self.counters
        memory = _Memory(self.live_cache, counters)
        return self.__dict__ | {"cache": memory, "counters": None, "borrowed": True, "state": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        memory = state["cache"]
        self.__dict__.update(state | {"cache": memory.cache, "counters": memory.counters})
        if memory.is_lost:
            self.__dict__.update(self.given_up().__dict__)


class _Memory:
    """The memory of a cache in a pickle, which another process may load, or one that begins when it has gone."""

    def __init__(self, cache: Store | None, counters: Counters | None, *, is_lost: bool = False) -> None:
        self.cache, self.counters, self.is_lost = cache, counters, is_lost

    def __reduce__(self) -> tuple[Any, ...]:
        return _reached, (bytes(ForkingPickler.dumps((self.cache, self.counters))),)


def _reached(content: bytes) -> _Memory:
    try:
        return _Memory(*pickle.loads(content))
    except (OSError, ValueError) as error:
        log.warning(
            "a dataset that was pickled has lost its cache, and loads all samples from its source (cache that again: "
            "CachedDataset(dataset.source)): %s",
            error,
        )
        return _Memory(None, None, is_lost=True)
