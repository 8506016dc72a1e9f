"""The worker processes of a CachedLoader, their requests and their replies.

The processes are DataLoader's own workers. Requests feed them instead of a sampler (`torch_internals`), and a
`Responder` takes the place of the loader's dataset. Only the consumer's thread uses a pool.

Sending samples through a queue costs more than loading them from memory. So a request names the memory of the batch
(`batch_pool`), and the worker writes there: the samples that are missing from a batch whose others the main process has
gathered, or all of a batch, each sample as soon as it is ready. The memory is the worker's from the request to the
reply. Without memory, or if the worker has given the cache up, it makes the whole batch.

A tensor without a place in the memory travels in the message as plain bytes. Torch's own way to send a tensor takes
fresh memory in /dev/shm, and dies of SIGBUS where there is none. DataLoader's own way sends a batch with an odd
sample, or with anything but dicts, lists, tuples, numbers, strings, arrays and tensors.

A user's `worker_init_fn` finds the user's own dataset in `get_worker_info().dataset`.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from lightning_stocache.cache.codec import aligned, memory_of
from lightning_stocache.cache.store import Store
from lightning_stocache.loading.batch_pool import Attached, BatchPool, SharedBatch, fields_of
from lightning_stocache.loading.collate import Packed, Rows, is_dense
from lightning_stocache.loading.dataset import StandIn, cached_in, cached_source
from lightning_stocache.loading.prefetch import held_back
from lightning_stocache.loading.prefill import prefill
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.node.segment import Segment, SegmentHandle
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.looks import Due, Look
from lightning_stocache.source.samples import is_plain, rebuilt
from lightning_stocache.torch_internals import (
    WorkerIterator,
    collate,
    default_collate_fn_map,
    do_when_idle,
    idling_context,
    set_worker_dataset,
)

__all__ = ["InitOnSource", "Reply", "Request", "Responder", "WorkerPool", "under_way", "unpacked"]

_SMALL = 4096  # bytes; what is smaller travels in the message
_BY_CTRL_C = (0, -signal.SIGINT)  # exit codes of workers that a terminal's Ctrl-C has ended


class Request(NamedTuple):
    """A request for a batch, or for its missing samples.

    Args:
        indices: the indices of the batch, or a sampler's keys, which only the source understands.
        missing: the positions of the missing samples, if the others lie in the memory; None for the whole batch.
        memory: the shared memory of the batch, if there is any.
        begins: whether it is the first one of this worker in an epoch.
        is_anew: whether the worker draws what it drew after the first request of the epoch, whose replies were dropped.
    """

    indices: list[Any]
    missing: list[int] | None = None
    memory: SegmentHandle | None = None
    begins: bool = False
    is_anew: bool = False


class Reply(NamedTuple):
    """The reply to a request.

    Args:
        batch: the batch, whose samples the worker has counted. None if the missing samples lie in their rows of the
            memory.
        packed: whether the batch has `Packed` in the place of tensors.
        counted: number of samples that the worker has counted.
    """

    batch: Any = None
    packed: bool = False
    counted: int = 0


class Responder(Dataset[Any]):
    """Takes the place of the loader's dataset in a worker, and answers requests.

    Args:
        dataset: the loader's dataset: a CachedDataset or a stand-in.
        collate_fn: the loader's collate function.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn
        self.attached = Attached()
        self._generators: Generators | None = None  # as they were when the epoch began

    def __getitems__(self, request: Request | Due) -> Reply | Look:
        """The reply to a request."""
        dataset = cached_in(self.dataset)
        assert dataset is not None  # else the loader is a plain DataLoader
        cached = cached_source(dataset)
        if isinstance(request, Due):
            return cached.changes.look(request)
        if request.is_anew or (request.begins and cached.transforms):
            self._begin(cached, request.is_anew)
        segment = self.attached.segment(request.memory)
        if request.missing is not None and segment is not None:
            cached.changes.refresh()
            if (cache := cached.cache) is not None:
                return self._missing(cached, cache, request.indices, request.missing, segment)
        reply = cached.changes.made(lambda: self._whole(cached, request.indices, segment))
        return Reply(reply.batch, reply.packed, len(request.indices))

    def _begin(self, cached: CachedSource, is_anew: bool) -> None:
        """Note the states of generators at the beginning of an epoch, or return to them."""
        if is_anew:
            if self._generators is not None:
                self._generators.__exit__()
        else:
            self._generators = Generators((cached.source, cached.transform)).__enter__()

    def _missing(
        self, cached: CachedSource, cache: Store, indices: list[Any], missing: list[int], segment: Segment
    ) -> Reply:
        """Load the samples that a batch misses, each into its row."""
        count, codec = len(indices), cache.codec
        memory = fields_of(segment, codec.sizes(count))
        odd = cached.load_into(codec.rows(memory, count), [indices[at] for at in missing], missing)
        if not odd:
            return Reply(counted=len(missing))
        cached.count_hits(count - len(missing))
        samples = codec.split([field.copy() for field in memory], count)
        return Reply(default_collate([odd.get(at, sample) for at, sample in enumerate(samples)]), counted=count)

    def _whole(self, cached: CachedSource, indices: list[Any], segment: Segment | None) -> Reply:
        """Make a whole batch, in the memory that came with the request."""
        rows = Rows(segment, len(indices))
        if self.collate_fn is not default_collate:
            batch = self.collate_fn(list(cached.samples(indices)))
            with suppress(Exception):  # of the code of the user's classes
                if is_plain(batch):
                    return _packed(batch, rows)
            return Reply(batch)
        samples = [rows.put(number, sample) for number, sample in enumerate(cached.samples(indices))]
        if not samples or not is_plain(samples[0]):
            return Reply(default_collate(samples))
        return _packed(collate(samples, collate_fn_map=default_collate_fn_map | {torch.Tensor: rows.stack}), rows)


def _packed(batch: Any, rows: Rows) -> Reply:
    """A batch as a message. Tensors lie in the memory of the batch while there is room, the others in the message."""
    known: dict[int, Packed] = {}  # a tensor that comes twice stays one tensor

    def packed(leaf: Any) -> Any:
        if not is_dense(leaf) or not leaf.is_contiguous():  # torch's own way keeps its strides
            return leaf
        if id(leaf) not in known:
            place = rows.keep(leaf) if leaf.nbytes > _SMALL else None
            known[id(leaf)] = place or Packed(memory_of(leaf), leaf.dtype, tuple(leaf.shape))
        return known[id(leaf)]

    return Reply(rebuilt(batch, packed), packed=True)


def unpacked(batch: Any, shared: SharedBatch | None, pool: BatchPool) -> Any:
    """In the main process: a batch that a worker has packed. Its tensors are lent while the pool has more memory."""
    lend, size = pool.shared_left > 0, 0
    known: dict[int, torch.Tensor] = {}  # a tensor that comes twice stays one tensor

    def arrived(leaf: Any) -> Any:
        if not isinstance(leaf, Packed):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = tensor_of(leaf)
        return known[id(leaf)]

    def tensor_of(leaf: Packed) -> torch.Tensor:
        nonlocal size
        nbytes = leaf.dtype.itemsize * torch.Size(leaf.shape).numel()
        size += aligned(nbytes)
        if not isinstance(leaf.content, int):
            return torch.from_numpy(leaf.content).view(leaf.dtype).view(leaf.shape)
        tensor = cast(SharedBatch, shared).tensor(leaf.content, nbytes).view(leaf.dtype).view(leaf.shape)
        return tensor if lend else tensor.clone()

    batch = rebuilt(batch, arrived)
    pool.expect(size)
    return batch


def under_way(loader: DataLoader[Any]) -> int:
    """Number of batches that a loader draws ahead; 0 without workers."""
    return (loader.prefetch_factor or 2) * loader.num_workers


class _Feed(deque[Any]):
    """The waiting requests, as an iterator. After StopIteration another request may come, and the iterator goes on."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.popleft()


def _as_it_is(reply: Any) -> Any:
    """The collate function of the workers: a reply is complete."""
    return reply


class WorkerPool:
    """The workers of a loader.

    Args:
        loader: the loader, with the number of workers, start method, time-out and the rest.
        seed_state: state of the generator from which the base seed of the workers is drawn.
    """

    def __init__(self, loader: DataLoader[Any], seed_state: torch.Tensor | None) -> None:
        generator = torch.Generator()
        if seed_state is not None:
            generator.set_state(seed_state)
        self._feed = _Feed()
        context, cached = loader.multiprocessing_context, cached_in(loader.dataset)
        if cached is not None and cached_source(cached).opened.request.prefill:
            context = idling_context(context)
        self._most = under_way(loader)
        fed: DataLoader[Any] = DataLoader(
            Responder(loader.dataset, loader.collate_fn),
            batch_sampler=self._feed,
            num_workers=loader.num_workers,
            collate_fn=_as_it_is,
            timeout=loader.timeout,
            worker_init_fn=InitOnSource(loader.worker_init_fn),
            multiprocessing_context=context,
            generator=generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=True,  # an empty feed must not end them
        )
        self._workers = WorkerIterator(fed)
        self._number, self._next_look = loader.num_workers, 0
        self._has_raised_death = False  # an epoch has raised that a worker was killed

    def are_alive(self) -> bool:
        """Whether all workers run.

        Raises:
            RuntimeError: a worker was killed, and no epoch has raised that. Torch's handler of SIGCHLD raises wherever
                the trainer is, and the code there may swallow the error, as Lightning's broadcast of SIGTERM does.
        """
        ended = self._workers.ended
        killed = [worker for worker in ended if worker.exitcode not in _BY_CTRL_C]
        if killed and not self._has_raised_death:
            self._has_raised_death = True
            names = "; ".join(f"pid {worker.pid}, exit code {worker.exitcode}" for worker in killed)
            raise RuntimeError(f"DataLoader worker ({names}) exited unexpectedly")
        return not ended

    def begin_epoch(self, batches: int = 0) -> None:
        """Wait for the replies of an epoch that was broken off.

        Args:
            batches: how many batches of the epoch have come; the worker of the next one is next.
        """
        self._feed.clear()
        self._workers.begin_epoch(batches)

    def send(self, request: Request) -> None:
        """Give a request to the next worker."""
        self._feed.append(request)
        if self._workers.outstanding < self._most:
            with held_back(), held_back(signal.SIGCHLD):
                self._workers.push()

    def receive(self) -> Reply:
        """The reply to the earliest request that has none yet.

        Raises:
            Exception: the dataset's error in the worker, with its traceback, which counts as a reply; or a time-out or
                a killed worker, after which `replies` stays the same.
        """
        try:
            return cast(Reply, self._workers.receive())
        except Exception:
            self._has_raised_death = bool(self._workers.ended)
            raise

    def drop(self, replies: int) -> int:
        """Wait for replies, and drop them. Returns the number of samples that workers have counted for them.

        Raises:
            RuntimeError: a time-out, or a worker was killed.
        """
        counted = 0
        for _ in range(replies):
            before = self.replies
            try:
                counted += self.receive().counted
            except Exception:  # an error of the source comes again with the new batch
                if self.replies == before:
                    raise
        return counted

    def look(self, due: Due) -> Look:
        """Let a worker read stored samples again, and compare its state: another one each time."""
        number, self._next_look = self._next_look, (self._next_look + 1) % self._number
        look = self._workers.ask(number, due)
        return Look() if look is None else cast(Look, look)

    @property
    def replies(self) -> int:
        """Number of replies in this epoch."""
        return self._workers.answered

    def close(self) -> None:
        """End the workers, and wait for them."""
        with held_back():
            self._workers.shut_down()


@dataclass(frozen=True)
class InitOnSource:
    """Calls the user's `worker_init_fn` in a worker, with the user's own dataset in `get_worker_info()`.

    Args:
        function: the user's function, or None.
        source: the user's dataset, if the loader's dataset does not lead to it.
    """

    function: Callable[[int], None] | None
    source: Any = None

    def __call__(self, worker: int) -> None:
        """Call the function in the worker of that number."""
        info: Any = get_worker_info()
        ours = isinstance(info.dataset, Responder)
        dataset = info.dataset.dataset if ours else info.dataset
        cached = cached_in(dataset)
        if ours and cached is not None and cached_source(cached).opened.request.prefill:
            do_when_idle(prefill(cached_source(cached), worker, info.num_workers))
        if cached is not None and isinstance(dataset, StandIn):  # a user who made a CachedDataset expects that
            dataset = cached.source
        set_worker_dataset(dataset if self.source is None else self.source)
        if self.function is None:
            return
        if ours and cached is not None:
            cached_source(cached).changes.look_around(partial(self.function, worker))
        else:
            self.function(worker)

    @classmethod
    def of(cls, function: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """Wrap the function of a loader, once; None stays None."""
        return function if function is None or isinstance(function, cls) else cls(function)
