"""Messages between the ranks of a job, by the key-value store that the job has from `init_process_group`.

No collective takes part, so no message crosses the collectives of others, and no thread of gloo runs that a fork could
hang on (CPython 3.11). There are two kinds of message. All ranks call `exchange` in the same order and wait for each
other. A post is for the training, where nobody may wait for all: `post` returns at once, and `Posted.collect` waits a
limited time. Each rank makes the same posts in the same order between two exchanges.

A turn is one exchange or one post. Each rank writes its message to the key `<turn>/<rank>`. The last of them reads all
messages and writes them to `<turn>/all`, the one key that every rank polls and reads: a turn costs a rank the same
number of requests in a job of any size. The store may end with rank 0, so rank 0 returns from an exchange when all
ranks have read it. Messages are deleted when no rank can ask for them any more.

A store may serve several process groups, one after the other, so each has a prefix of its own: how often torchrun has
started the processes again, and which group it is since then. For that the ranks count themselves in when they join.

A rank that has ended is noticed by the ranks on its machine, which look for its process. A rank of another machine is
for the launcher to notice; else the wait ends after 30 minutes, as those of torch do.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections import deque
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = ["Mailbox", "Posted", "boot_id"]

T = TypeVar("T")

_POST_BYTES = 2048  # at most, of a posted message
_POSTS = 8  # of this rank that stay in the store: their readers wait for seconds, and an epoch makes a few
_EXCHANGE_SECONDS = 1800.0
_LIVENESS_SECONDS = 0.5
_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between two polls


class Mailbox:
    """The messages of one rank of a job. All ranks of a process group make theirs, each one.

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
        self._neighbors: dict[int, tuple[str, int, str]] = {}  # the processes of the ranks on this machine

    def exchange(self, value: T) -> list[T]:
        """Every rank's value, by rank. Collective.

        Raises:
            RuntimeError: a rank has ended, or has not come within 30 minutes; or the store has ended.
        """
        turn = f"{self._prefix}/{self.exchanges}"
        self._send(turn, pickle.dumps((self._process, value)))
        contents = self.receive(turn, _EXCHANGE_SECONDS)
        if contents is None:
            raise RuntimeError(f"not all ranks have come to an exchange of the cache in {_EXCHANGE_SECONDS:.0f} s")
        messages = [pickle.loads(content) for content in contents]
        self._send(f"{turn}/read", b"")
        if self.rank == 0:
            with contextlib.suppress(RuntimeError):  # a rank that has ended reads no more
                self.receive(f"{turn}/read", _EXCHANGE_SECONDS)
        if self.exchanges:  # all ranks have come to this exchange, so they have left the last one
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

    def post(self, value: T) -> Posted[T]:
        """Send a value of at most 2 KiB to every rank, and wait for nothing.

        Raises:
            ValueError: the value takes more than 2 KiB.
        """
        content = pickle.dumps(value)
        if len(content) > _POST_BYTES:
            raise ValueError(f"a posted value may take {_POST_BYTES} bytes, this one takes {len(content)}")
        turn = f"{self._prefix}/{self.exchanges}/post/{self._posts}"
        self._posts += 1
        self._old_posts.append(turn)
        with contextlib.suppress(RuntimeError):  # the store has ended with rank 0, whose own error tells better
            self._send(turn, content)
            if len(self._old_posts) > _POSTS:
                self._delete(self._old_posts.popleft())
        return Posted(self, turn)

    def receive(self, turn: str, seconds: float) -> list[bytes] | None:
        """Wait for the messages of all ranks; None if they do not come in time.

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
        """Write this rank's message of a turn; as the last rank, write all messages for everybody."""
        self._store.set(f"{turn}/{self.rank}", content)
        if self._store.add(f"{turn}/count", 1) == self.world:
            contents = [bytes(self._store.get(f"{turn}/{rank}")) for rank in range(self.world)]
            self._store.set(f"{turn}/all", pickle.dumps(contents))

    def _delete(self, turn: str) -> None:
        """Delete this rank's message of a turn, and as rank 0 what is there once."""
        for name in (self.rank, "count", "all") if self.rank == 0 else (self.rank,):
            self._store.delete_key(f"{turn}/{name}")


class Posted(Generic[T]):
    """Messages that are on their way, one from each rank; in a job of one rank (no mailbox) they are there."""

    def __init__(self, mailbox: Mailbox | None, turn: str, values: list[T] | None = None) -> None:
        self._mailbox, self._turn, self._values = mailbox, turn, values
        self._exchanges = mailbox.exchanges if mailbox is not None else 0

    def collect(self, seconds: float) -> list[T] | None:
        """Every rank's value, by rank; None if not all have come within `seconds`, or a rank made no such post."""
        if self._values is None and self._mailbox is not None:
            # No rank posts in this turn any more once all have come to the next exchange.
            over = self._mailbox.exchanges > self._exchanges
            with contextlib.suppress(RuntimeError):  # a rank has died, or the store with rank 0: its error tells better
                contents = self._mailbox.receive(self._turn, 0.0 if over else seconds)
                self._values = None if contents is None else [pickle.loads(content) for content in contents]
        return self._values


def boot_id() -> str:
    """The id of this machine's boot; empty where there is no /proc."""
    return _read("/proc/sys/kernel/random/boot_id").strip()


def _process(pid: int) -> tuple[str, int, str]:
    """A process: its machine and pid namespace, its id, and when it has started; "" if it has ended, or is unknown."""
    state, *fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""]
    ended = state in ("", "X", "Z")
    space = "" if ended else str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{boot_id()} {space}", pid, "" if ended else fields[18]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
