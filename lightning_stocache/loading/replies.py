"""What workers answer: they write into the memory of a batch, and say what does not lie there.

Sending samples through a queue costs more than loading them from memory. So a worker is told where the memory of the
batch is (`batch_pool`), and writes there: the samples that are missing from a batch whose others the main process has
gathered (`RowReplies`), or, with a transform per sample on the CPU, all of it, as soon as each has been transformed
(`BatchReplies`: 64 samples kept to be stacked are fresh memory, too). The memory is the worker's from the request to
the answer, and nobody else's.

What has no place there (no memory to be had or reached, a batch before there was any, labels) travels in the message as
plain bytes: torch's own way to send a tensor takes fresh memory in /dev/shm, and dies of SIGBUS where there is none. A
batch that holds a sample which is not of the spec is collated by the worker and sent as DataLoader does: what
`default_collate` makes of such samples, or says about them, is not the same in a worker and outside. So is one whose
samples hold other things than dicts, lists, tuples, numbers, strings, arrays and tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from lightning_stocache.loading.batch_pool import Attached, BatchPool, SharedBatch, aligned
from lightning_stocache.loading.errand import Delivery, Errand
from lightning_stocache.loading.stacking import Rows, Stack, Written, is_dense, is_plain, rebuilt
from lightning_stocache.loading.torch_internals import collate, default_collate_fn_map

__all__ = ["BatchReplies", "Collated", "MissingRows", "RowReplies", "opened"]


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


class RowReplies:
    """In a worker: loads the samples that a batch misses, each into its row. Of those nothing has to be said."""

    def __init__(self) -> None:
        self._attached = Attached()

    def __call__(self, delivery: Delivery) -> MissingRows | Collated | None:
        """What does not lie in the memory of the batch."""
        dataset, errand = delivery.dataset, delivery.errand
        cache, missing = dataset.cache, errand.missing
        if cache is None:
            return Collated(default_collate(_uncached(dataset, errand)), counted=True)
        assert missing is not None
        samples, places = len(errand.of_batch), list(missing)
        memory = self._attached.fields(errand.place, cache.codec.sizes(samples))
        in_place = memory is not None
        if memory is None:  # then the rows are of those samples alone
            samples, places = len(errand), list(range(len(errand)))
            memory = [torch.empty(size, dtype=torch.uint8) for size in cache.codec.sizes(samples)]
        if odd := dataset.load_into(cache.codec.rows(lambda: memory, samples), list(errand), places):
            rows = cache.codec.split([field.clone() for field in memory], samples)
            came = {at: odd.get(place, rows[place]) for at, place in zip(missing, places, strict=True)}
            whole = [came[at] if at in came else cache.get(index) for at, index in enumerate(errand.of_batch)]
            return Collated(default_collate(whole))
        return None if in_place else MissingRows([field.view(samples, -1).numpy() for field in memory])


class BatchReplies:
    """In a worker: makes whole batches, in the memory that came with the request."""

    def __init__(self) -> None:
        self._attached = Attached()

    def __call__(self, delivery: Delivery | list[Any]) -> Any:
        """The batch, with `Written` or `_Sent` in place of its tensors."""
        if not isinstance(delivery, Delivery):  # keys that only the source understands
            return default_collate(delivery)
        rows = Rows(self._attached.segment(delivery.errand.place), len(delivery.errand))
        samples = [rows.put(number, sample) for number, sample in enumerate(delivery.samples)]
        if not samples or not is_plain(samples[0]):
            return default_collate(samples)
        stack = Stack(rows)
        batch = collate(samples, collate_fn_map=default_collate_fn_map | {torch.Tensor: stack})
        return rebuilt(batch, lambda leaf: _sent(leaf) if is_dense(leaf) else leaf)


def opened(answer: Any, shared: SharedBatch | None, pool: BatchPool) -> Any:
    """In the main process: the batch of a `BatchReplies`. Its tensors are lent, as long as the pool has others."""
    lend, size = pool.may_lend, 0

    def arrived(leaf: Any) -> Any:
        nonlocal size
        if isinstance(leaf, Written):
            assert shared is not None
            tensor = shared.tensor(leaf.offset, leaf.dtype, leaf.shape)
            size += aligned(tensor.nbytes)
            return tensor if lend else tensor.clone()
        if isinstance(leaf, _Sent):
            size += aligned(leaf.content.nbytes)
            return torch.from_numpy(leaf.content).view(leaf.dtype).view(leaf.shape)
        return leaf

    batch = rebuilt(answer, arrived)
    pool.expect(size)
    return batch


def _sent(tensor: torch.Tensor) -> _Sent:
    return _Sent(tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def _uncached(dataset: Any, errand: Errand) -> list[Any]:
    """All samples of a batch, where this process has let go of the cache; whatever the main process thinks of it."""
    came = dict(zip(errand, dataset.__getitems__(list(errand)), strict=True))
    return [came[index] if index in came else dataset[index] for index in errand.of_batch]
