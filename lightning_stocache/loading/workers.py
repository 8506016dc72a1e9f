"""The workers of a CachedLoader: DataLoader's own iterator, over a copy of the loader that draws requests.

In the copy, a `Requested` takes the place of the dataset, `Requests` that of the batch sampler, and each reply is
handed on as it is. So workers, their seeds, time-outs and deaths, `in_order`, `prefetch_factor`, the start method and
the thread that copies batches to page-locked memory are DataLoader's, and so are the moments at which it draws.

A request names the memory of its batch (`arena`), and the worker makes the batch there (`message`).

A user's `worker_init_fn` finds the user's own dataset in `get_worker_info().dataset`.
"""

from __future__ import annotations

import logging
import os
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from lightning_stocache.loading.arena import Arena, Slot
from lightning_stocache.loading.dataset import CachedDataset, StandIn, cached_in, cached_source
from lightning_stocache.loading.interrupt import held_back
from lightning_stocache.loading.maker import Maker
from lightning_stocache.loading.message import Reply, Request
from lightning_stocache.loading.prefill import prefill
from lightning_stocache.source.looks import Due, Look
from lightning_stocache.source.walk import same_object
from lightning_stocache.torch_internals import (
    do_when_idle,
    idling_context,
    processes_of,
    set_worker_dataset,
    shut_down,
    start_epoch,
    wrapped_error,
)

__all__ = ["InitOnSource", "Requested", "Workers", "loader_like", "under_way"]

log = logging.getLogger(__name__)

_SLACK = 3  # slots besides those under way: the batch of the step, the one fetched ahead, one to spare
_BY_CTRL_C = (0, -signal.SIGINT)  # exit codes of workers that a terminal's Ctrl-C has ended


class Requested(Dataset[Any]):
    """Takes the place of the loader's dataset in a worker, and answers requests.

    Args:
        dataset: the loader's dataset: a CachedDataset or a stand-in.
        collate_fn: the loader's collate function.
        arena: the memory of batches, if there is any.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any] = default_collate, arena: Arena | None = None
    ) -> None:
        self.dataset, self._arena = dataset, arena
        self._maker = Maker(collate_fn)

    def __getitems__(self, request: Request | Due | None) -> Reply | Look | None:
        """The reply to a request."""
        if request is None:
            return None
        dataset = cached_in(self.dataset)
        assert dataset is not None  # else the loader is a plain DataLoader
        cached = cached_source(dataset)
        if isinstance(request, Due):
            with suppress(Exception):  # of the user's code
                return cached.changes.look(request)
            return Look()
        token = None if self._arena is None or request.slot is None else self._arena.token
        cache = cached.cache
        slot = Slot(self._arena, request.slot, int if cache is None else lambda: cache.promised_bytes)
        try:
            if self._arena is not None and request.slot is not None:
                self._arena.give_back(request.slot, request.most_bytes)
            batch = self._maker.make(cached, request.keys, slot)
            reply = Reply(request.number, self._maker.served, token=token)
            reply.pack(batch, slot)
            return reply
        except Exception:
            where = f"in DataLoader worker process {cast(Any, get_worker_info()).id}"
            return Reply(request.number, token=token, error=wrapped_error(where))


def under_way(loader: DataLoader[Any]) -> int:
    """Number of batches that a loader draws ahead; 0 without workers."""
    return (loader.prefetch_factor or 2) * loader.num_workers


class Requests:
    """Takes the place of the batch sampler, and makes requests. It does not refer to `Workers`, which may end first.

    DataLoader asks for an iterator twice when it starts workers, and once for each later epoch of persistent ones.

    Attributes:
        iterators: the functions that make the next iterators.
    """

    def __init__(self, arena: Arena | None) -> None:
        self._arena = arena
        self._ends_leases = False
        self.iterators: deque[Callable[[], Iterator[Any]]] = deque()

    def __iter__(self) -> Iterator[Any]:
        self._ends_leases = True
        return self.iterators.popleft()()

    def request(self, number: int, keys: Any) -> Request:
        """A request for a batch."""
        if self._arena is None:
            return Request(number, keys)
        if self._ends_leases:  # DataLoader has waited for the replies of an epoch that was broken off
            self._arena.end_leases()
            self._ends_leases = False
        return Request(number, keys, self._arena.lease(number), self._arena.most_bytes)


class Workers:
    """The workers of a loader. They stay until `close`, or until the last reference to this object.

    Args:
        loader: the loader, whose dataset is cached.
        is_late: whether a DataLoader would have started them in an earlier epoch: then they draw no base seed, and the
            sampler begins once.
    """

    def __init__(self, loader: DataLoader[Any], *, is_late: bool) -> None:
        self.arena = Arena.create(under_way(loader) + _SLACK, loader.num_workers)
        self.requests = Requests(self.arena)
        self._is_late = is_late
        self._iterator = cast(Any, None)
        self._number, self._next_look = loader.num_workers, 0
        self._has_raised_death = self._has_warned = False
        self._pid = os.getpid()  # a process that is forked meanwhile has no part in the workers and their memory
        context = loader.multiprocessing_context
        served = cached_source(cast(CachedDataset, cached_in(loader.dataset))).opened
        self.cache = served.live_cache
        if served.request.prefill:
            context = idling_context(context)
        given = torch.default_generator if loader.generator is None else loader.generator
        self._loader = loader_like(
            loader,
            given if is_late else None,
            dataset=Requested(loader.dataset, loader.collate_fn, self.arena),
            batch_sampler=self.requests,
            collate_fn=same_object,  # a reply is complete
            worker_init_fn=InitOnSource(loader.worker_init_fn),
            persistent_workers=True,  # after a look they go on
        )
        self._loader.multiprocessing_context = context
        self._finalizer: Any = None

    def begin(self, begin: Callable[[], Iterator[Any]]) -> None:
        """Begin an epoch, whose sampler `begin` begins.

        Raises:
            Exception: an error of the sampler or of the start of a worker; a time-out; or a worker was killed.
        """
        self._iterate(begin, begin)

    def look(self, due: Due, begin: Callable[[], Iterator[Any]]) -> Look:
        """Let a worker read stored samples again: an epoch of one request, for another worker each time.

        `begin` begins the sampler if workers start now.

        Raises:
            RuntimeError: a time-out; or a worker was killed.
        """
        self._iterate(begin, partial(self._look_requests, due))
        with self._noting_death():
            return next(reply for reply in list(self._iterator) if isinstance(reply, Look))  # in any order

    def _look_requests(self, due: Due) -> Iterator[Any]:
        """Requests of which the last is for the worker whose turn it is."""
        number, self._next_look = self._next_look, (self._next_look + 1) % self._number
        return iter([None] * number + [due])

    def _iterate(self, first: Callable[[], Iterator[Any]], then: Callable[[], Iterator[Any]]) -> None:
        """Begin an epoch of DataLoader. `first` is its first iterator, of two, if workers start now."""
        iterators = self.requests.iterators
        iterators.clear()
        if self._iterator is None:
            iterators.append((lambda: iter(())) if self._is_late else first)
        iterators.append(then)
        if self._iterator is not None:
            with self._noting_death():
                self._iterator = start_epoch(self._loader)
            return
        with held_back():  # between a worker's start and its registration Ctrl-C would leave it running for ever
            self._iterator = start_epoch(self._loader)
            self._finalizer = weakref.finalize(self, _end, self._iterator)

    def receive(self) -> Reply | None:
        """The next reply, with its batch unpacked; None to a request of nothing.

        Raises:
            StopIteration: all requests are answered, and the sampler draws no more.
            Exception: an error of the sampler; or a time-out, or a killed worker.
        """
        with self._noting_death():
            reply: Reply | None = next(self._iterator)
        if reply is None:
            return None
        # If no other slot is free, the next request would have none.
        reply.unpack(lend=self.arena is None or self.arena.free_slots > 0)
        if reply.is_refused and not self._has_warned:
            self._has_warned = True
            log.warning("workers send batches in messages, which is slower: there is no memory for them to share")
        return reply

    @contextmanager
    def _noting_death(self) -> Iterator[None]:
        """Note whether an error of DataLoader tells of a worker that was killed."""
        try:
            yield
        except Exception:
            self._has_raised_death = bool(self._ended)
            raise

    def raise_death(self) -> None:
        """Raise the death of a worker that no epoch has raised.

        Torch's handler of SIGCHLD raises wherever the trainer is, and the code there may swallow the error, as
        Lightning's broadcast of SIGTERM does.

        Raises:
            RuntimeError: a worker was killed.
        """
        killed = [worker for worker in self._ended if worker.exitcode not in _BY_CTRL_C]
        if killed and not self._has_raised_death:
            self._has_raised_death = True
            names = "; ".join(f"pid {worker.pid}, exit code {worker.exitcode}" for worker in killed)
            raise RuntimeError(f"DataLoader worker ({names}) exited unexpectedly")

    @property
    def are_alive(self) -> bool:
        """Whether all workers run, as children of this process."""
        return self._are_children and not self._ended

    @property
    def _are_children(self) -> bool:
        return self._finalizer is not None and self._finalizer.alive and self._pid == os.getpid()

    @property
    def _ended(self) -> list[Any]:
        if not self._are_children:
            return []
        return [worker for worker in processes_of(self._iterator) if not worker.is_alive()]

    def end_lease(self, number: int) -> None:
        """Have the slot of a request back whose reply will not come."""
        if self.arena is not None:
            self.arena.end_lease(number)

    def trim(self, *, keeps_median: bool) -> None:
        """After an epoch, give back the memory of batches that nobody holds.

        Args:
            keeps_median: keep what the next epoch needs. Fresh memory would cost 0.7 ms of CPU time per MB: 1.7 times
                an epoch of 16 batches of 38 MB.
        """
        if self.arena is not None and self._pid == os.getpid():
            self.arena.trim(self.arena.most_bytes if keeps_median else 0)

    def close(self) -> None:
        """End the workers, and wait for them."""
        if self._pid != os.getpid():
            return
        if self._finalizer is not None:
            self._finalizer()
        if self.arena is not None:
            self.arena.end_leases()
            self.arena.trim()


def _end(iterator: Any) -> None:
    """End workers. Left to the garbage collector, DataLoader waits 5 s for each: it may lose their queues first."""
    with held_back():
        shut_down(iterator)


def loader_like(loader: DataLoader[Any], generator: torch.Generator | None, **replaced: Any) -> DataLoader[Any]:
    """A DataLoader with the attributes of a loader, some of them replaced. It has no iterator.

    A copy takes the place of a given generator, which must not be drawn from. None: the loader's is drawn from.
    """
    other: DataLoader[Any] = object.__new__(DataLoader)
    state: Any = loader.__getstate__()
    if generator is not None:
        replaced["generator"] = torch.Generator().set_state(generator.get_state())
    vars(other).update({**state, **replaced, "_iterator": None})  # past __setattr__, which refuses
    return other


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
        ours = isinstance(info.dataset, Requested)
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
    def around(cls, function: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """Wrap the function of a loader, once; None stays None."""
        return function if function is None or isinstance(function, cls) else cls(function)
