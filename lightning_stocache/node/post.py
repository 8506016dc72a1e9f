"""Messages between the ranks of a job, over the key-value store of `init_process_group`.

No collective takes part. So no message crosses a collective of the training, and no thread of gloo runs, on which a
fork could hang (CPython 3.11). There are two kinds of message:

- All ranks call `exchange` in the same order, and wait for each other.
- During training no rank may wait for all others. `post` returns at once, and `Post.collect` waits a limited time. Each
  rank makes the same posts in the same order between two exchanges.

A turn is one exchange or one post. Each rank writes its message to the key `<turn>/<rank>`. The last rank reads all
messages and writes them to `<turn>/all`, the one key that every rank polls and reads. So a turn costs a rank the same
number of requests in a job of any size. The store may end with rank 0, so rank 0 returns from an exchange after all
ranks have read it. Messages are deleted when no rank can ask for them any more.

A store may serve several process groups, one after the other. So each group has its own prefix: how often torchrun has
restarted the processes, and the number of the group since then. To number the groups, ranks count themselves when they
join.

The other ranks of a machine notice that a rank has ended, because they look for its process. On other machines the
launcher must notice; else the wait ends after 30 minutes, as in torch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections import deque
from typing import Any, Generic, TypeVar

from lightning_stocache.node.files import read_text

__all__ = ["Mailbox", "Post", "boot_id"]

T = TypeVar("T")

_POST_BYTES = 2048  # most bytes of a posted message
_POSTS = 8  # posts of this rank that stay in the store: readers wait for seconds, and an epoch makes a few posts
_EXCHANGE_SECONDS = 1800.0
_LIVENESS_SECONDS = 0.5
_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between two polls


class Mailbox:
    """The messages of one rank of a job. Every rank of a process group makes its own mailbox.

    Args:
        store: the job's `torch.distributed.Store`.
        rank: this process's rank.
        world: number of ranks.

    Example:
        >>> import torch.distributed as dist
        >>> Mailbox(dist.HashStore(), rank=0, world=1).exchange("value")
        ['value']
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.rank, self.world, self._store = rank, world, store
        groups = f"lightning_stocache/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{world}"
        self._prefix = f"{groups}/{(store.add(groups, 1) - 1) // world}"
        self.exchanges = 0
        self._posts = 0  # since the last exchange
        self._old_posts: deque[str] = deque()
        self._process = _process(os.getpid())
        self._neighbors: dict[int, tuple[str, int, str]] = {}  # the processes of the other ranks on this machine

    def exchange(self, value: T) -> list[T]:
        """Collect the values of all ranks, by rank. Collective.

        Raises:
            RuntimeError: a rank has ended, or did not come within 30 minutes, or the store has ended.
        """
        turn = f"{self._prefix}/{self.exchanges}"
        self._send(turn, pickle.dumps((self._process, value)))
        contents = self.receive(turn, _EXCHANGE_SECONDS)
        if contents is None:
            raise RuntimeError(f"not all ranks have come to an exchange of the cache in {_EXCHANGE_SECONDS:.0f} s")
        messages = [pickle.loads(content) for content in contents]
        self._send(f"{turn}/read", b"")
        if self.rank == 0:
            with contextlib.suppress(RuntimeError):  # a rank that has ended reads nothing
                self.receive(f"{turn}/read", _EXCHANGE_SECONDS)
        if self.exchanges:  # all ranks are in this exchange, so they have left the last one
            last = f"{self._prefix}/{self.exchanges - 1}"
            self._delete(last)
            self._delete(f"{last}/read")
        self._neighbors = {
            rank: process
            for rank, (process, _) in enumerate(messages)
            if process[0] == self._process[0] and process[2]  # without /proc nothing is known
        }
        self.exchanges += 1
        self._posts = 0
        return [value for _, value in messages]

    def post(self, value: T) -> Post[T]:
        """Send a value of at most 2 KiB to every rank, without waiting.

        Raises:
            ValueError: the value takes more than 2 KiB.
        """
        content = pickle.dumps(value)
        if len(content) > _POST_BYTES:
            raise ValueError(f"a posted value may take {_POST_BYTES} bytes, this one takes {len(content)}")
        turn = f"{self._prefix}/{self.exchanges}/post/{self._posts}"
        self._posts += 1
        self._old_posts.append(turn)
        with contextlib.suppress(RuntimeError):  # the store has ended with rank 0, whose own error says more
            self._send(turn, content)
            if len(self._old_posts) > _POSTS:
                self._delete(self._old_posts.popleft())
        return Post(self, turn)

    def receive(self, turn: str, seconds: float) -> list[bytes] | None:
        """Wait for the messages of all ranks. Returns None if they do not come in time.

        Raises:
            RuntimeError: a rank on this machine has ended before it sent its message, or the store has ended.
        """
        begun, pause = time.monotonic(), _SHORTEST
        look = begun + _LIVENESS_SECONDS
        while not self._store.check([f"{turn}/all"]):
            now = time.monotonic()
            if now - begun >= seconds:
                return None
            if now >= look:
                look = now + _LIVENESS_SECONDS
                for rank, process in self._neighbors.items():
                    if process != _process(process[1]) and not self._store.check([f"{turn}/{rank}"]):
                        raise RuntimeError(f"rank {rank} has ended")
            time.sleep(min(pause, begun + seconds - now))
            pause = min(1.5 * pause, _LONGEST)
        contents: list[bytes] = pickle.loads(self._store.get(f"{turn}/all"))
        return contents

    def _send(self, turn: str, content: bytes) -> None:
        """Write this rank's message of a turn. The last rank also writes all messages under one key."""
        self._store.set(f"{turn}/{self.rank}", content)
        if self._store.add(f"{turn}/count", 1) == self.world:
            contents = [bytes(self._store.get(f"{turn}/{rank}")) for rank in range(self.world)]
            self._store.set(f"{turn}/all", pickle.dumps(contents))

    def _delete(self, turn: str) -> None:
        """Delete this rank's message of a turn. Rank 0 also deletes the shared keys."""
        for name in (self.rank, "count", "all") if self.rank == 0 else (self.rank,):
            self._store.delete_key(f"{turn}/{name}")


class Post(Generic[T]):
    """A post on its way: a message from each rank. In a job of one rank (no mailbox) the values are there at once."""

    def __init__(self, mailbox: Mailbox | None, turn: str, values: list[T] | None = None) -> None:
        self._mailbox, self._turn, self._values = mailbox, turn, values
        self._exchanges = mailbox.exchanges if mailbox is not None else 0

    def collect(self, seconds: float) -> list[T] | None:
        """The values of all ranks, by rank; None if some did not come within `seconds`, or a rank made no such post."""
        if self._values is None and self._mailbox is not None:
            # After the next exchange no rank posts in this turn any more.
            is_past = self._mailbox.exchanges > self._exchanges
            with contextlib.suppress(RuntimeError):  # a rank, or the store of rank 0, has ended: its error says more
                contents = self._mailbox.receive(self._turn, 0.0 if is_past else seconds)
                self._values = None if contents is None else [pickle.loads(content) for content in contents]
        return self._values


def boot_id() -> str:
    """The id of this machine's boot, or "" without /proc."""
    return read_text("/proc/sys/kernel/random/boot_id").strip()


def _process(pid: int) -> tuple[str, int, str]:
    """The identity of a process: machine and pid namespace, id, and start time ("" if it has ended or is unknown)."""
    state, *fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""]
    ended = state in ("", "X", "Z")
    space = "" if ended else str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{boot_id()} {space}", pid, "" if ended else fields[18]
