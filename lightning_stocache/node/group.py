"""Which ranks share memory, and how they agree.

A node is the set of ranks that can map the same memory: same boot id, same memory filesystem, same user, whatever
NODE_RANK says: two containers with a /dev/shm each are two nodes. Whether a rank can really open what the node's leader
makes is seen when it attaches (`setup.segments`).

Set-up is collective: every rank of the job makes the same calls in the same order, and `together` and `lead` end with
the same outcome on all ranks, so that none waits for a rank that has failed. While training runs, values are posted.
Messages go through the job's store (`post`), not through its process groups. Without a process group the job is one
rank on one node, and nothing is sent.
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

from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.post import Mailbox, Posted, boot_id
from lightning_stocache.torch_internals import job_store

__all__ = ["NodeGroup", "job_ranks", "memory_key"]

log = logging.getLogger(__name__)

T = TypeVar("T")

# What each default process group has: its mailbox, and the nodes once they are found out. Both end with the group.
_mailboxes: weakref.WeakKeyDictionary[dist.ProcessGroup, Mailbox] = weakref.WeakKeyDictionary()
_nodes: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[tuple[int, ...], ...]] = weakref.WeakKeyDictionary()


def memory_key() -> tuple[str, int, int]:
    """The machine, the filesystem of this process's memory, and its user: equal in processes that share files there."""
    return boot_id() or socket.gethostname(), os.stat(memory_directory()).st_dev, getattr(os, "getuid", int)()


def job_ranks() -> tuple[int, int]:
    """The number of ranks of the job, and this rank; from torchrun's variables before there is a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


@dataclass(frozen=True)
class NodeGroup:
    """The ranks of a job, grouped by the memory that they can share.

    Args:
        rank: this process's global rank.
        nodes: the global ranks of each node, in rising order; nodes by their first rank.

    Raises:
        ValueError: `rank` is on none of the nodes.

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
        """Group the ranks of the running job. Collective; without an initialised process group, the group of one.

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
    def leader(self) -> int:
        """The rank that makes this node's segments: the node's first."""
        return self.nodes[self.node][0]

    @property
    def is_leader(self) -> bool:
        """Whether this rank leads its node."""
        return self.rank == self.leader

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of every global batch that each node trains on: its ranks over all ranks."""
        return tuple(len(node) / self.world for node in self.nodes)

    def exchange(self, value: T) -> list[T]:
        """Every rank's value, by rank. Collective."""
        return [value] if self.world == 1 else _mailbox().exchange(value)

    def post(self, value: T) -> Posted[T]:
        """Send a value of at most 2 KiB to every rank, and wait for nothing.

        Every rank makes the same posts in the same order. A post that some ranks have not made before the next
        collective call comes to nothing on all ranks.
        """
        return Posted(None, "", [value]) if self.world == 1 else _mailbox().post(value)

    def together(self, work: Callable[[], T]) -> T:
        """Call `work` on every rank. If it fails on one, it fails on all. Collective.

        Raises:
            Exception: on the rank that failed, the error of `work`.
            RuntimeError: on the others; it names that rank and its error.
        """
        results: list[T] = []
        self._agree(lambda: results.append(work()))
        return results[0]

    def lead(self, work: Callable[[], T]) -> T:
        """Call `work` on each node's leader. Returns its result on all ranks of that node. Collective.

        Errors are those of `together`; a result that cannot be pickled is one of them.
        """
        results: list[T] = []

        def work_and_pickle() -> bytes:
            results.append(work())
            return pickle.dumps(results[0]) if self.world > 1 else b""

        sent = self._agree(work_and_pickle if self.is_leader else None)
        outcome: T = results[0] if self.is_leader else pickle.loads(sent[self.leader])
        return outcome

    def _agree(self, work: Callable[[], Any] | None) -> list[Any]:
        """Every rank's result of `work`, in plain values: a result that cannot be pickled here would end no wait."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = work() if work is not None else None
        except Exception as error:  # the others must be told of it before it is raised
            failure = error
        outcomes = self.exchange((repr(failure) if failure else None, result))
        if failure is not None:
            raise failure
        for rank, (message, _) in enumerate(outcomes):
            if message is not None:
                raise RuntimeError(f"setting up the cache failed on rank {rank}: {message}")
        return [value for _, value in outcomes]


def _mailbox() -> Mailbox:
    """This rank's mailbox in the running job; the first call of a job makes it, and is collective."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _mailboxes:
        if dist.get_backend(world) == "gloo":
            # A rank that dies before it comes here is noticed by its broken connection, once. (NCCL notices none.)
            dist.barrier()
        _mailboxes[world] = Mailbox(job_store() or _new_store(), dist.get_rank(), dist.get_world_size())
    return _mailboxes[world]


def _new_store() -> Any:
    """A store of our own, for a job that has none (MPI). Collective."""
    stores: Any = dist  # torch's types do not export its stores
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    server = stores.TCPStore(host, 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    address = [(host, server.port) if server else None]
    dist.broadcast_object_list(address, src=0)
    return server or stores.TCPStore(*address[0], is_master=False)  # type: ignore[misc]
