"""A dataset that remembers.

`CachedDataset` stands between a loader and the user's dataset, the source. It answers an index from the index's slot if
that is ready (a hit), loads the sample from the source and stores it if not (a miss), and only loads it if the index
has no slot (a bypass). What is random comes after: first the tail that was cut off the source, then `transform`. So the
samples are those of the source, bit for bit and in the same order of random draws, cached or not.

The source stays its user's: as soon as it is seen to have changed (by every read, and when an epoch begins), it is
served as it is now, uncached. Each process that the dataset reaches works on the same memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import GeneratorType
from typing import Any, Literal, SupportsIndex, cast, get_args

from torch.utils.data import Dataset

from lightning_stocache.cache.codec import BatchRows
from lightning_stocache.cache.compat import SharedCache
from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.placement import Ring
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.loading.allocation import BackendChoice, InFlight, Request
from lightning_stocache.loading.description import description, tell
from lightning_stocache.loading.errand import Delivery, Errand
from lightning_stocache.loading.finish import Finish
from lightning_stocache.loading.forwarding import Forwarding
from lightning_stocache.loading.opened import Opened
from lightning_stocache.loading.opening import open_caches
from lightning_stocache.loading.source import check_source, position_of
from lightning_stocache.loading.source_state import SourceState
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.group import NodeGroup

__all__ = ["CachedDataset", "OnError"]

OnError = Literal["raise", "disable"]


class CachedDataset(Forwarding):
    """A map-style dataset whose samples are kept in memory that all processes of the node share.

    Opening reads a few samples, in another process, and takes no memory for slots until they are filled.

    Its names are `source`, `cache`, `counters`, `ring`, `group`, `budget_bytes`, `share`, `close`, `describe`, and for
    the package `opened`, `finish`, `changed`, `refresh`, `view`, `request`, `adopt` and `load_into`. `transform` is the
    one that was given; where none was, and the source has one, the source's. All other names, private ones too, are the
    source's, to read, write and delete. A source that changes is served as it is then, uncached, with a warning.

    Args:
        source: the dataset to cache: its deterministic, expensive part (read, decode, resize). A `transform` inside it
            is split at its first random step by itself.
        budget: memory per node: "8GiB", "500MB", "60%" (of the dataset's cached size), "60% of free" (memory), "auto"
            (the whole dataset), bytes, or 0 (off). What does not fit is loaded every time.
        transform: what is done to each sample after the cache, on the CPU.
        spec: what a sample looks like, as `SampleSpec.infer(sample)` says; given, the source is not read at set-up.
        allow_random: cache a random source as it is, with its first draw frozen.
        backend: where the memory lies: "tmpfile" (/dev/shm), "memfd", "file", or "auto".
        on_error: what happens when the memory cannot be had: "raise", or "disable" (go on uncached, with a warning).
        defer: open nothing yet; samples pass through until `share` is called.
        name: under which the cache stays in memory when the job ends, so that the next one starts warm, and which jobs
            that run at the same time share. It lies in /dev/shm; the first job decides how much is cached, and
            `python -m lightning_stocache clean NAME` removes it.
        fingerprint: what else decides what the samples are (a size, a version): another one is refused under a name.
        strict: what cannot be cached is an error; else it passes through uncached, with one warning.

    Raises:
        TypeError: the source is iterable-style or cached already, or an argument is of the wrong type; (`strict`) its
            samples hold something of no fixed size (`UnsupportedSampleError`).
        ValueError: the budget cannot be read, or an argument is none of its choices; (`strict`) the source is empty.
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
        check_source(source, Forwarding, strict=strict)
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of a sample, got {transform!r}")
        if backend not in get_args(BackendChoice):
            raise ValueError(f"backend must be one of {', '.join(get_args(BackendChoice))}, got {backend!r}")
        if on_error not in get_args(OnError):
            raise ValueError(f"on_error must be 'raise' or 'disable', got {on_error!r}")
        super().__init__(source)
        self.__source = source
        self.__budget = Budget.parse(budget)
        self.__transforms = transform is not None
        self.__opened = Opened(source)
        self.__finish = Finish(self.__opened, source, transform)
        self.__backend: BackendChoice = backend
        self.__disable = on_error == "disable"
        self.__request = Request(source, "", spec, allow_random, None, name, fingerprint, strict)
        self.__state = SourceState(source)
        if not defer:
            self.share(NodeGroup())

    def share(self, group: NodeGroup | None = None) -> None:
        """Swap the cache for one that all ranks of the node have in common. Collective: every rank calls it.

        What was cached before is given up, so call it before the first epoch, and make the dataset with `defer=True`
        to read nothing twice. The leader of the node looks and grants the budget; the other ranks read nothing.

        Args:
            group: which ranks share memory; by default it is found out from the running process group.
        """
        self.close()
        group = NodeGroup.discover() if group is None else group
        [opened] = open_caches([self.request("")], {"": self.__budget}, group, self.__backend, disable=self.__disable)
        self.adopt(opened)

    def request(self, pot: str, in_flight: InFlight | None = None) -> Request:
        """What is asked of `open_caches` for this dataset: from which pot, and what loader will read it."""
        return replace(self.__request, pot=pot, in_flight=in_flight)

    def adopt(self, opened: Opened) -> None:
        """Serve from a cache that was opened for this dataset's request; what was counted before is over."""
        self.__serve(opened)
        self.__state = SourceState(self.source, getattr(opened.tail, "steps", ()))
        if self.group.is_leader and self.cache is not None:
            tell(self.describe())

    @property
    def source(self) -> Dataset[Any]:
        """The user's dataset."""
        return self.__source

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """What is done to each sample after the cache; where none was given, the source's own."""
        return cast(Any, self.source).transform if self.__lends_transform else self.__finish.transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | None) -> None:
        if self.__lends_transform:
            cast(Any, self.source).transform = transform
        else:
            self.__finish = replace(self.__finish, transform=transform)

    @property
    def opened(self) -> Opened:
        """What serves samples in this process, as long as the source is what it was."""
        return self.__opened

    @property
    def finish(self) -> Finish:
        """What is done to each sample after the cache."""
        return self.__finish

    @property
    def cache(self) -> SharedCache | None:
        """The cache, or None while samples pass through."""
        return self.__opened.live_cache

    @property
    def counters(self) -> Counters | None:
        """What has been served and filled, by all processes of the node; None before the first opening."""
        return self.__opened.counters

    @property
    def ring(self) -> Ring | None:
        """Which node holds which indices; None before the first opening."""
        return self.__opened.ring

    @property
    def group(self) -> NodeGroup:
        """The ranks that share the cache."""
        return self.__opened.group

    @property
    def budget_bytes(self) -> int:
        """Memory that was granted on this node."""
        return self.__opened.budget_bytes

    def close(self) -> None:
        """Give the cache up in this process; from then on samples pass through uncached.

        A copy (`copy.copy`, `copy.deepcopy`, or out of a pickle) reads and fills the same memory, which only the
        dataset that was copied closes, for all copies in its process; a copy gives up its own use of it.
        """
        self.__opened.close()
        self.__serve(Opened(self.source))

    def describe(self) -> str:
        """One line on what is cached here, for people; with several nodes, on which one, and its arc of the ring."""
        return description(self.source, self.__opened)

    def view(self, transform: Callable[[Any], Any] | None) -> CachedDataset:
        """The same source, cache and counts with another transform."""
        view = CachedDataset.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view.__finish, view.__transforms = replace(self.__finish, transform=transform), transform is not None
        view.__serve(replace(self.__opened, borrowed=True))
        return view

    @property
    def changed(self) -> bool:
        """Whether the source has changed since it was cached."""
        counters = self.counters if self.group.rank == 0 else None
        return self.__state.look(None if counters is None else lambda: counters.is_first("changed source")) is not None

    def refresh(self) -> Opened:
        """What serves samples: once the source has been seen to change, the source itself, uncached."""
        opened = self.__opened
        if (opened.cache is not None or opened.source is not self.source) and self.changed:
            self.__serve(opened.passing(self.source))
        return self.__opened

    def __len__(self) -> int:
        return len(self.__source)  # type: ignore[arg-type]

    def __getitem__(self, index: SupportsIndex) -> Any:
        """The sample of an index. What is no index to a cache (a list of them, a slice) goes to the source itself."""
        opened = self.refresh()
        try:
            try:
                position = position_of(index, self.source)
            except TypeError:
                sample = self.__source[index]
                opened.count(bypasses=1)
                return self.__finish.transformed(sample)
            return self.__finish(opened.serve(position))
        finally:
            self.__state.end_read()

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> Any:
        """The samples of a batch, as a list: all hits are copied out by one gather per field."""
        try:
            positions = [position_of(index, self.source) for index in indices]
        except TypeError:  # a sampler's keys, which only the source understands
            return [self[index] for index in indices]
        opened = self.refresh()
        samples: Any
        try:
            if isinstance(indices, Errand) and indices.missing is not None:
                samples = ()
            elif opened.live_cache is None and opened.fetch is None:
                samples = [self.__finish(opened.serve(position)) for position in positions]
            else:
                samples = self.__finish.each(opened.serve_many(positions))
        finally:
            self.__state.end_read()
        if isinstance(indices, Errand):
            return Delivery(self, indices, samples)
        return list(samples) if isinstance(samples, GeneratorType) and self.__finish else samples

    def load_into(self, batch: BatchRows, indices: list[int], places: list[int]) -> dict[int, Any]:
        """Serve samples that were not READY at their places of a batch, untransformed; by place, those not of the spec.

        The rows of these are undefined.
        """
        try:
            return self.__opened.load_into(batch, [position_of(index, self.source) for index in indices], places)
        finally:
            self.__state.end_read()

    def __copy__(self) -> CachedDataset:
        opened, source, other = self.refresh(), copy.copy(self.source), self.view(self.__finish.transform)
        super(CachedDataset, other).__init__(source)
        other.__source, other.__transforms = source, self.__transforms
        other.__request = replace(self.__request, source=source)
        whole = source if opened.source is self.source else opened.source
        other.__serve(replace(opened, source=whole, borrowed=True))
        other.__state = SourceState(source, getattr(opened.tail, "steps", ()))
        return other

    def __serve(self, opened: Opened) -> None:
        self.__opened = opened
        self.__finish = Finish(opened, self.source, self.__finish.transform)

    @property
    def __lends_transform(self) -> bool:
        """Whether `transform` is the source's."""
        return not self.__transforms and hasattr(self.source, "transform")
