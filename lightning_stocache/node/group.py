"""Which ranks share memory, and how they agree.

A node is the set of ranks that can map the same memory: same boot id, same memory filesystem, same user. NODE_RANK does
not matter: two containers with a /dev/shm each are two nodes. Whether a rank can really open the files of its node's
leader shows when it attaches (`setup.segments`).

Set-up is collective: every rank of the job makes the same calls in the same order. `together` and `lead` end with the
same outcome on all ranks, so no rank waits for a rank that has failed. During training, values are posted. Messages go
through the job's store (`post`), not through its process groups. Without a process group the job is one rank on one
node, and sends nothing.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_stocache.node.errors import description
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.post import Mailbox, Post, boot_id
from lightning_stocache.torch_internals import job_store

__all__ = ["NodeGroup", "job_ranks", "memory_key"]

log = logging.getLogger(__name__)

T = TypeVar("T")

# For each default process group: its mailbox, and its nodes once they are known. Both end with the group.
_mailboxes: weakref.WeakKeyDictionary[dist.ProcessGroup, Mailbox] = weakref.WeakKeyDictionary()
_nodes: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[tuple[int, ...], ...]] = weakref.WeakKeyDictionary()


def memory_key() -> tuple[str, int, int]:
    """The machine, the memory filesystem and the user of this process: equal in processes that share files there."""
    return boot_id() or socket.gethostname(), os.stat(memory_directory()).st_dev, getattr(os, "getuid", int)()


def job_ranks() -> tuple[int, int]:
    """The number of ranks of the job, and this rank. Before there is a process group, torchrun's variables tell."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


@dataclass(frozen=True)
class NodeGroup:
    """The ranks of a job, grouped by shared memory.

    Args:
        rank: global rank of this process.
        nodes: global ranks of each node, rising; nodes by their first rank.

    Raises:
        ValueError: no node has `rank`.

    Example:
        >>> group = NodeGroup(rank=2, nodes=((0, 1), (2, 3)))
        >>> group.node, group.leader, group.is_leader, group.shares
        (1, 2, True, (0.5, 0.5))
    """

    rank: int = 0
    nodes: tuple[tuple[int, ...], ...] = ((0,),)

    def __post_init__(self) -> None:
        if not any(self.rank in node for node in self.nodes):
            raise ValueError(f"rank must be on one of the nodes {self.nodes}, got rank={self.rank}")

    @classmethod
    def discover(cls, key: Hashable | None = None) -> NodeGroup:
        """Group the ranks of the running job. Collective. Without a process group, the job is one rank.

        Args:
            key: ranks with the same key share memory; for tests, which play several nodes on one machine.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        world = dist.group.WORLD
        assert world is not None
        if key is None and world in _nodes:
            return cls(dist.get_rank(), _nodes[world])
        keys: list[Any] = _mailbox().exchange(memory_key() if key is None else key)
        members: dict[Hashable, list[int]] = {}
        for rank, memory in enumerate(keys):
            members.setdefault(memory, []).append(rank)
        nodes = tuple(map(tuple, members.values()))
        if key is None:
            _nodes[world] = nodes
            if dist.get_rank() == 0 and len({machine for machine, _, _ in keys}) < len(nodes):
                log.warning(
                    "ranks of one machine do not share memory: they have %d caches, each with a budget of its own. "
                    "Give them one user, one /dev/shm and one space of process ids (Docker: --ipc=host --pid=host; "
                    "Kubernetes: one pod)",
                    len(nodes),
                )
        return cls(dist.get_rank(), nodes)

    @property
    def world(self) -> int:
        """Number of ranks in the job."""
        return sum(len(node) for node in self.nodes)

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return next(number for number, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.nodes[self.node]

    @property
    def local_rank(self) -> int:
        """Number of this rank on its node."""
        return self.members.index(self.rank)

    @property
    def leader(self) -> int:
        """The rank that makes the segments of this node: its first rank."""
        return self.members[0]

    @property
    def is_leader(self) -> bool:
        """Whether this rank leads its node."""
        return self.rank == self.leader

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of every global batch that each node trains on: its ranks over all ranks."""
        return tuple(len(node) / self.world for node in self.nodes)

    def exchange(self, value: T) -> list[T]:
        """Collect the values of all ranks, by rank. Collective."""
        return [value] if self.world == 1 else _mailbox().exchange(value)

    def post(self, value: T) -> Post[T]:
        """Send a value of at most 2 KiB to every rank, without waiting.

        Every rank makes the same posts in the same order. If a rank has not made a post before the next collective
        call, `collect` returns None for it on all other ranks.
        """
        return Post(None, "", [value]) if self.world == 1 else _mailbox().post(value)

    def together(self, work: Callable[[], T]) -> T:
        """Call `work` on every rank. If it fails on one rank, it fails on all ranks. Collective.

        Raises:
            Exception: the error of `work`, on the rank that failed.
            RuntimeError: on the other ranks; the message names that rank and its error.
        """
        results: list[T] = []
        self._agree(lambda: results.append(work()))
        return results[0]

    def lead(self, work: Callable[[], T]) -> T:
        """Call `work` on the leader of each node. Returns its result on all ranks of the node. Collective.

        Raises the errors of `together`, also for a result that cannot be pickled.
        """
        results: list[T] = []

        def work_and_pickle() -> bytes:
            results.append(work())
            return pickle.dumps(results[0]) if self.world > 1 else b""

        sent = self._agree(work_and_pickle if self.is_leader else None)
        outcome: T = results[0] if self.is_leader else pickle.loads(sent[self.leader])
        return outcome

    def _agree(self, work: Callable[[], Any] | None) -> list[Any]:
        """Collect plain results of `work` from all ranks, so that pickling cannot fail while other ranks wait."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = work() if work is not None else None
        except Exception as error:  # the other ranks must hear of it before it is raised
            failure = error
        outcomes = self.exchange((None if failure is None else description(failure), result))
        if failure is not None:
            raise failure
        for rank, (message, _) in enumerate(outcomes):
            if message is not None:
                raise RuntimeError(f"setting up the cache failed on rank {rank}: {message}")
        return [value for _, value in outcomes]


def _mailbox() -> Mailbox:
    """This rank's mailbox in the running job. The first call in a job makes it, and is collective."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _mailboxes:
        if dist.get_backend(world) == "gloo":
            # Once, here, a broken connection shows that a rank has died. (NCCL does not notice.)
            dist.barrier()
        _mailboxes[world] = Mailbox(job_store() or _new_store(), dist.get_rank(), dist.get_world_size())
    return _mailboxes[world]


def _new_store() -> Any:
    """Make a store for a job without one (MPI). Collective."""
    stores: Any = dist  # torch's types do not export its stores
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    server = stores.TCPStore(host, 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    address = [(host, server.port) if server else None]
    dist.broadcast_object_list(address, src=0)
    return server or stores.TCPStore(*address[0], is_master=False)  # type: ignore[misc]
