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


def life_of_a_rank(rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    group = NodeGroup.discover()
    seen["one node"] = group.nodes
    seen["exchange"] = group.exchange(f"of {rank}")
    seen["lead"] = group.lead(lambda: f"made by {rank}")
    lock = threading.Lock()  # stays where it was made
    seen["together"] = group.together(lambda: lock) is lock

    def failing() -> None:
        if rank == 1:
            raise ValueError("no luck here")

    try:
        group.together(failing)
    except (ValueError, RuntimeError) as error:
        seen["failed together"] = repr(error)
    try:
        group.lead(threading.Lock)
    except (TypeError, RuntimeError) as error:
        seen["not to be sent"] = repr(error)

    apart = NodeGroup.discover(key="left" if rank in (0, 2) else "right")
    seen["two nodes"] = apart.nodes, apart.node, apart.is_leader
    seen["lead apart"] = apart.lead(lambda: f"made by {rank}")
    seen["still in step"] = group.exchange(rank)
    dist.barrier()
    return seen


@pytest.mark.processes
def test_four_ranks_agree() -> None:
    """Values reach every rank, a node's leader serves its node, errors are everybody's and name the rank."""
    lives = run_ranks(life_of_a_rank, 4)
    for rank, seen in enumerate(lives):
        assert seen["one node"] == ((0, 1, 2, 3),)
        assert seen["exchange"] == ["of 0", "of 1", "of 2", "of 3"]
        assert seen["lead"] == "made by 0"
        assert seen["together"]
        own = "ValueError('no luck here')"
        assert seen["failed together"] == (
            own if rank == 1 else f'RuntimeError("setting up the cache failed on rank 1: {own}")'
        )
        assert "cannot pickle" in seen["not to be sent"]
        assert rank == 0 or "on rank 0" in seen["not to be sent"]
        assert seen["two nodes"] == (((0, 2), (1, 3)), rank % 2, rank < 2)
        assert seen["lead apart"] == f"made by {rank % 2}"
        assert seen["still in step"] == [0, 1, 2, 3]


def apart(rank: int) -> tuple[Any, ...]:
    """Ranks 1 and 3 have a /dev/shm of their own."""
    group_module.memory_key = lambda: ("machine", rank if rank in (1, 3) else 0, 0)
    warnings = Log()
    groups = [NodeGroup.discover() for _ in range(2)]
    dist.barrier()
    return groups[0].nodes, groups[0] == groups[1], groups[0].exchange(rank), len(warnings.lines)


@pytest.mark.processes
def test_a_rank_that_cannot_share_is_a_node_of_its_own() -> None:
    """Such a rank has its own cache, and still agrees with all ranks. Rank 0 warns once."""
    same = ((0, 2), (1,), (3,)), True, [0, 1, 2, 3]
    assert run_ranks(apart, 4) == [(*same, 1), (*same, 0), (*same, 0), (*same, 0)]


def rejoin(rank: int, folder: str) -> list[list[int]]:
    seen = [NodeGroup.discover().exchange(rank)]
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    return [*seen, NodeGroup.discover().exchange(rank)]


@pytest.mark.processes
def test_a_second_process_group_is_not_the_first(tmp_path: Any) -> None:
    """After the process group was destroyed and made anew, ranks talk over a new private group."""
    assert run_ranks(rejoin, 2, os.fspath(tmp_path)) == [[[0, 1], [0, 1]]] * 2
