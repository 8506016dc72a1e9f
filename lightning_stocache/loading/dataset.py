"""A dataset that remembers.

`CachedDataset` stands between a loader and the user's dataset, the source. It answers an index from the index's slot if
that is ready (a hit), loads the sample from the source and stores it if not (a miss), and only loads it if the index
has no slot (a bypass). What is random comes after: first the tail that was cut off the source, then `transform`. So the
samples are those of the source, bit for bit and in the same order of random draws, cached or not.

It is a plain map-style dataset: any DataLoader, start method, Subset, random_split and ConcatDataset will do. Each
process that it reaches by fork or by pickle works on the same memory.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import GeneratorType
from typing import Any, Literal, SupportsIndex, get_args

from torch.utils.data import Dataset

from lightning_stocache.cache.cache import SharedCache
from lightning_stocache.cache.counters import Counters, Counts
from lightning_stocache.cache.placement import Ring
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.loading.allocation import BackendChoice, InFlight, Request
from lightning_stocache.loading.errand import Delivery, Errand
from lightning_stocache.loading.landing import Landing
from lightning_stocache.loading.opened import Opened
from lightning_stocache.loading.opening import open_caches
from lightning_stocache.loading.source import check_source
from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.named import check_name

__all__ = ["CachedDataset", "OnError"]

log = logging.getLogger(__name__)

OnError = Literal["raise", "disable"]


class CachedDataset(Dataset[Any]):
    """A map-style dataset whose samples are kept in memory that all processes of the node share.

    Opening reads a few samples (their shape, and whether they are random) and takes no memory for slots until they are
    filled.

    Args:
        source: the dataset to cache: its deterministic, expensive part (read, decode, resize). A torchvision
            `transform` inside it is split at its first random step by itself.
        budget: memory per node: "8GiB", "500MB", "60%" (of the dataset's cached size), "60% of free" (memory), "auto"
            (the whole dataset), a whole number of bytes, or 0 (off). What does not fit is loaded every time.
        transform: what is done to each sample after the cache, on the CPU; it gets what `source[index]` returns.
        spec: what a sample looks like, as `SampleSpec.infer(sample)` says; given, the source is not read at set-up.
        allow_random: cache a random source as it is, with its first draw frozen.
        backend: where the memory lies: "tmpfile" (/dev/shm), "memfd", "file", or "auto".
        on_error: what happens when the memory cannot be had: "raise", or "disable" (go on uncached, with a warning).
        defer: open nothing yet; samples pass through until `share` is called.
        name: under which the cache stays in memory when the job ends, so that the next one starts warm, and which jobs
            that run at the same time share. It lies in /dev/shm, whatever `backend` says. The first job decides how
            much is cached. `python -m lightning_stocache clean NAME` removes it.
        fingerprint: what else decides what the samples are (a size, a version, a path): a job with the same name and
            another fingerprint, length or sample is refused.
        strict: what cannot be cached is an error; else it passes through uncached, with one warning.

    Raises:
        TypeError: the source is iterable-style or cached already, its samples hold something of no fixed size
            (`UnsupportedSampleError`), or an argument is of the wrong type.
        ValueError: the source is empty, the budget cannot be read, or an argument is none of its choices.
        CacheMemoryError: the memory cannot be had, and `on_error="raise"`.
        FingerprintError: the cache of this name holds something else.

    Example:
        >>> import torch
        >>> squares = [torch.tensor([i, i * i]) for i in range(10)]
        >>> dataset = CachedDataset(squares, budget="50%")
        >>> [int(dataset[i][1]) for i in range(10)] == [int(dataset[i][1]) for i in range(10)]
        True
        >>> dataset.counters.totals().hits
        5
        >>> dataset.close()
    """

    def __init__(
        self,
        source: Dataset[Any],
        budget: int | float | str = "auto",
        *,
        transform: Callable[[Any], Any] | None = None,
        spec: SampleSpec | None = None,
        allow_random: bool = False,
        backend: BackendChoice = "auto",
        on_error: OnError = "raise",
        defer: bool = False,
        name: str | None = None,
        fingerprint: str = "",
        strict: bool = False,
    ) -> None:
        check_source(source, CachedDataset)
        if spec is not None and not isinstance(spec, SampleSpec):
            raise TypeError(f"spec must be a SampleSpec, as SampleSpec.infer(sample) makes it; got {spec!r}")
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of a sample, got {transform!r}")
        if not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint must be a string, got {fingerprint!r}")
        if backend not in get_args(BackendChoice):
            raise ValueError(f"backend must be one of {', '.join(get_args(BackendChoice))}, got {backend!r}")
        if on_error not in get_args(OnError):
            raise ValueError(f"on_error must be 'raise' or 'disable', got {on_error!r}")
        self.source = source
        self.budget = Budget.parse(budget)
        self.transform = transform
        self.spec = spec
        self.allow_random = allow_random
        self.backend = backend
        self.on_error = on_error
        self._name = None if name is None else check_name(name)  # not public: the source may have a `name`
        self._fingerprint = fingerprint
        self.strict = strict
        self.baseline = Counts()  # what had been counted when the current Trainer call began
        self._opened = Opened(source)
        if not defer:
            self.share(NodeGroup())

    def share(self, group: NodeGroup | None = None) -> None:
        """Swap the cache for one that all ranks of the node have in common. Collective: every rank calls it.

        What was cached before is given up, so call it before the first epoch, and make the dataset with `defer=True`
        to read nothing twice. The leader of the node reads a few samples and grants the budget; the other ranks read
        nothing.

        Args:
            group: which ranks share memory; by default it is found out from the running process group.
        """
        self.close()
        group = NodeGroup.discover() if group is None else group
        request = self.request("")
        [opened] = open_caches([request], {"": self.budget}, group, self.backend, disable=self.on_error == "disable")
        self.adopt(opened)

    def request(self, pot: str, in_flight: InFlight | None = None) -> Request:
        """What is asked of `open_caches` for this dataset.

        Args:
            pot: which budget it draws on.
            in_flight: the loader that will read it, if that is known.
        """
        return Request(
            self.source, pot, self.spec, self.allow_random, in_flight, self._name, self._fingerprint, self.strict
        )

    def adopt(self, opened: Opened) -> None:
        """Serve from a cache that was opened for this dataset's request; what was counted before is over."""
        self._opened, self.baseline = opened, Counts()
        if self.group.is_leader and self.cache is not None:
            log.info(self.describe())

    @property
    def cache(self) -> SharedCache | None:
        """The cache, or None while samples pass through."""
        return self._opened.live_cache

    @property
    def counters(self) -> Counters | None:
        """What has been served and filled, by all processes of the node; None before the first opening."""
        return self._opened.counters

    @property
    def ring(self) -> Ring | None:
        """Which node holds which indices; None before the first opening."""
        return self._opened.ring

    @property
    def group(self) -> NodeGroup:
        """The ranks that share the cache."""
        return self._opened.group

    @property
    def budget_bytes(self) -> int:
        """Memory that was granted on this node."""
        return self._opened.budget_bytes

    def close(self) -> None:
        """Give the cache up in this process; from then on samples pass through uncached.

        A copy (`copy.copy`, `copy.deepcopy`, or out of a pickle) reads and fills the same memory, which only the
        dataset that was copied closes, for all copies in its process; a copy gives up its own use of it.
        """
        self._opened.close()
        self._opened = Opened(self.source)

    def __copy__(self) -> CachedDataset:
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, _opened=replace(self._opened, borrowed=True))
        return view

    def describe(self) -> str:
        """One line on what is cached here, for people; with several nodes, on which one, and its arc of the ring."""
        cache, nodes = self.cache, self.group.nodes
        name, samples = type(self.source).__name__, len(self)
        if cache is None:
            return f"{name}: {samples:,} samples, not cached"
        where, arc = "", ""
        if len(nodes) > 1:
            where = f" on node{self.group.node} (ranks {', '.join(map(str, nodes[self.group.node]))})"
            arc = f" in an arc that starts at {cache.arc.start:,}"
        return (
            f"{name}{where}: {len(cache):,} of {samples:,} samples have a slot{arc}, {cache.filled:,} are filled, "
            f"{format_bytes(cache.memory_bytes)} in use of {format_bytes(self.budget_bytes)}"
        )

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getitem__(self, index: SupportsIndex) -> Any:
        """The sample of an index. What is no index to a cache (a list of them, a slice) goes to the source itself."""
        try:
            position = self._position(index)
        except TypeError:
            sample = self.source[index]
            self._opened.count(bypasses=1)
            return self._transformed(sample)
        return self._finish(self._opened.serve(position))

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> Any:
        """The samples of a batch, as a list: all hits are copied out by one gather per field."""
        try:
            positions = [self._position(index) for index in indices]
        except TypeError:  # a sampler's keys, which only the source understands
            return [self[index] for index in indices]
        opened = self._opened
        samples: Any
        if isinstance(indices, Errand) and indices.of_batch is not None:
            samples = opened.fill(positions)
        elif opened.live_cache is None and opened.fetch is None:
            samples = [self._finish(opened.serve(position)) for position in positions]
        else:
            samples = self._finish_many(opened.serve_many(positions))
        if isinstance(indices, Errand):
            return Delivery(self, indices, samples)
        return list(samples) if isinstance(samples, GeneratorType) and self.finishes else samples

    @property
    def finishes(self) -> bool:
        """Whether samples are transformed, one by one, after the cache."""
        return self.transform is not None or self._opened.tail is not None

    def load_into(self, batch: Landing, indices: list[int], places: list[int]) -> dict[int, Any]:
        """Serve samples that were not READY at their places of a batch, only if they are not transformed.

        Returns:
            By place, the samples that are not of the spec; their rows are undefined.
        """
        return self._opened.load_into(batch, [self._position(index) for index in indices], places)

    def count_hits(self, samples: int, gather_ns: int = 0) -> None:
        """Count samples that somebody else has copied out of the cache, and the nanoseconds that it took."""
        opened = self._opened
        if opened.cache is not None and opened.counters is not None:
            opened.counters.add_hits(samples, samples * opened.cache.spec.nbytes, gather_ns)

    def __getattr__(self, name: str) -> Any:
        # Names of the user's dataset (`classes`, `targets`) stay reachable; never dunder names: a forwarded
        # __getitems__ would be found by the loader and go past the cache.
        if name.startswith("_") or "source" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.source, name)

    def _position(self, index: SupportsIndex) -> int:
        """An index from the front. Outside the dataset it stays what it is: the source has its own error for it."""
        if index.__class__ is not int:
            if getattr(index, "ndim", 0):
                raise TypeError("a tensor of one element is an index to torch, and a batch of one to a source")
            index = operator.index(index)
        if index >= 0:
            return index
        length = len(self)
        return index + length if index >= -length else index

    def _finish(self, sample: Any) -> Any:
        return self._transformed(self._opened.finished(sample, self.source))

    def _finish_many(self, samples: Any) -> Any:
        """The samples transformed, each when it is asked for: who puts one away needs no memory for all of them."""
        # Draws come in the order of the uncached source: where it loads whole batches, all of its own come first.
        opened = self._opened
        if opened.fetch is None and self.finishes:
            return (self._finish(sample) for sample in samples)
        if opened.live_cache is not None or opened.tail is not None:
            samples = [opened.finished(sample, self.source) for sample in samples]
        return samples if self.transform is None else (self._transformed(sample) for sample in samples)

    def _transformed(self, sample: Any) -> Any:
        return sample if self.transform is None else self.transform(sample)
