"""`CachedDataset`: serves the user's dataset from a cache, and leaves the user's dataset its names.

`CachedDataset` stands between a loader and the user's dataset, the source. Its samples are those of the source, bit for
bit and in the same order of random draws, cached or not; `CachedSource` serves them.

A name is read, written and deleted in the source, unless the class of the wrapper has it (`Forwarding`). The wrapper's
own attributes begin with two underscores. Dunder names are never forwarded: a loader would find a `__getitems__` of the
source, which reads past the cache. Under a Trainer there is a `StandIn` in the place of the user's dataset, which
has no name of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import GeneratorType
from typing import Any, Self, cast

from torch.utils.data import Dataset, MapDataPipe

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.placement import Domain, Ring
from lightning_stocache.cache.store import Store
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.open import open_caches
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.options import known_options
from lightning_stocache.setup.request import BackendChoice, CacheRequest, Form, Layout, check_choice, check_flag
from lightning_stocache.source.access import check_source

__all__ = ["Cached", "CachedDataset", "Forwarding", "StandIn", "cached_in", "cached_source", "dataset_over"]


class Forwarding(Dataset[Any]):
    """The base of wrappers around a source, to which they forward names."""

    def __init__(self, source: Dataset[Any]) -> None:
        self.__source = source

    def __getattr__(self, name: str) -> Any:
        # Pickle and copy ask for names before there is a source.
        if self.__keeps(name) or "_Forwarding__source" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__keeps(name):
            super().__setattr__(name, value)
        else:
            setattr(self.__source, name, value)

    def __delattr__(self, name: str) -> None:
        if self.__keeps(name):
            super().__delattr__(name)
        else:
            delattr(self.__source, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.__source)})

    def __keeps(self, name: str) -> bool:
        """Whether a name is the wrapper's own: one of its class, or with two underscores."""
        return hasattr(type(self), name) or (name.startswith("_") and "__" in name)


class Cached(Forwarding):
    """The base of a dataset and a stream with a cache, which are served by their `__serving__`."""

    __serving__: Any

    @property
    def __opened(self) -> OpenCache:
        opened: OpenCache = self.__serving__.opened
        return opened

    @property
    def source(self) -> Any:
        """The user's dataset or stream."""
        return self.__opened.request.source

    @property
    def cache(self) -> Store | None:
        """The cache, or None while samples pass through."""
        return self.__opened.live_cache

    @property
    def counters(self) -> Counters | None:
        """Counts of served and stored samples, of all processes of the node; None before the first opening."""
        return self.__opened.counters

    @property
    def group(self) -> NodeGroup:
        """The ranks that share the cache."""
        return self.__opened.group

    @property
    def budget_bytes(self) -> int:
        """Memory that was granted on this node."""
        return self.__opened.budget_bytes

    def share(self, group: NodeGroup | None = None) -> None:
        """Have the ranks of a node share the cache. Collective."""
        raise NotImplementedError


class CachedDataset(Cached):
    """A map-style dataset whose samples are stored in memory that all processes of the node share.

    Opening reads a few samples, in another process, and takes no memory for slots until they are filled.

    Its names are `source`, `cache`, `counters`, `ring`, `group`, `budget_bytes`, `share`, `close`, `describe` and
    `from_options`.
    `transform` is the argument, or the source's `transform` if none was given. All other names, private ones too, are
    the source's, to read, write and delete. Names of the source that are hidden by these are reached through `source`.
    If the source changes, its samples are served uncached, as changed, with a warning. If it changes before its first
    sample is served (a framework sets a transform), it gets a new cache; not under a `name`, nor with several ranks.

    Args:
        source: the dataset to cache: its deterministic, expensive part (read, decode, resize). A transform inside it is
            split automatically at its first random step.
        budget: memory per node: "8GiB", "500MB", "60%" (of the dataset's cached size), "60% of free" (memory), "auto"
            (the whole dataset), bytes, or 0 (off). What does not fit is loaded every time.
        transform: applied to each sample after the cache, on the CPU.
        spec: an example of a sample. With it, set-up reads no sample, or a few if the cache has a name.
        freeze_random: cache a random source as it is, with its first draw frozen.
        backend: where the memory lies: "tmpfile" (/dev/shm), "memfd", "file", or "auto".
        defer: open nothing yet; samples pass through until `share` is called.
        name: the name under which the cache stays in memory when the job ends: the next job starts warm, and jobs that
            run at the same time share it. It lies in /dev/shm; the first job decides how much is cached, and
            `stocache clean NAME` removes it.
        fingerprint: your version of the data. It must be equal in all jobs of this name. Samples are compared, too,
            except with `freeze_random`, where only the fingerprint tells one dataset from another.
        strict: raise an error if samples cannot be cached or there is no memory; else samples pass through uncached,
            with one warning.
        layout: "rows" (samples of one shape, only numbers: a batch is one copy per field), "records" (anything that can
            be pickled: text, boxes, graphs, images of any size), or "auto": rows if the samples read at set-up allow
            it.
        store: "decoded" (samples as the source gives them, up to its first random step), "encoded" (files as they are,
            decoded after the cache: more samples per GiB), or "auto": the form that saves most time in the granted
            memory. "encoded" knows the files of `ImageFolder` and its relatives, of Hugging Face's images and audio, of
            timm's readers, and of any source with methods `read(index)` and `decode(content, index)`. With a name,
            "auto" is "decoded".
        prefill: whether idle workers of a CachedLoader load samples that no batch has asked for yet.
        dir: a directory on a disk of this machine, where the cache lies instead of in memory; `budget` then limits its
            bytes there. With a `name` it outlives the job and a reboot: each sample has a checksum, and a sample that a
            crash or a bad disk has damaged is loaded again. Needs xxhash: `pip install lightning-stocache[disk]`.
        indices: the indices that are drawn, if a sampler leaves some out (one fold, weights of zero). Only they get
            slots, and "60%" is of them. Other samples are served uncached.

    Raises:
        TypeError: the source is iterable-style or cached already, or an argument is of the wrong type; (`strict`) its
            samples hold something that cannot be kept as bytes (`UnsupportedSampleError`).
        ValueError: the budget cannot be read, an argument is none of its choices, or `indices` is empty or has an index
            outside of the source; (`strict`) the source is empty, or random and cannot be split.
        CacheMemoryError: (`strict`) the memory cannot be had.
        FingerprintError: (`strict`) the cache of this name holds something else.
        ManifestError: (`strict`) the cache of this name is damaged, or of another version.
        PermissionError: (`strict`) the name belongs to another user's file.

    Example:
        >>> import torch
        >>> squares = [torch.tensor([i, i * i]) for i in range(10)]
        >>> dataset = CachedDataset(squares, budget="50%")
        >>> [int(dataset[i][1]) for i in range(10)] == [int(dataset[i][1]) for i in range(10)]
        True
        >>> dataset.counters.totals().hits >= 5  # half of the second pass; of the first, what set-up has stored
        True
        >>> dataset.close()
    """

    __serving__: CachedSource

    def __init__(
        self,
        source: Dataset[Any],
        budget: int | float | str = "auto",
        *,
        transform: Callable[[Any], Any] | None = None,
        spec: Any = None,
        freeze_random: bool = False,
        backend: BackendChoice = "auto",
        defer: bool = False,
        name: str | None = None,
        fingerprint: str = "",
        strict: bool = False,
        layout: Layout = "auto",
        store: Form = "decoded",
        prefill: bool = False,
        dir: str | None = None,
        indices: Sequence[int] | None = None,
    ) -> None:
        check_source(source, Forwarding, strict=strict)
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of a sample, got {transform!r}")
        check_choice("backend", backend, BackendChoice)
        check_flag("defer", defer)
        super().__init__(source)
        request = CacheRequest(
            source,
            "",
            Budget.parse(budget),
            spec,
            freeze_random,
            name=name,
            fingerprint=fingerprint,
            strict=strict,
            layout=layout,
            store=store,
            prefill=prefill,
            dir=dir,
            domain=None if indices is None else _domain(indices, source),
        )
        self.__serving__ = CachedSource(OpenCache.without(request), transform)
        self.__lends_transform = transform is None
        self.__backend: BackendChoice = backend
        if not defer:
            self.share(NodeGroup())

    @classmethod
    def from_options(cls, source: Dataset[Any], cache: Mapping[str, Any] | None = None, **arguments: Any) -> Self:
        """Create one from the `cache` node of a Hydra config. A key that is no option is a ValueError."""
        options = known_options(cache)
        options.pop("keep_cache", None)  # a Trainer's, as the next
        options.pop("streams", None)
        return cls(source, **options, **arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        cached: CachedSource | None = vars(self).get("__serving__")
        if cached is not None and "__" not in name:  # names of this class have two underscores
            cached.changes.refresh_unread()

    def share(self, group: NodeGroup | None = None) -> None:
        """Replace the cache by one that all ranks of the node share. Collective: every rank calls it.

        Samples that were stored before are lost, so call `share` before the first epoch, and make the dataset with
        `defer=True`. Only the leader of the node reads samples; it grants the memory, too.

        Args:
            group: which ranks share memory; by default the running process group tells.
        """
        self.close()
        group = NodeGroup.discover() if group is None else group
        request = self.__serving__.opened.request
        [opened] = open_caches([request], {"": request.budget}, group, self.__backend)
        self.__serving__ = CachedSource(opened, self.__serving__.transform)
        opened.tell()

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """The transform of each sample after the cache, or the source's own `transform` if none was given."""
        if self.__lends_transform and hasattr(self.source, "transform"):
            return cast("Callable[[Any], Any] | None", cast(Any, self.source).transform)
        return self.__serving__.transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Any] | None) -> None:
        if self.__lends_transform and hasattr(self.source, "transform"):
            cast(Any, self.source).transform = transform
        else:
            self.__serving__.transform = transform

    @property
    def ring(self) -> Ring | None:
        """Which node holds which indices; None before the first opening."""
        return self.__serving__.opened.ring

    def close(self) -> None:
        """Close the cache in this process. From then on samples pass through uncached.

        A copy (`copy.copy`, `copy.deepcopy`, a pickle) reads and fills the same memory. Closing the dataset that was
        copied closes the memory for all copies in its process; closing a copy ends only the use by that copy.
        """
        self.__serving__.close()

    def describe(self) -> str:
        """Describe the cache in one line. With several nodes, the line names the node and its arc of the ring."""
        return self.__serving__.opened.describe()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, *key: Any, **options: Any) -> Any:
        """The sample of an index. The source answers for any other key (a list, a slice) or with further arguments."""
        if options or len(key) != 1:
            return self.__serving__.sample_with(*key, **options)
        self.__look(self.__serving__.samples_of(key[0]))
        return self.__serving__.sample(key[0])

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """The samples of a batch, as a list: all hits are copied out by one gather per field."""
        if not hasattr(indices, "__len__"):  # a batch sampler may give iterators
            indices = list(indices)
        self.__look(len(indices))
        return self.__serving__.changes.make_current(lambda: self.__finished(indices))

    def invalidate(self, indices: Sequence[int] | None = None) -> None:
        """Say that samples have changed: pseudo labels, refined annotations, mined negatives.

        They are loaded and stored again when they are asked for next. No call that begins after this one returns a
        sample from before out of the cache, in any process of the node. Workers have a copy of the dataset that is as
        old as they are, as in a DataLoader: what they load from then on is not stored, and batches that they have made
        already come as they are. On several ranks call it on each, after that rank's dataset has changed, and go on
        when all have done so (a barrier): what a rank loads before its call may be from before. With `dir=` it waits
        for the disk, without end for one that hangs.

        All copies of a dataset (`copy.copy`, `copy.deepcopy`, a fork, a pickle) read the same stored samples, the
        newest. Only a copy that has the newest data stores: once one has called this, no other does, nor the original,
        until it calls this without indices. So call it of one alone. A copy with data of its own needs a CachedDataset
        of its own.

        Args:
            indices: which samples, as whole numbers; those below zero count from the end. By default all.

        Raises:
            ValueError: the cache has a name, and so outlives this job.
            TypeError: indices are no whole numbers, as those of a mask.
            IndexError: an index lies outside of the dataset.
            TimeoutError: another process was stopped while it stored samples; nothing has changed.

        Example:
            >>> import torch
            >>> from torch.utils.data import TensorDataset
            >>> labels = torch.zeros(3)
            >>> dataset = CachedDataset(TensorDataset(torch.arange(3), labels))
            >>> dataset[1]
            (tensor(1), tensor(0.))
            >>> labels[1] = 5
            >>> dataset.invalidate([1])
            >>> dataset[1]
            (tensor(1), tensor(5.))
            >>> dataset.close()
        """
        self.__serving__.changes.invalidate(indices)

    def __look(self, samples: int) -> None:
        self.__serving__.changes.look_by_itself(samples, finds_lent=not self.__serving__.transforms)

    def __finished(self, indices: Sequence[Any]) -> Any:
        samples = self.__serving__.samples(indices)
        return list(samples) if isinstance(samples, GeneratorType) and self.__serving__.transforms else samples

    def __copy__(self) -> CachedDataset:
        other = CachedDataset.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.__serving__ = self.__serving__.around(copy.copy(self.source))
        super(CachedDataset, other).__init__(other.source)
        return other

    @classmethod
    def __over_source__(cls, cached: CachedSource) -> CachedDataset:
        dataset = cls.__new__(cls)
        super(CachedDataset, dataset).__init__(cached.source)
        dataset.__serving__ = cached
        dataset.__lends_transform = cached.transform is None
        dataset.__backend = "auto"
        return dataset


def _domain(indices: Sequence[int], source: Any) -> Domain:
    domain = Domain(indices, len(source))
    if not len(domain):
        raise ValueError("indices must name at least one sample: to cache nothing, say budget=0")
    return domain


class StandIn(Forwarding):
    """A cached dataset in the place of its source: all names are the source's."""

    def __init__(self, dataset: CachedDataset) -> None:
        super().__init__(dataset.source)
        self.__dataset = dataset

    @property  # type: ignore[misc]  # nobody sets the class of a stand-in
    def __class__(self) -> type:
        """The source's class, for `isinstance`. A DataLoader would wrap the stand-in of a datapipe."""
        kind: type = self.__dataset.source.__class__
        return type(self) if issubclass(kind, MapDataPipe) else kind

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[type], dict[str, Any]]:
        # The pickle of an object without this has its `__class__`.
        return object.__new__, (type(self),), vars(self)

    def __len__(self) -> int:
        return len(self.__dataset)

    def __getitem__(self, *key: Any, **options: Any) -> Any:
        return self.__dataset.__getitem__(*key, **options)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """The samples of a batch."""
        return self.__dataset.__getitems__(indices)

    def __copy__(self) -> StandIn:
        return StandIn(copy.copy(self.__dataset))

    def __cached__(self) -> CachedDataset:
        return self.__dataset


def cached_in(dataset: Any) -> CachedDataset | None:
    """The CachedDataset that a loader's dataset is or stands for; None for any other dataset."""
    behind = getattr(type(dataset), "__cached__", None)  # a dunder name, which no user's dataset has
    return dataset if isinstance(dataset, CachedDataset) else None if behind is None else behind(dataset)


def cached_source(dataset: CachedDataset) -> CachedSource:
    """The CachedSource of a dataset. For the package; it hides no name of the user's dataset."""
    return dataset.__serving__


def dataset_over(cached: CachedSource) -> CachedDataset:
    """A CachedDataset that a CachedSource serves. For the package, which has opened the cache."""
    return CachedDataset.__over_source__(cached)
