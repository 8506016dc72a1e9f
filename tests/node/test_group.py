"""Ranks that can map the same memory are one node; what fails on one rank fails on all of them, and none waits."""

import os
import threading
from typing import Any

import pytest
import torch.distributed as dist

from lightning_stocache.node import group as group_module
from lightning_stocache.node.group import NodeGroup, memory_key
from tests.logs import Log
from tests.processes import call
from tests.ranks import run_ranks


def test_without_a_process_group_there_is_one_rank_on_one_node() -> None:
    """A plain script is its own node's leader, and every collective call is a plain call."""
    group = NodeGroup.discover()
    assert (group.rank, group.nodes, group.world, group.is_leader, group.shares) == (0, ((0,),), 1, True, (1.0,))
    assert group.exchange("value") == group.post("value").collect(1) == ["value"]
    lock = threading.Lock()  # cannot be pickled, and need not be
    assert group.together(lambda: lock) is lock
    assert group.lead(lambda: lock) is lock
    with pytest.raises(KeyError, match="mine"):
        group.lead(lambda: {}["mine"])


def test_a_rank_on_no_node_is_refused() -> None:
    """A rank must be on one of the nodes."""
    with pytest.raises(ValueError, match=r"rank must be on one of the nodes .* got rank=2"):
        NodeGroup(2, ((0, 1),))


@pytest.mark.processes
def test_processes_of_one_machine_have_one_memory_key() -> None:
    """The key is equal in all processes that can map the same files."""
    assert call(memory_key, method="forkserver") == memory_key()


def of_four(rank: int) -> None:
    group = NodeGroup.discover()
    assert group.nodes == ((0, 1, 2, 3),)
    assert group.exchange(f"of {rank}") == ["of 0", "of 1", "of 2", "of 3"]
    assert group.lead(lambda: f"made by {rank}") == "made by 0"
    lock = threading.Lock()  # stays where it was made
    assert group.together(lambda: lock) is lock

    def failing() -> None:
        if rank == 1:
            raise ValueError("no luck here")

    with pytest.raises((ValueError, RuntimeError)) as failed:
        group.together(failing)
    own = "ValueError('no luck here')"
    assert repr(failed.value) == (own if rank == 1 else f'RuntimeError("setting up the cache failed on rank 1: {own}")')
    with pytest.raises((TypeError, RuntimeError), match="cannot pickle") as refused:
        group.lead(threading.Lock)
    assert rank == 0 or "on rank 0" in str(refused.value)

    apart = NodeGroup.discover(key="left" if rank in (0, 2) else "right")
    assert (apart.nodes, apart.node, apart.is_leader) == (((0, 2), (1, 3)), rank % 2, rank < 2)
    assert apart.lead(lambda: f"made by {rank}") == f"made by {rank % 2}"
    assert group.exchange(rank) == [0, 1, 2, 3]  # still in step
    dist.barrier()


def not_all_share(rank: int) -> None:
    """Rank 1 has a /dev/shm of its own."""
    group_module.memory_key = lambda: ("machine", int(rank == 1), 0)
    warnings = Log()
    groups = [NodeGroup.discover() for _ in range(2)]
    dist.barrier()
    assert groups[0] == groups[1]
    assert groups[0].nodes == ((0, 2), (1,))
    assert groups[0].exchange(rank) == [0, 1, 2]
    assert len(warnings.lines) == (rank == 0)


@pytest.mark.processes
def test_four_ranks_agree() -> None:
    """Values reach every rank, a node's leader serves its node, errors are everybody's and name the rank."""
    run_ranks(of_four, 4)


@pytest.mark.processes
def test_a_rank_that_cannot_share_is_a_node_of_its_own() -> None:
    """Such a rank has its own cache, and still agrees with all ranks. Rank 0 warns once."""
    run_ranks(not_all_share, 3)


def rejoin(rank: int, folder: str) -> None:
    group = NodeGroup.discover()
    assert group.exchange(rank) == [0, 1]
    of_all = group.post("of all")
    assert of_all.collect(1000) == ["of all"] * 2
    if rank == 0:
        group.post("of rank 0")
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    assert NodeGroup.discover().exchange(rank) == [0, 1]
    assert of_all.collect(1000) == ["of all"] * 2


@pytest.mark.processes
def test_a_second_process_group_is_not_the_first(tmp_path: Any) -> None:
    """After the process group was destroyed and made anew, ranks talk over a new private group. A post that nobody has
    answered ends with the first one."""
    run_ranks(rejoin, 2, os.fspath(tmp_path))
