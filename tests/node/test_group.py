"""Ranks that can map the same memory are one node; what fails on one rank fails on all of them, and none waits."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.node import group as group_module
from lightning_stocache.node.group import NodeGroup, memory_key
from tests.logs import Log
from tests.processes import call
from tests.ranks import run_ranks


def test_without_a_process_group_there_is_one_rank_on_one_node() -> None:
    """A plain script is its own node's leader, and every collective call is a plain call."""
    group = NodeGroup.discover()
    assert (group.rank, group.nodes, group.world, group.is_leader, group.shares) == (0, ((0,),), 1, True, (1.0,))
    assert group.exchange("value") == ["value"]
    lock = threading.Lock()  # cannot be pickled, and need not be
    assert group.together(lambda: lock) is lock
    assert group.lead(lambda: lock) is lock
    with pytest.raises(KeyError, match="mine"):
        group.lead(lambda: {}["mine"])


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_every_rank_is_on_one_node_that_its_first_rank_leads(sizes: list[int], data: st.DataObject) -> None:
    """The shares of the nodes are their ranks over all ranks, and each node has one leader."""
    ranks = data.draw(st.permutations(range(sum(sizes))))
    nodes = tuple(sorted(tuple(sorted(ranks[sum(sizes[:n]) : sum(sizes[: n + 1])])) for n in range(len(sizes))))
    groups = [NodeGroup(rank, nodes) for rank in range(sum(sizes))]
    assert {group.world for group in groups} == {sum(sizes)}
    assert all(group.rank in nodes[group.node] and group.leader == nodes[group.node][0] for group in groups)
    assert sorted(group.rank for group in groups if group.is_leader) == sorted(ranks[0] for ranks in nodes)
    assert sum(groups[0].shares) == pytest.approx(1)


def test_a_rank_on_no_node_is_refused() -> None:
    """A rank must be on one of the nodes."""
    with pytest.raises(ValueError, match=r"rank must be on one of the nodes .* got rank=2"):
        NodeGroup(2, ((0, 1),))


@pytest.mark.processes
def test_processes_of_one_machine_have_one_memory_key() -> None:
    """What decides who shares memory is the same in every process that can map the same files."""
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
    return groups[0].nodes, groups[0] == groups[1], warnings.lines, groups[0].exchange(rank)


@pytest.mark.processes
def test_a_rank_that_cannot_share_is_a_node_of_its_own() -> None:
    """It gets a cache of its own; rank 0 says once what that costs, and what to do."""
    seen = run_ranks(apart, 4)
    assert {nodes for nodes, *_ in seen} == {((0, 2), (1,), (3,))}
    assert all(same and exchanged == [0, 1, 2, 3] for _, same, _, exchanged in seen)
    assert [len(lines) for _, _, lines, _ in seen] == [1, 0, 0, 0]
    [line] = seen[0][2]
    assert line.startswith("ranks 0, 1, 2, 3 run on one machine and do not share memory")
    assert "Each of [0, 2] and [1] and [3] has a cache of its own, which takes 3 times the memory" in line
    assert "--ipc=host --pid=host" in line


def rejoin(rank: int, folder: str) -> list[list[int]]:
    seen = [NodeGroup.discover().exchange(rank)]
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    return [*seen, NodeGroup.discover().exchange(rank)]


@pytest.mark.processes
def test_a_second_process_group_is_not_the_first(tmp_path: Any) -> None:
    """After the process group was destroyed and made anew, ranks talk over a new private group."""
    assert run_ranks(rejoin, 2, os.fspath(tmp_path)) == [[[0, 1], [0, 1]]] * 2


def test_a_group_travels() -> None:
    """A group is plain values: it can be sent to a worker."""
    group = NodeGroup(1, ((0, 1), (2,)))
    assert pickle.loads(pickle.dumps(group)) == group
