"""Ranks that can map the same memory are one node. What fails on one rank fails on all of them.

What is posted reaches every rank, and nobody waits longer than it said.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch.distributed as dist

from lightning_stocache.node import group as group_module
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.post import Mailbox
from tests.jobs import Log
from tests.processes import run_ranks


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
    with pytest.raises(ValueError, match=r"rank must be on one of the nodes .* got rank=2"):
        NodeGroup(2, ((0, 1),))


class Empty(Exception):
    """A list of errors, here of none, and so false."""

    def __len__(self) -> int:
        return 0


class Mute(Exception):
    """An error that cannot be put in words."""

    def __repr__(self) -> str:
        raise ArithmeticError


class Nameless(Exception):
    """An error without words."""

    def __repr__(self) -> str:
        return ""


def fail(error: Exception | None) -> None:
    if error is not None:
        raise error


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
    for kind in (Empty, Mute, Nameless):
        with pytest.raises((kind, RuntimeError)) as failed:
            group.together(partial(fail, kind() if rank == 2 else None))
        assert type(failed.value) is (kind if rank == 2 else RuntimeError)
        assert rank == 2 or f"on rank 2: {kind.__name__}" in str(failed.value)
    with pytest.raises((TypeError, RuntimeError), match="cannot pickle") as refused:
        group.lead(threading.Lock)
    assert rank == 0 or "on rank 0" in str(refused.value)

    apart = NodeGroup.discover(key="left" if rank in (0, 2) else "right")
    assert (apart.nodes, apart.node, apart.is_leader) == (((0, 2), (1, 3)), rank % 2, rank < 2)
    assert apart.lead(lambda: f"made by {rank}") == f"made by {rank % 2}"
    assert group.exchange(rank) == [0, 1, 2, 3]  # still in step
    dist.barrier()
    if rank != 1:
        assert group.post("to nobody").collect(1000) is None
        with pytest.raises(RuntimeError, match=r"^rank 1 has ended$"):
            group.exchange(rank)


@pytest.mark.processes
def test_four_ranks_agree() -> None:
    """Values and errors reach every rank, and a rank that has ended ends every wait, with an error that names it."""
    run_ranks(of_four, 4)


def of_three(rank: int) -> None:
    group_module.memory_key = lambda: ("machine", int(rank == 1), 0)  # rank 1 has a /dev/shm of its own
    warnings = Log()
    group = NodeGroup.discover()
    assert group == NodeGroup.discover()
    assert group.nodes == ((0, 2), (1,))
    assert len(warnings.lines) == (rank == 0)
    early = group.post(f"early from {rank}")
    if rank == 0:
        dist.barrier()  # a collective that the other ranks join only later, as a progress bar is
    assert early.collect(1000) == ["early from 0", "early from 1", "early from 2"]
    if rank == 0:
        lonely = group.post("of 0")
        assert lonely.collect(0.05) is None
    else:
        dist.barrier()
    dist.barrier()  # only now do the others post
    late = lonely if rank == 0 else group.post(f"of {rank}")
    assert late.collect(1000) == ["of 0", "of 1", "of 2"]
    dist.barrier()

    if rank == 0:
        with pytest.raises(ValueError, match="2048 bytes"):
            group.post("x" * 2048)
    uneven = [group.post(rank) for _ in range((1, 0, 3)[rank])]
    assert group.exchange(rank) == [0, 1, 2]
    assert group.post(10 * rank).collect(1000) == [0, 10, 20]
    assert [post.collect(1000) for post in uneven] == [None] * len(uneven)
    dist.barrier()


@pytest.mark.processes
def test_messages_pass_by_other_collectives_and_by_other_turns() -> None:
    """No rank waits for a barrier of others or gets a value of another turn, and a message that is late can be had
    later. A rank that shares no memory is a node of its own, and rank 0 warns once."""
    run_ranks(of_three, 3)


def test_a_group_reads_nothing_of_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store outlives groups of any size that are made anew or restarted, and does not grow with the epochs."""
    store = dist.HashStore()
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        for number, world in enumerate((3, 2, 2, 3)):
            sizes, mailboxes = list[int](), [Mailbox(store, rank, world) for rank in range(world)]
            with ThreadPoolExecutor(world) as threads:
                for turn in range(12):
                    value = (attempt, number, turn)
                    exchanged = threads.map(lambda mailbox, sent=value: mailbox.exchange(sent), mailboxes)
                    assert list(exchanged) == [[value] * world] * world
                    posted = threads.map(lambda mailbox: mailbox.post(2).collect(100), mailboxes)
                    assert list(posted) == [[2] * world] * world
                    sizes.append(int(store.num_keys()))
            assert sizes[-1] == sizes[-3]
        Mailbox(store, rank=0, world=3)
