"""What is posted reaches every rank, and nobody waits longer than it said."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from lightning_stocache.node import group as group_module
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.post import Mailbox
from tests.ranks import run_ranks

T = TypeVar("T")


def cross(rank: int) -> None:
    group = NodeGroup.discover()
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


def uneven(rank: int) -> None:
    """Rank 0 makes one post, beside one that is refused, rank 1 none and rank 2 three."""
    group = NodeGroup.discover()
    if rank == 0:
        with pytest.raises(ValueError, match="2048 bytes"):
            group.post("x" * 2048)
    lonely = [group.post(rank) for _ in range((1, 0, 3)[rank])]
    assert group.exchange(rank) == [0, 1, 2]
    assert group.post(10 * rank).collect(1000) == [0, 10, 20]
    assert [post.collect(1000) for post in lonely] == [None] * len(lonely)
    dist.barrier()


def cross_and_uneven(rank: int) -> None:
    cross(rank)
    uneven(rank)


@pytest.mark.processes
def test_messages_pass_by_other_collectives_and_by_other_turns() -> None:
    """A rank in somebody else's barrier keeps nobody from its message; a message that does not come ends the wait, and
    is there when it has come. No rank gets a value of another turn: where some ranks leave posts out, all are in step
    again after the next exchange."""
    run_ranks(cross_and_uneven, 3)


def without_a_store(rank: int) -> None:
    group_module.job_store = lambda: None
    group = NodeGroup.discover()
    assert group.exchange(rank) == group.post(rank).collect(1000) == [0, 1]
    dist.barrier()  # rank 0 has the store


@pytest.mark.processes
def test_a_job_without_a_store_gets_one() -> None:
    """A job without a store, as under MPI, makes one."""
    run_ranks(without_a_store, 2)


def leave(rank: int) -> None:
    group = NodeGroup.discover()
    if rank == 1:
        return
    assert group.post("to nobody").collect(1000) is None
    with pytest.raises(RuntimeError, match=r"^rank 1 has ended$"):
        group.exchange(rank)


@pytest.mark.processes
def test_a_rank_that_has_ended_ends_the_wait() -> None:
    """Its message does not come, which is no error. An exchange is: all other ranks name the ended rank, even if a
    second rank has ended because of it."""
    run_ranks(leave, 4)


def on_all(store: Any, world: int, work: Callable[[Mailbox], T]) -> list[T]:
    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(work, [Mailbox(store, rank, world) for rank in range(world)]))


def test_a_group_reads_nothing_of_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may outlive its group: a script can make its group anew, with any number of ranks, and torchrun starts
    processes again, also where some of them had not joined yet."""
    store = dist.HashStore()
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        for number, world in enumerate((3, 2, 2, 3)):
            value = (attempt, number)
            seen = on_all(store, world, lambda mailbox: mailbox.exchange((value, mailbox.rank)))  # noqa: B023
            assert seen == [[(value, rank) for rank in range(world)]] * world
        Mailbox(store, rank=0, world=3)


def test_messages_are_deleted() -> None:
    """The store of a job does not grow with its epochs."""
    store = dist.HashStore()
    mailboxes = [Mailbox(store, rank, 2) for rank in range(2)]

    def epoch(_: int) -> int:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda mailbox: mailbox.exchange(1), mailboxes))
            assert list(threads.map(lambda mailbox: mailbox.post(2).collect(100), mailboxes)) == [[2, 2]] * 2
        return int(store.num_keys())

    sizes = [epoch(number) for number in range(20)]
    assert sizes[-1] == sizes[10]
