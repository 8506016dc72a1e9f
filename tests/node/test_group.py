"""Ranks that can map the same memory are one node; what fails on one rank fails on all of them, and none waits."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.node.group import NodeGroup, memory_key
from lightning_stocache.node.segment import Segment, SegmentHandle
from tests.logs import Log
from tests.proc import unused_names
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


class Apart:
    """Ranks that cannot open what another rank makes: nothing without a name, or nothing at all."""

    def __init__(self, blind: tuple[int, ...], named_too: bool) -> None:
        self.blind, self.named_too = blind, named_too

    def __call__(self, rank: int) -> tuple[Any, ...]:
        attach, tried = Segment.attach, list[str]()

        def look(handle: SegmentHandle) -> Segment:
            tried.append(handle.data)
            if rank in self.blind and (self.named_too or handle.data.startswith("/proc/")):
                raise PermissionError(errno.EACCES, "Permission denied", handle.data)
            return attach(handle)

        Segment.attach = look  # type: ignore[method-assign,assignment]
        warnings = Log()
        try:
            groups = [NodeGroup.discover() for _ in range(2)]
        finally:
            Segment.attach = attach  # type: ignore[method-assign]
        dist.barrier()
        return groups[0].nodes, groups[0] == groups[1], len(tried), warnings.lines, groups[0].exchange(rank)


@pytest.mark.processes
def test_a_rank_that_reaches_memory_by_name_only_is_on_the_node() -> None:
    """Without a common space of process ids, ranks meet by name; nobody is warned, and it is looked into once."""
    seen = run_ranks(Apart((1,), named_too=False), 3)
    assert [one[:4] for one in seen] == [(((0, 1, 2),), True, tries, []) for tries in (0, 2, 1)]


@pytest.mark.named
@pytest.mark.processes
def test_a_rank_that_cannot_share_is_a_node_of_its_own() -> None:
    """It gets a cache of its own; rank 0 says once why, what that costs, and what to do."""
    before = unused_names()
    seen = run_ranks(Apart((1, 3), named_too=True), 4)
    assert {one[0] for one in seen} == {((0, 2), (1,), (3,))}
    assert all(one[1] and one[4] == [0, 1, 2, 3] for one in seen)
    assert [len(one[3]) for one in seen] == [1, 0, 0, 0]
    [line] = seen[0][3]
    assert line.startswith("ranks 0, 1, 2, 3 run on one machine and do not share memory ([Errno 13] Permission denied")
    assert "Each of [0, 2] and [1] and [3] has a cache of its own, which takes 3 times the memory" in line
    assert "--ipc=host --pid=host" in line
    assert unused_names() <= before


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
