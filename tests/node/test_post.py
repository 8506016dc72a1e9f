"""What is posted reaches every rank, and nobody waits longer than it said."""

import time
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


def cross(rank: int) -> list[list[str] | None]:
    group = NodeGroup.discover()
    seen = [group.post(f"from {rank}").collect(1000)]
    if rank == 0:  # in a collective that the other rank joins only later, as a progress bar is
        early = group.post("early from 0")
        dist.barrier()
    else:
        early = group.post("early from 1")
        seen.append(early.collect(1000))
        dist.barrier()
    if rank == 0:
        seen.append(early.collect(1000))
        lonely = group.post("of 0")
        seen.append(lonely.collect(0.05))
        dist.barrier()
        seen.append(lonely.collect(1000))
    else:
        dist.barrier()  # only now does rank 1 post
        seen += [None, group.post("of 1").collect(1000)]
    dist.barrier()
    return seen


@pytest.mark.processes
def test_messages_pass_by_other_collectives() -> None:
    """A rank in somebody else's barrier keeps nobody from its message; a message that does not come ends the wait, and
    is there when it has come."""
    everything = [["from 0", "from 1"], ["early from 0", "early from 1"], None, ["of 0", "of 1"]]
    assert run_ranks(cross, 2) == [everything, everything]


def dying(rank: int) -> list[str] | None:
    group = NodeGroup.discover()
    if rank == 1:
        return None
    time.sleep(0.2)
    return group.post("to nobody").collect(1000)


@pytest.mark.processes
def test_a_rank_that_has_ended_ends_the_wait() -> None:
    """The message of an ended rank does not come. That is no error, and ends the wait at once."""
    assert run_ranks(dying, 2) == [None, None]


def uneven(rank: int) -> tuple[list[list[int] | None], list[list[int] | None]]:
    """What comes of posts of which rank 0 makes one, beside one that is refused, rank 1 none and rank 2 three; and of
    one that all make after the next agreement."""
    group = NodeGroup.discover()
    if rank == 0:
        with pytest.raises(ValueError, match="2048 bytes"):
            group.post("x" * 2048)
    lonely = [group.post(rank) for _ in range((1, 0, 3)[rank])]
    assert group.exchange(rank) == [0, 1, 2]
    after = group.post(10 * rank)
    return [post.collect(1000) for post in lonely], [after.collect(1000)]


@pytest.mark.processes
def test_posts_that_some_ranks_leave_out_are_nothing_to_the_others() -> None:
    """No rank gets a value of another turn. After the next exchange all ranks are in step again."""
    assert run_ranks(uneven, 3) == [([None] * count, [[0, 10, 20]]) for count in (1, 0, 3)]


def unwanted(rank: int) -> None:
    group = NodeGroup.discover()
    collected = group.post("of all")
    assert collected.collect(1000) == ["of all"] * 2
    if rank == 0:
        group.post("of rank 0")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `run_ranks` ends it
    assert collected.collect(1000) == ["of all"] * 2


@pytest.mark.processes
def test_a_post_that_nobody_answers_ends_with_its_group() -> None:
    """A new process group ends posts without an answer, even if a rank still has an earlier post."""
    run_ranks(unwanted, 2)


def leave(rank: int) -> str | list[int]:
    group = NodeGroup.discover()
    try:
        return "left" if rank == 1 else group.exchange(rank)
    except RuntimeError as error:
        return str(error)


@pytest.mark.processes
def test_a_rank_that_has_ended_ends_an_exchange_on_all_others() -> None:
    """All other ranks name the ended rank, even if a second rank has ended because of it."""
    assert run_ranks(leave, 4) == ["rank 1 has ended", "left", *["rank 1 has ended"] * 2]


def without_a_store(rank: int) -> tuple[list[int], list[int] | None]:
    group_module.job_store = lambda: None
    group = NodeGroup.discover()
    seen = group.exchange(rank), group.post(rank).collect(1000)
    dist.barrier()  # rank 0 has the store
    return seen


@pytest.mark.processes
def test_a_job_without_a_store_gets_one() -> None:
    """A job without a store, as under MPI, makes one."""
    assert run_ranks(without_a_store, 3) == [([0, 1, 2], [0, 1, 2])] * 3


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
