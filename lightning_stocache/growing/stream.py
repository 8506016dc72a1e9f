"""A stream that remembers: `CachedStream` stands between a loader and what can only be read from its beginning.

Epoch one is the user's stream, sample for sample, and each is kept as it passes. Later epochs are a dataset in memory:
`stream_source` has the protocol, and when it does not come to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.stream import StreamStore
from lightning_stocache.growing.stream_source import StreamSource
from lightning_stocache.loading.dataset import Forwarding
from lightning_stocache.loading.grows import Kept
from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.open_stream import OpenStream, check_budget
from lightning_stocache.setup.request import BackendChoice, Layout, check_choice, check_count, check_flag
from lightning_stocache.source.access import check_stream

__all__ = ["CachedStream", "stream_source", "stream_with"]


class CachedStream(Forwarding, IterableDataset[Any]):
    """An iterable-style dataset whose samples are kept as they pass, in memory that all processes of the node share.

    When its memory opens, a process that is thrown away reads its first sixteen samples, to see what samples look like.
    Epoch one is the stream itself, in every worker: order, values, errors. When it has ended everywhere, and all of it
    was kept, later epochs come from memory, every sample once, in another order each.

    A stream that does not fit into its budget passes through uncached, with one warning that says how large it is. So
    does one whose samples are of many shapes where the first sixteen are not, or random, or others in every epoch.
    Shuffling is no such thing, unless it draws from the process-wide generators with every sample, or batches are made
    of what was shuffled (`batched` of WebDataset after its `shuffle`): have the loader make them. So does a stream of
    which three epochs one after the other are broken off, and one on several nodes.

    Give it to a CachedLoader, which makes the batches of later epochs in the main process, or to any DataLoader. All
    names but its own (`source`, `cache`, `counters`, `group`, `budget_bytes`, `share`, `close`, `describe`) are those
    of the stream, to read, write and delete.

    The idea is that of `tf.data.Dataset.cache()`.

    Args:
        iterable: an IterableDataset, WebDataset, `datasets.IterableDataset`, any object with `__iter__`, or a function
            that makes an iterator.
        budget: memory per node: "8GiB", "60% of free" (memory), "auto" (as much as is safely free), bytes, or 0 (off).
            Nobody knows the size of a stream, so no share of it can be asked for.
        transform: what is done to each sample after the cache, on the CPU: the random part goes here.
        allow_random: keep a random stream as it is, with its first draw frozen.
        backend: where the memory lies: "tmpfile" (/dev/shm), "memfd", "file", or "auto".
        strict: memory that cannot be had is an error; else the stream passes through uncached, with one warning.
        defer: open nothing yet; samples pass through until `share` is called.
        layout: "rows" (samples of one shape, nothing but numbers), "records" (anything that can be pickled), or "auto":
            rows where the first sixteen samples are such. If a later one is none, the stream passes through.
        seed: of the order of later epochs; the same on all ranks.
        shuffle: whether later epochs have another order each; False: that of epoch one, batch for batch.

    Raises:
        TypeError: it is no stream, or one that can be read only once.
        ValueError: the budget cannot be read, or an argument is none of its choices.
        CacheMemoryError: (`strict`) the memory cannot be had.

    Example:
        >>> reads = []
        >>> def squares():
        ...     for number in range(4):
        ...         reads.append(number)
        ...         yield number * number
        >>> stream = CachedStream(squares, budget="1MiB")
        >>> list(stream), sorted(stream), sorted(stream)
        ([0, 1, 4, 9], [0, 1, 4, 9], [0, 1, 4, 9])
        >>> stream.counters.totals().hits, len(reads)  # another process has read the first ones again
        (8, 4)
        >>> stream.close()
    """

    def __init__(
        self,
        iterable: Any,
        budget: int | float | str = "auto",
        *,
        transform: Callable[[Any], Any] | None = None,
        allow_random: bool = False,
        backend: BackendChoice = "auto",
        strict: bool = False,
        defer: bool = False,
        layout: Layout = "auto",
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        check_stream(iterable, CachedStream)
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of a sample, got {transform!r}")
        check_choice("backend", backend, BackendChoice)
        check_flag("strict", strict)
        check_choice("layout", layout, Layout)
        check_count("seed", seed, 0)
        check_flag("shuffle", shuffle)
        parsed = Budget.parse(budget)
        check_budget(parsed)
        super().__init__(iterable)
        self.__budget, self.__backend, self.__strict = parsed, backend, strict
        self.__serving = StreamSource(iterable, OpenStream(), transform, layout, allow_random, seed, shuffle)
        if not defer:
            self.share(NodeGroup())

    def share(self, group: NodeGroup | None = None) -> None:
        """Swap the memory for one that all ranks of the node have in common. Collective: every rank calls it.

        What was kept before is given up, so call it before the first epoch, and make the stream with `defer=True`.

        Args:
            group: which ranks share memory; by default it is found out from the running process group.
        """
        group = NodeGroup.discover() if group is None else group
        self.__serving.open(self.__budget, group, self.__backend, strict=self.__strict)

    @property
    def source(self) -> Any:
        """The user's stream."""
        return self.__serving.source

    @property
    def cache(self) -> StreamStore | None:
        """What is kept; None while samples pass through."""
        return self.__serving.opened.live

    @property
    def counters(self) -> Counters | None:
        """What has been served and kept, by all processes of the node."""
        return self.__serving.opened.counters

    @property
    def group(self) -> NodeGroup:
        """The ranks that share the memory."""
        return self.__serving.opened.group

    @property
    def budget_bytes(self) -> int:
        """Memory that was granted on this node."""
        return self.__serving.opened.budget_bytes

    def close(self) -> None:
        """Give the memory up in this process; from then on the stream passes through."""
        self.__serving.close()

    def describe(self) -> str:
        """One line on what is kept, for people."""
        name, cache = type(self.source).__name__, self.cache
        if cache is None or (mode := cache.ledger.mode) == "pass":
            return f"{name}: a stream that passes through uncached"
        state = "later epochs come from memory" if mode == "cache" else "it is being read"
        used = f"{format_bytes(cache.memory_bytes)} in use of {format_bytes(self.budget_bytes)}"
        return f"{name}: {cache.filled:,} samples of a stream are kept, {used}; {state}"

    def __iter__(self) -> Iterator[Any]:
        return self.__serving.begin()

    def __len__(self) -> int:
        """The length of the stream, if it has one."""
        return len(self.source)

    def __kept__(self, workers: int, batch_size: int, drop_last: bool) -> Kept | None:
        return self.__serving.announce(workers, batch_size, drop_last)

    @staticmethod
    def __stream_source__(stream: CachedStream) -> StreamSource:
        return stream.__serving

    @staticmethod
    def __over_source__(stream: CachedStream, serving: StreamSource) -> CachedStream:
        stream.__serving = serving
        return stream


def stream_with(stream: CachedStream, transform: Callable[[Any], Any] | None) -> CachedStream:
    """The same stream, with another transform after the cache: for the package."""
    serving = stream_source(stream)
    other = CachedStream(serving.source, 0, defer=True)
    parts = (transform, serving.layout, serving.allow_random, serving.seed, serving.shuffle)
    return CachedStream.__over_source__(other, StreamSource(serving.source, serving.opened, *parts))


def stream_source(stream: CachedStream) -> StreamSource:
    """What serves a stream: for the package, whose names for it are none of the user's."""
    return CachedStream.__stream_source__(stream)
