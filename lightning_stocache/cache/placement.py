"""Where an index is stored: its node and slot, by arithmetic alone.

The N indices of a dataset sit on a ring: `position(i) = i * step mod N`. The step is coprime to N, and close to N
divided by the golden ratio. So any arc of the ring takes its indices evenly from the whole dataset: from any stretch of
the dataset it takes its share to within 8 indices (Weyl's equidistribution; measured up to 1.3 million). Step 1 keeps
the dataset's order.

Node k trains on a share s_k of every global batch. Its arc starts at `N * (s_0 + ... + s_(k-1))` and is as long as the
node's slots. The slot of an index is its distance from the start of the arc. So no table and no message is needed. An
arc that is longer than the node's share overlaps the arcs of its neighbours: several nodes store the indices in both.

If only a part of the dataset is drawn (its `Domain`), the ring has the indices of that part, by their ranks.

A cache that outlives its job keeps its arc, whatever nodes the next job has. A node without such a cache takes a
planned start that no cache has (`with_arcs`). So when a node is lost, only its own arc is lost, and no other arc moves.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NO_RANK", "NO_SLOT", "Arc", "Domain", "Integers", "Ring"]

Integers = npt.NDArray[np.int64]

NO_SLOT = -1
"""Stands for an index without a slot."""

NO_RANK = -1
"""Stands for an index that is not drawn."""

_GOLDEN = (math.sqrt(5) - 1) / 2
_CANDIDATES = 64  # steps that are compared
_LARGEST = 2**63 - 1  # product of an index and a step
_TABLE = 16  # a table has at most so many entries for each index of a domain
_FEW = 64  # indices; the slots of fewer are found sooner one by one
_REACH = 150  # their largest distance from N divided by the golden ratio


class Domain:
    """The indices of a dataset that are drawn, if they are not all: one fold, or the samples with a weight.

    They have ranks from 0 on, in the order of the dataset. The ranks of evenly spaced indices are arithmetic. Those of
    other indices lie in a table, with an entry for each index up to the last, or are searched for where the table would
    be long. So a domain takes memory by the number of its indices, not by the length of the dataset.

    Args:
        indices: in any order, repeated or not; a negative index counts from the end.
        length: number of samples in the dataset.

    Raises:
        ValueError: an index is outside of the dataset, or is no whole number.

    Example:
        >>> domain = Domain([7, 2, -1], length=10)
        >>> len(domain), list(domain), [domain.rank(index) for index in (2, 3, 7)]
        (3, [2, 7, 9], [0, -1, 1])
        >>> Domain(range(0, 10**9, 2), length=10**9).rank(4)
        2
    """

    def __init__(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]], length: int) -> None:
        self.length = length
        self.among: range | Integers = _ascending(indices, length)
        """The indices, ascending: a range if they are evenly spaced, else int64 `[len]`."""
        self._table: npt.NDArray[np.int32] | None = None
        if not isinstance(self.among, range):
            self.among.flags.writeable = False
            if int(self.among[-1]) < _TABLE * len(self.among):
                self._table = np.full(int(self.among[-1]) + 1, NO_RANK, dtype=np.int32)
                self._table[self.among] = np.arange(len(self.among), dtype=np.int32)

    def __len__(self) -> int:
        return len(self.among)

    def __getitem__(self, rank: int) -> int:
        """The index of a rank."""
        return int(self.among[rank])

    @property
    def indices(self) -> Integers:
        """The indices, int64 `[len]`, ascending."""
        return _array(self.among)

    @property
    def is_whole(self) -> bool:
        """Whether these are all indices of the dataset."""
        return len(self) == self.length

    def rank(self, index: int) -> int:
        """The rank of an index, or NO_RANK."""
        return int(self.ranks(np.array([index]))[0])

    def ranks(self, indices: npt.NDArray[np.integer[Any]]) -> Integers:
        """The ranks of many indices, int64 of the same shape."""
        among = self.among
        if self._table is not None:
            is_inside = (indices >= 0) & (indices < len(self._table))
            return np.where(is_inside, self._table.take(indices, mode="clip"), NO_RANK).astype(np.int64)
        if isinstance(among, range):
            ranks, rests = np.divmod(indices.astype(np.int64) - among.start, among.step)
            return np.where((rests == 0) & (ranks >= 0) & (ranks < len(among)), ranks, NO_RANK)
        ranks = np.searchsorted(among, indices).clip(max=len(among) - 1)
        return np.where(among[ranks] == indices, ranks, NO_RANK).astype(np.int64)

    def covers(self, other: Domain | None) -> bool:
        """Whether this domain contains another domain, perhaps of a dataset that has grown, or all indices (None)."""
        if other is None:
            return self.is_whole
        if isinstance(self.among, range) and isinstance(other.among, range):
            ends = (*other.among[:2], *other.among[-1:])
            return all(index in self.among for index in ends)
        return bool(np.isin(other.indices, self.indices).all())

    @cached_property
    def digest(self) -> str:
        """A digest of the indices, 16 characters."""
        among = self.among
        content = str(among).encode() if isinstance(among, range) else among.tobytes()
        return hashlib.sha256(b"%d %s" % (self.length, content)).hexdigest()[:16]

    def __or__(self, other: Domain) -> Domain:
        for one, another in ((self, other), (other, self)):
            if one.length == self.length and one.covers(another):
                return one
        return Domain(np.union1d(self.indices, other.indices), self.length)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Domain) or (self.length, len(self)) != (other.length, len(other)):
            return False
        if isinstance(self.among, range) or isinstance(other.among, range):
            return type(self.among) is type(other.among) and self.among == other.among
        return np.array_equal(self.among, other.among)

    def __hash__(self) -> int:
        return hash((self.length, self.digest))

    def __repr__(self) -> str:
        return f"Domain({len(self)} of {self.length} indices, {self.digest})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._table is None:
            return Domain, (self.among, self.length)
        return _domain_of, (np.packbits(self._table != NO_RANK), len(self._table), self.length)


def _domain_of(bits: npt.NDArray[np.uint8], count: int, length: int) -> Domain:
    return Domain(np.flatnonzero(np.unpackbits(bits, count=count)), length)


def _ascending(indices: Any, length: int) -> range | Integers:
    """Indices of a dataset from the front, each once, ascending: a range if they are evenly spaced."""
    if isinstance(indices, range) and len(indices) > 2 and (indices[0] < 0) == (indices[-1] < 0):
        ends = _from_front(np.array([indices[0], indices[-1]]), length)
        return range(int(ends.min()), int(ends.max()) + 1, abs(indices.step))
    given = np.asarray(indices)
    if given.size and (given.ndim != 1 or given.dtype.kind not in "iu"):
        raise ValueError(f"indices must be whole numbers, one after the other; got {given.dtype} {given.shape}")
    given = _from_front(given.astype(np.int64).reshape(-1), length)
    if length < _TABLE * len(given):  # quicker than sorting
        drawn = np.zeros(length, dtype=np.bool_)
        drawn[given] = True
        given = np.flatnonzero(drawn)
    else:
        given = np.unique(given)
    if not len(given):
        return range(0)
    steps = np.diff(given[:2]).tolist() or [1]
    evenly = range(int(given[0]), int(given[-1]) + 1, steps[0])
    return evenly if len(evenly) == len(given) and (given == _array(evenly)).all() else given


def _from_front(indices: Integers, length: int) -> Integers:
    outside = indices[(indices < -length) | (indices >= length)]
    if len(outside):
        raise ValueError(f"indices must lie in the dataset of {length} samples, got {int(outside[0])}")
    return np.where(indices < 0, indices + length, indices)


def _array(among: range | Integers) -> Integers:
    array = np.arange(among.start, among.stop, among.step) if isinstance(among, range) else among
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class Arc:
    """The part of the ring that one node stores.

    Args:
        size: number of indices on the ring, N.
        slots: number of slots, which is the length of the arc.
        start: position of slot 0.
        step: factor of an index; 1 keeps the dataset's order.
        domain: the indices on the ring, if they are not all of the dataset.

    Raises:
        ValueError: the numbers do not make an arc.

    Example:
        >>> Arc(size=10, slots=3).slot(2), Arc(size=10, slots=3).slot(3)
        (2, -1)
    """

    size: int
    slots: int
    start: int = 0
    step: int = 1
    domain: Domain | None = None

    def __post_init__(self) -> None:
        size, of_domain = self.size, self.domain is None or len(self.domain) == self.size
        places = 0 <= self.slots <= size and 0 <= self.start < max(size, 1)
        if not (of_domain and places and size * self.step < 2**63 and math.gcd(self.step, size) == 1):
            raise ValueError(
                "an arc needs slots of 0 to size, a start below size, a step without a common divisor with size and "
                f"size * step below 2**63, and the size of its domain; got {self}"
            )

    @property
    def length(self) -> int:
        """Number of samples in the dataset."""
        return self.size if self.domain is None else self.domain.length

    @property
    def geometry(self) -> dict[str, int]:
        """Its numbers by name, without the domain."""
        return {"size": self.size, "slots": self.slots, "start": self.start, "step": self.step}

    def slot(self, index: int) -> int:
        """The slot of an index, or NO_SLOT. A negative index has none: its meaning is the source's own."""
        if not 0 <= index < self.length:
            return NO_SLOT
        if self.domain is not None:
            index = self.domain.rank(index)
            if index == NO_RANK:
                return NO_SLOT
        slot = (index * self.step - self.start) % self.size
        return slot if slot < self.slots else NO_SLOT

    def index(self, slot: int) -> int:
        """The index of a slot in `[0, slots)`."""
        position = (slot + self.start) * self._back % self.size
        return position if self.domain is None else self.domain[position]

    @cached_property
    def _back(self) -> int:
        return pow(self.step, -1, self.size)

    def slots_in(self, indices: Sequence[int]) -> list[int]:
        """The slots of some indices, each as in `slot`."""
        if len(indices) < _FEW:
            return list(map(self.slot, indices))
        slots: list[int] = self.slots_of(np.array(indices, dtype=np.int64)).tolist()
        return slots

    def slots_of(self, indices: npt.NDArray[np.integer[Any]]) -> Integers:
        """The slots of many indices, int64 of the same shape; NO_SLOT as in `slot`."""
        has_none = (indices < 0) | (indices >= self.length)
        ranks = indices.astype(np.int64, copy=False)
        if self.domain is not None:
            ranks = self.domain.ranks(ranks)
            has_none |= ranks == NO_RANK
        slots = (ranks * self.step - self.start) % max(self.size, 1)
        slots[has_none | (slots >= self.slots)] = NO_SLOT
        return slots


@dataclass(frozen=True)
class Ring:
    """The arcs of all nodes on one ring, in the order of the nodes.

    Example:
        >>> ring = Ring.cut(size=100, shares=(0.5, 0.5), slots=(30, 80))
        >>> [(arc.start, arc.slots) for arc in ring.arcs], ring.coverage
        ([(0, 30), (50, 80)], 0.8)
    """

    arcs: tuple[Arc, ...]

    @classmethod
    def cut(cls, size: int, shares: Sequence[float], slots: Sequence[int], domain: Domain | None = None) -> Ring:
        """Lay one arc per node on a ring.

        Args:
            size: number of indices, N.
            shares: share of every global batch that each node trains on; they sum to one.
            slots: number of slots that each node has memory for; slots beyond N stay unused.
            domain: the indices on the ring, if the dataset has more.

        Example:
            >>> ring = Ring.cut(size=2, shares=(1,), slots=(2,), domain=Domain([3, 8], length=10))
            >>> [ring.arcs[0].slot(index) for index in range(10)]
            [-1, -1, -1, 0, -1, -1, -1, -1, 1, -1]
        """
        step = _even_step(size)
        # Shares are ranks over ranks. As floats, their sums could miss the half of an index by a hair, and leave a gap.
        exact = [Fraction(share).limit_denominator(1 << 20) for share in shares]
        starts = [round(size * sum(exact[:node])) % max(size, 1) for node in range(len(exact))]
        each = zip(starts, slots, strict=True)
        return cls(tuple(Arc(size, min(count, size), start, step, domain) for start, count in each))

    def with_arcs(self, present: Sequence[Arc | None]) -> Ring:
        """This ring with the arcs that some nodes have already. The other nodes take the starts that are left, in turn.

        Example:
            >>> ring = Ring.cut(size=100, shares=(0.5, 0.5), slots=(40, 40))
            >>> [(arc.start, arc.slots) for arc in ring.with_arcs((ring.arcs[1], None)).arcs]
            [(50, 40), (0, 40)]
        """
        taken = {arc.start for arc in present if arc is not None and arc.slots}
        starts = iter([arc.start for arc in self.arcs if arc.start not in taken])
        pairs = zip(self.arcs, present, strict=True)
        return Ring(tuple(arc or replace(planned, start=next(starts, planned.start)) for planned, arc in pairs))

    @property
    def coverage(self) -> float:
        """Share of the indices on the ring that have a slot on some node."""
        size = self.arcs[0].size
        pieces = sorted((arc.start + lap, arc.start + lap + arc.slots) for arc in self.arcs for lap in (-size, 0))
        covered = reached = 0
        for begin, end in pieces:  # an arc that runs over the end of the ring has a second piece, from below zero
            begin, end = max(begin, reached), min(end, size)
            covered += max(end - begin, 0)
            reached = max(reached, end)
        return covered / size if size else 0.0


def _even_step(size: int) -> int:
    """The step next to the golden section whose multiples spread most evenly.

    From 3.8 * 10^9 indices on, the arithmetic of int64 takes smaller steps alone, which spread only long stretches.
    The nearest step alone can be poor: with step 1714, size 2775, a stretch has up to 21 indices too many. The best of
    64 steps has 4.
    """
    golden = min(round(size * _GOLDEN), _LARGEST // max(size, 1) - _REACH)
    near = [step for step in range(max(golden - _REACH, 1), min(golden + _REACH, size)) if math.gcd(step, size) == 1]
    near = sorted(near, key=lambda step: abs(step - golden))[:_CANDIDATES]
    return min(near, key=lambda step: _largest_quotient(step, size), default=1)


def _largest_quotient(step: int, size: int) -> int:
    """The largest partial quotient of the continued fraction of step/size."""
    largest = 0
    while step:
        largest = max(largest, size // step)
        step, size = size % step, step
    return largest
