"""What a gathering has used is freed by the thread that asked for it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_stocache.node import collective
from lightning_stocache.node.collective import Gathering
from tests.ranks import run_ranks


def gathered(rank: int, kept_seconds: float, late: float, rounds: int) -> tuple[bool, set[bool]]:
    """Whether all messages have come, and whether the tensors were freed by this thread."""
    world, here = dist.group.WORLD, threading.get_ident()
    assert world is not None
    collective.KEPT_SECONDS = kept_seconds
    by_this_thread, came, plain = set[bool](), True, dist.all_gather

    def watched(messages: list[torch.Tensor], message: torch.Tensor, **options: Any) -> Any:
        for tensor in (*messages, message):
            weakref.finalize(tensor, lambda: by_this_thread.add(threading.get_ident() == here))
        return plain(messages, message, **options)

    dist.all_gather = watched
    for number in range(rounds):
        time.sleep(late * rank)
        contents = Gathering(bytes([rank, number % 256]), world).wait()
        came &= contents == [bytes([sender, number % 256]) for sender in (0, 1)]
    dist.all_gather = plain
    del world
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `run_ranks` ends it
    return came, by_this_thread


@pytest.mark.processes
@pytest.mark.parametrize(("kept_seconds", "late", "rounds"), [(1000.0, 0.0, 300), (0.02, 0.03, 80)])
def test_threads_of_gloo_free_no_tensor(kept_seconds: float, late: float, rounds: int) -> None:
    """They would take Python's lock for it, beside whatever is forked next. A work that others were long awaited in is
    kept from its end on."""
    assert run_ranks(gathered, 2, kept_seconds, late, rounds) == [(True, {True})] * 2


@contextlib.contextmanager
def works() -> Iterator[list[int]]:
    """The numbers of the works that begin from now on and are gone."""
    gone, number, plain = list[int](), itertools.count(), dist.all_gather

    def watched(*args: Any, **options: Any) -> Any:
        work = plain(*args, **options)
        weakref.finalize(work, gone.append, next(number))
        return work

    dist.all_gather = watched
    try:
        yield gone
    finally:
        dist.all_gather = plain


def released(rank: int) -> list[list[int]]:
    """The works that are gone after each of five gatherings, and after the end of their group."""
    world, after = dist.group.WORLD, list[list[int]]()
    assert world is not None
    with works() as gone:
        for seconds in (collective.KEPT_SECONDS, collective.KEPT_SECONDS, 0.0, 0.0, 0.0):
            collective.KEPT_SECONDS = seconds
            Gathering(b"?", world).wait()
            after.append(sorted(gone))
    del world
    dist.destroy_process_group()
    after.append(sorted(gone))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `run_ranks` ends it
    return after


@pytest.mark.processes
def test_works_are_kept_for_a_while() -> None:
    """Those that have ended long ago are let go of at a later gathering, all of them with their group."""
    assert run_ranks(released, 2) == [[[], [], [], [0, 1], [0, 1, 2], [0, 1, 2, 3, 4]]] * 2


def unanswered(rank: int) -> list[int]:
    """The works that are gone while rank 1 has not begun them."""
    world, turns, early = dist.group.WORLD, dist.new_group(), list[int]()
    assert world is not None
    collective.KEPT_SECONDS = 0.0
    if rank == 1:
        dist.barrier(turns)
    with works() as gone:
        gatherings = [weakref.ref(Gathering(b"?", world)) for _ in range(5)]
        assert not any(gathering() for gathering in gatherings)
        if rank == 0:
            early = list(gone)
            dist.barrier(turns)
    Gathering(b"?", world).wait()
    return early


@pytest.mark.processes
def test_works_that_nobody_waits_for_are_kept_until_they_have_ended() -> None:
    assert run_ranks(unanswered, 2) == [[], []]


def memory(rank: int) -> int:
    """KiB of anonymous memory that ten gatherings of 10 MiB leave, less what the allocator keeps for the next ones."""
    world = dist.group.WORLD
    assert world is not None
    before = anonymous()
    for _ in range(10):
        Gathering(bytes(10 << 20), world).wait()
    return anonymous() - before


def anonymous() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))


@pytest.mark.processes
def test_messages_take_no_memory_once_they_have_come() -> None:
    """What is kept are the tensors without their bytes. (All of it would be 300 MiB.)"""
    assert max(run_ranks(memory, 2)) < 64 << 10


def waited_twice(rank: int) -> list[bytes]:
    """What a gathering gives, twice, whose first wait was too short on rank 0."""
    world, turns = dist.group.WORLD, dist.new_group()
    assert world is not None
    if rank == 1:
        dist.barrier(turns)
    with torch.device("meta"):  # the user's default
        gathering = Gathering(b"%d" % rank, world)
    if rank == 0:
        with pytest.raises(RuntimeError):
            gathering.wait(timedelta(seconds=0.05))
        dist.barrier(turns)
    first = gathering.wait(timedelta(seconds=200))
    return first + gathering.wait()


@pytest.mark.processes
def test_messages_can_be_awaited_again() -> None:
    assert run_ranks(waited_twice, 2) == [[b"0", b"1"] * 2] * 2
