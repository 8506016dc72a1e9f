"""The order of a stream, and where its tail begins, for one that fits in part.

An iterator cannot jump, but it can be left: so what is kept of a stream that does not fit is its tail, and the head is
read. That needs a stream whose order is the same in every epoch. Each shard chains the marks of its samples to one
number, and keeps the chain at up to 64 positions, at multiples of a stride that doubles when they are full; the head
ends at one of these. So one more epoch shows whether the head is what it was.

Notes of a shard: its length, where its head ends, how many samples of its tail are kept, the stride, and the chains.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_stocache.cache.stream_ledger import Shard, StreamLedger

__all__ = ["Chain", "StreamOrder"]

_LENGTH, _HEAD, _TAIL, _STRIDE, _CHAINS = range(5)
_MOST = 64
_MIX = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio


class Chain:
    """The marks of the samples that have passed, in their order, as one number.

    Example:
        >>> chain = Chain()
        >>> for mark in range(200):
        ...     chain.add(mark)
        >>> chain.length, chain.stride, len(chain.at)
        (200, 4, 50)
    """

    def __init__(self) -> None:
        self.length = self.value = 0
        self.stride = 1
        self.at: list[int] = []

    def add(self, mark: int) -> None:
        """One more sample."""
        self.value = (self.value * _MIX + mark + 1) % 2**63
        self.length += 1
        if self.length % self.stride == 0:
            self.at.append(self.value)
            if len(self.at) > _MOST:
                self.stride *= 2
                self.at = self.at[1::2]


class StreamOrder:
    """What the shards of a stream know of their order.

    Args:
        ledger: how far the stream has come.
    """

    def __init__(self, ledger: StreamLedger) -> None:
        self._ledger = ledger

    def note(self, shard: Shard, chain: Chain) -> None:
        """A shard has ended."""
        with self._ledger.notes(shard) as notes:
            notes[_LENGTH], notes[_STRIDE], notes[_TAIL] = chain.length, chain.stride, 0
            for number, value in enumerate(chain.at):
                notes[_CHAINS + number] = value

    def note_tail(self, shard: Shard) -> None:
        """A shard has ended of which the tail was to be kept."""
        with self._ledger.notes(shard) as notes:
            notes[_TAIL] = self._ledger.stored(shard)

    def plan(self, share: float) -> int:
        """Keep that share of every shard, at most; how many samples these are."""
        kept = 0
        for shard in self.shards():
            with self._ledger.notes(shard) as notes:
                length, stride = notes[_LENGTH], max(notes[_STRIDE], 1)
                head = -(-(length - int(length * share)) // stride) * stride
                notes[_HEAD] = min(head, length)
                kept += length - notes[_HEAD]
        return kept

    def parts(self, shard: Shard) -> tuple[int, int, int]:
        """How long a shard is, where its head ends, and how many samples of its tail are kept."""
        with self._ledger.notes(shard) as notes:
            return notes[_LENGTH], notes[_HEAD], notes[_TAIL]

    def is_head(self, shard: Shard, chain: Chain) -> bool:
        """Whether what has passed is the head of a shard, as it was."""
        with self._ledger.notes(shard) as notes:
            if chain.length != notes[_HEAD]:
                return False
            number = chain.length // notes[_STRIDE] - 1
            # A head that is the whole shard may end between two chains; then there is no tail.
            known = notes[_CHAINS + number] if chain.length % notes[_STRIDE] == 0 and number >= 0 else chain.value
            return chain.length == 0 or bool(known == chain.value)

    def shards(self) -> Iterator[Shard]:
        """All shards of the epoch before that which all ranks have begun."""
        for rank in range(self._ledger.ranks):
            _, workers = self._ledger.workers(rank)
            yield from (Shard(rank, worker, workers) for worker in range(workers))

    @property
    def length(self) -> int:
        """Number of samples of all shards."""
        return sum(self.parts(shard)[0] for shard in self.shards())

    @property
    def same_shards(self) -> bool:
        """Whether there are as many as in the epoch before."""
        return all(now == before for now, before in map(self._ledger.workers, range(self._ledger.ranks)))

    @property
    def has_tails(self) -> bool:
        """Whether the tails of all shards are kept."""
        return all(length - head == tail for length, head, tail in map(self.parts, self.shards()))
