"""What a CachedLoader asks of a worker, and what it answers.

Workers write into the memory of a batch, and say what does not lie there.

Sending samples through a queue costs more than loading them from memory. So a worker is told where the memory of the
batch is (`batch_pool`), and writes there: the samples that are missing from a batch whose others the main process has
gathered, or, with a transform per sample on the CPU, all of it, as soon as each has been transformed (64 samples kept
to be stacked are fresh memory, too). The memory is the worker's from the request to the reply, and nobody else's.

What has no place there (no memory to be had or reached, a batch before there was any, labels) travels in the message as
plain bytes: torch's own way to send a tensor takes fresh memory in /dev/shm, and dies of SIGBUS where there is none. A
batch that holds a sample which is not of the codec is collated by the worker and sent as DataLoader does: what
`default_collate` makes of such samples, or says about them, is not the same in a worker and outside. So is one whose
samples hold other things than dicts, lists, tuples, numbers, strings, arrays and tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate

from lightning_stocache.cache.codec import aligned
from lightning_stocache.cache.store import NO_PLACE, gathers
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.loading.cached_source import CachedSource
from lightning_stocache.loading.dataset import cached_source
from lightning_stocache.loading.shared_batch import Attached, Place, SharedBatch
from lightning_stocache.loading.stacking import InMemory, Rows, Stack, is_dense
from lightning_stocache.loading.stand_in import cached_in
from lightning_stocache.source.samples import is_plain, rebuilt
from lightning_stocache.torch_internals import collate, default_collate_fn_map

__all__ = ["BatchRequest", "Collated", "MissingRows", "Reply", "Responder", "Written", "unpacked"]


_SMALL = 4096  # bytes; what is smaller travels in the message


class BatchRequest(list[Any]):
    """Indices that a CachedLoader sends to a worker, with the place where their samples are to be put.

    Args:
        indices: of a batch, or of those of its samples that are missing; or a sampler's keys, which only the source
            understands.
        place: the shared memory of the batch, if there is any.
        missing: where only those samples are wanted that are not to be read from their slots, their positions in the
            batch.
        of_batch: then, the indices of the whole batch.
    """

    def __init__(
        self,
        indices: Iterable[Any] = (),
        place: Place | None = None,
        *,
        missing: Sequence[int] | None = None,
        of_batch: Sequence[int] = (),
    ) -> None:
        super().__init__(indices)
        self.place, self.missing, self.of_batch = place, missing, of_batch


class Collated(NamedTuple):
    """A batch that the worker has collated; and whether it has counted all of its samples, those that are READY too."""

    batch: Any
    counted: bool = False


@dataclass(frozen=True)
class _Sent:
    """A tensor that lies in the message."""

    content: npt.NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]


class MissingRows(NamedTuple):
    """The samples that were missing, where there is no memory for their batch: uint8 `[samples, nbytes]` per field."""

    fields: list[npt.NDArray[np.uint8]]


class Written(NamedTuple):
    """A batch with `InMemory` or `_Sent` in place of its tensors."""

    batch: Any


Reply = Written | Collated | MissingRows | None
"""None: the samples that were missing lie in their rows, and nothing has to be said of them."""


class Responder(Dataset[Any]):
    """In a worker, in the place of the loader's dataset: answers requests.

    Args:
        dataset: the loader's, a CachedDataset or what stands for one.
        collate_fn: the loader's.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn
        self.attached = Attached()

    def __getitems__(self, request: BatchRequest) -> Reply:
        """The reply to a request."""
        dataset = cached_in(self.dataset)
        assert dataset is not None  # else the loader is a plain DataLoader
        cached = cached_source(dataset)
        return self._whole(cached, request) if request.missing is None else self._missing(cached, request)

    def _missing(self, cached: CachedSource, request: BatchRequest) -> Reply:
        """Load the samples that a batch misses, each into its row."""
        cached.refresh()
        cache, missing = cached.cache, request.missing
        if cache is None:
            return Collated(default_collate(_uncached(cached, request)), counted=True)
        assert missing is not None
        assert gathers(cache)
        samples, places = len(request.of_batch), list(missing)
        memory = self.attached.fields(request.place, cache.codec.sizes(samples))
        in_place = memory is not None
        if memory is None:  # then the rows are of those samples alone
            samples, places = len(request), list(range(len(request)))
            memory = [np.empty(size, dtype=np.uint8) for size in cache.codec.sizes(samples)]
        if odd := cached.load_into(cache.codec.rows(lambda: memory, samples), request, places):
            rows = cache.codec.split([field.copy() for field in memory], samples)
            came = {at: odd.get(place, rows[place]) for at, place in zip(missing, places, strict=True)}
            ready = [at for at in range(len(request.of_batch)) if at not in came]
            found = cache.lookup(np.array([request.of_batch[at] for at in ready], dtype=np.int64))
            if (found == NO_PLACE).any():  # of a cache on a disk, whose file was cut off meanwhile
                return Collated(default_collate(list(cached.samples(request.of_batch))), counted=True)
            came |= zip(ready, cache.read(found), strict=True)
            return Collated(default_collate([came[at] for at in range(len(request.of_batch))]))
        return None if in_place else MissingRows([field.reshape(samples, -1) for field in memory])

    def _whole(self, cached: CachedSource, request: BatchRequest) -> Reply:
        """Make a whole batch, in the memory that came with the request."""
        rows = Rows(self.attached.segment(request.place), len(request))
        if self.collate_fn is not default_collate:
            batch = self.collate_fn(list(cached.samples(request)))
            return _written(batch, rows) if is_plain(batch) else Collated(batch, counted=True)
        samples = [rows.put(number, sample) for number, sample in enumerate(cached.samples(request))]
        if not samples or not is_plain(samples[0]):
            return Collated(default_collate(samples), counted=True)
        stack = Stack(rows)
        batch = collate(samples, collate_fn_map=default_collate_fn_map | {torch.Tensor: stack})
        return _written(batch, rows)


def unpacked(written: Written, shared: SharedBatch | None, pool: BatchPool) -> Any:
    """In the main process: a batch that a worker has written. Its tensors are lent, as long as the pool has others."""
    lend, size = pool.may_lend, 0

    def arrived(leaf: Any) -> Any:
        nonlocal size
        if isinstance(leaf, InMemory):
            assert shared is not None
            tensor = shared.tensor(leaf.offset, leaf.dtype, leaf.shape)
            size += aligned(tensor.nbytes)
            return tensor if lend else tensor.clone()
        if isinstance(leaf, _Sent):
            size += aligned(leaf.content.nbytes)
            return torch.from_numpy(leaf.content).view(leaf.dtype).view(leaf.shape)
        return leaf

    batch = rebuilt(written.batch, arrived)
    pool.expect(size)
    return batch


def _written(batch: Any, rows: Rows) -> Written:
    """A batch as a message: its tensors lie in the memory of the batch as far as there is room, the others with it."""
    known: dict[int, InMemory | _Sent] = {}  # a tensor that is there twice is one for who gets it, too

    def kept(leaf: Any) -> Any:
        if not is_dense(leaf) or not leaf.is_contiguous():  # torch's own way keeps its strides
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = (rows.keep(leaf) if leaf.nbytes > _SMALL else None) or _sent(leaf)
        return known[id(leaf)]

    return Written(rebuilt(batch, kept))


def _sent(tensor: torch.Tensor) -> _Sent:
    return _Sent(tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def _uncached(cached: CachedSource, request: BatchRequest) -> list[Any]:
    """All samples of a batch, where this process has let go of the cache; whatever the main process thinks of it."""
    came = dict(zip(request, cached.samples(request), strict=True))
    return [came[index] if index in came else cached.sample(index) for index in request.of_batch]
