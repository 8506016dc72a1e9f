"""What a CachedLoader asks of a worker, and what it answers.

Sending samples through a queue costs more than loading them from memory. So a request says where the memory of the
batch is (`batch_pool`), and the worker writes there: the samples that are missing from a batch whose others the main
process has gathered, or, with a transform per sample on the CPU, all of it, as soon as each has been transformed (64
samples kept to be stacked are fresh memory, too). The memory is the worker's from the request to the reply, and nobody
else's. Where a worker has no memory to write to, or has let go of the cache, it makes the whole batch.

What has no place in the memory (none to be had or reached, a batch before there was any, labels) travels in the message
as plain bytes: torch's own way to send a tensor takes fresh memory in /dev/shm, and dies of SIGBUS where there is none.
A batch that holds a sample which is not of the codec is collated by the worker and sent as DataLoader does: what
`default_collate` makes of such samples, or says about them, is not the same in a worker and outside. So is one whose
samples hold other things than dicts, lists, tuples, numbers, strings, arrays and tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_collate

from lightning_stocache.cache.codec import aligned
from lightning_stocache.cache.store import Store
from lightning_stocache.loading.batch_pool import Attached, BatchPool, SharedBatch, fields_of
from lightning_stocache.loading.cached_source import CachedSource
from lightning_stocache.loading.dataset import cached_source
from lightning_stocache.loading.stacking import Packed, Rows, is_dense
from lightning_stocache.loading.stand_in import cached_in
from lightning_stocache.node.segment import Segment, SegmentHandle
from lightning_stocache.source.samples import is_plain, rebuilt
from lightning_stocache.torch_internals import collate, default_collate_fn_map

__all__ = ["Reply", "Request", "Responder", "unpacked"]


_SMALL = 4096  # bytes; what is smaller travels in the message


class Request(NamedTuple):
    """A batch of which samples are wanted.

    Args:
        indices: of the batch, or a sampler's keys, which only the source understands.
        missing: the positions of the samples that are wanted, where the others lie in the memory; None: all are.
        memory: the shared memory of the batch, if there is any.
    """

    indices: list[Any]
    missing: list[int] | None = None
    memory: SegmentHandle | None = None


class Reply(NamedTuple):
    """What a worker has made.

    Args:
        batch: the batch, whose samples the worker has counted. None, where samples were missing: they lie in their rows
            of the memory.
        packed: whether `Packed` stand for tensors in it.
    """

    batch: Any = None
    packed: bool = False


class Responder(Dataset[Any]):
    """In a worker, in the place of the loader's dataset: answers requests.

    Args:
        dataset: the loader's, a CachedDataset or what stands for one.
        collate_fn: the loader's.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn
        self.attached = Attached()

    def __getitems__(self, request: Request) -> Reply:
        """The reply to a request."""
        dataset = cached_in(self.dataset)
        assert dataset is not None  # else the loader is a plain DataLoader
        cached, segment = cached_source(dataset), self.attached.segment(request.memory)
        cached.refresh()
        if request.missing is None or segment is None or (cache := cached.cache) is None:
            return self._whole(cached, request.indices, segment)
        return self._missing(cached, cache, request.indices, request.missing, segment)

    def _missing(
        self, cached: CachedSource, cache: Store, indices: list[Any], missing: list[int], segment: Segment
    ) -> Reply:
        """Load the samples that a batch misses, each into its row."""
        count, codec = len(indices), cache.codec
        memory = fields_of(segment, codec.sizes(count))
        odd = cached.load_into(codec.rows(lambda: memory, count), [indices[at] for at in missing], missing)
        if not odd:
            return Reply()
        cached.count_hits(count - len(missing))
        samples = codec.split([field.copy() for field in memory], count)
        return Reply(default_collate([odd.get(at, sample) for at, sample in enumerate(samples)]))

    def _whole(self, cached: CachedSource, indices: list[Any], segment: Segment | None) -> Reply:
        """Make a whole batch, in the memory that came with the request."""
        rows = Rows(segment, len(indices))
        if self.collate_fn is not default_collate:
            batch = self.collate_fn(list(cached.samples(indices)))
            return _packed(batch, rows) if is_plain(batch) else Reply(batch)
        samples = [rows.put(number, sample) for number, sample in enumerate(cached.samples(indices))]
        if not samples or not is_plain(samples[0]):
            return Reply(default_collate(samples))
        return _packed(collate(samples, collate_fn_map=default_collate_fn_map | {torch.Tensor: rows.stack}), rows)


def unpacked(batch: Any, shared: SharedBatch | None, pool: BatchPool) -> Any:
    """In the main process: a batch that a worker has packed. Its tensors are lent, as long as the pool has others."""
    lend, size = pool.may_lend, 0

    def arrived(leaf: Any) -> Any:
        nonlocal size
        if not isinstance(leaf, Packed):
            return leaf
        if isinstance(leaf.content, int):
            assert shared is not None
            tensor = shared.tensor(leaf.content, leaf.dtype, leaf.shape)
            size += aligned(tensor.nbytes)
            return tensor if lend else tensor.clone()
        size += aligned(leaf.content.nbytes)
        return torch.from_numpy(leaf.content).view(leaf.dtype).view(leaf.shape)

    batch = rebuilt(batch, arrived)
    pool.expect(size)
    return batch


def _packed(batch: Any, rows: Rows) -> Reply:
    """A batch as a message: its tensors lie in the memory of the batch as far as there is room, the others with it."""
    known: dict[int, Packed] = {}  # a tensor that is there twice is one for who gets it, too

    def kept(leaf: Any) -> Any:
        if not is_dense(leaf) or not leaf.is_contiguous():  # torch's own way keeps its strides
            return leaf
        if id(leaf) not in known:
            place = rows.keep(leaf) if leaf.nbytes > _SMALL else None
            if place is None:
                content = leaf.reshape(-1).view(torch.uint8).numpy()
                place = Packed(content, leaf.dtype, tuple(leaf.shape))
            known[id(leaf)] = place
        return known[id(leaf)]

    return Reply(rebuilt(batch, kept), packed=True)
