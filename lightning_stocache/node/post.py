"""Messages between ranks that nobody waits for while they are sent.

While training runs, other people's collectives may cross ours: rank 0 is in the reduction of a progress bar, which
rank 1 joins when its hooks are over; were rank 1 waiting in a collective of ours for rank 0, both would wait for ever.
So there are two calls. `send` returns at once: gloo's own threads carry the message, over a private group in which
nothing but posts is sent. `collect` waits for the others' messages, a limited time.

Why that cannot hang: a rank that waits in `collect` has sent. It waits for a rank that has not, and that one is before
its own `send`. Call `send` at a place that each rank reaches without another rank being past its `collect` (the last
step of an epoch, `collect` being at the epoch's end), and every wait ends when the slowest rank has come so far. Should
somebody's ranks be out of step all the same, the time limit ends the wait.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Generic, TypeVar

import torch.distributed as dist

from lightning_stocache.node.collective import Gathering

__all__ = ["Posted"]

T = TypeVar("T")

_BYTES = 2048  # of every message: who gathers must know the size, and to ask for it would be a wait
_NOTHING = bytes(_BYTES)  # no pickle begins with a zero


class Posted(Generic[T]):
    """Messages under way, one from each rank. Every rank sends as often, in the same order.

    Example:
        >>> Posted.send("counts", world=1).collect(seconds=1)
        ['counts']
    """

    def __init__(self, gathering: Gathering | None, content: bytes) -> None:
        self._gathering = gathering
        self._content = content

    @classmethod
    def send(cls, value: T, world: int, group: dist.ProcessGroup | None = None) -> Posted[T]:
        """Send a value to every rank.

        Args:
            value: what is sent, pickled.
            world: number of ranks.
            group: a gloo group of all ranks; not needed for one rank.

        Raises:
            ValueError: the value takes more than 2 KiB.
        """
        content = pickle.dumps(value)
        if len(content) > _BYTES:
            raise ValueError(f"a posted value may take {_BYTES} bytes, this one takes {len(content)}")
        content = content.ljust(_BYTES, b"\0")
        if world == 1:
            return cls(None, content)
        assert group is not None
        return cls(Gathering(content, group), content)

    @staticmethod
    def send_nothing(group: dist.ProcessGroup) -> None:
        """Send what stands for a value where this rank has none; what the others sent in that turn is None to all."""
        Gathering(_NOTHING, group)

    def collect(self, seconds: float) -> list[T] | None:
        """Every rank's value, by rank; None if not all have come by then, or a rank has sent nothing.

        Args:
            seconds: how long to wait at most.
        """
        if self._gathering is None:
            return [pickle.loads(self._content)]
        try:
            contents = self._gathering.wait(timedelta(seconds=max(seconds, 0.001)))  # gloo takes zero for no limit
        except RuntimeError:  # the time is over; or a rank has died, which its own error tells better
            return None
        return None if _NOTHING in contents else [pickle.loads(content) for content in contents]
