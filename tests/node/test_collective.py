"""What a gathering has used is freed by the thread that asked for it."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
import torch.distributed as dist

from lightning_stocache.node import collective
from lightning_stocache.node.collective import all_gather
from tests.ranks import run_ranks


def gathered(rank: int) -> tuple[bool, set[int]]:
    """Whether all messages have come, and the threads in which tensors were freed; 0 is this one."""
    world, here = dist.group.WORLD, threading.get_ident()
    assert world is not None
    freed, came = set[int](), True
    for number in range(300):
        message = torch.tensor([rank, number])
        messages, work = all_gather(message, world)
        for tensor in (message, *messages):
            weakref.finalize(tensor, lambda: freed.add(threading.get_ident() - here))
        work.wait()
        came &= [tensor.tolist() for tensor in messages] == [[0, number], [1, number]]
        del message, messages, tensor, work
    return came, freed


@pytest.mark.processes
def test_threads_of_gloo_free_no_tensor() -> None:
    """They would take Python's lock for it, beside whatever is forked next."""
    assert run_ranks(gathered, 2) == [(True, {0}), (True, {0})]


def released(rank: int) -> list[list[int]]:
    """The works that are gone after each of three gatherings, and after the end of their group."""
    world, gone, after = dist.group.WORLD, list[int](), list[list[int]]()
    assert world is not None
    for number, seconds in enumerate((1000.0, 1000.0, 0.0)):
        collective.KEPT_SECONDS = seconds
        work = all_gather(torch.zeros(1), world)[1]
        weakref.finalize(work, gone.append, number)
        work.wait()
        del work
        after.append(sorted(gone))
    del world
    dist.destroy_process_group()
    after.append(sorted(gone))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `run_ranks` ends it
    return after


@pytest.mark.processes
def test_works_are_kept_for_a_while() -> None:
    """Those that have ended long ago are let go of at the next gathering, all of them with their group."""
    assert run_ranks(released, 2) == [[[], [], [0, 1], [0, 1, 2]]] * 2
