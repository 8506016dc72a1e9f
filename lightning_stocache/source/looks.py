"""Looks: stored samples are read again where plain training would read them, and compared.

A sample may depend on anything: a file, an array that is written to, a number in shared memory, a global. What a cache
cannot see it can only find by reading again. So in epochs 1, 2, 3, 5, 9, 17, ... (the first is 1) a few stored samples
are read as if they were missing, before the epoch's first batch is handed out. All looks together take at most 1 % of
the time of the training so far: fewer samples are read, or a look waits for a later epoch. Epochs 1 and 2 have one
sample each in any case.

A sample that differs is read once more, under another seed. If that differs too, the source is random; else it has
changed. A state that the source depends on may have moved (`witness`): then samples are read at once.

    Schedule.due -> Due -> judged, with what has moved -> read_again -> Look -> Schedule.end
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from lightning_stocache.cache.codec import Codec
from lightning_stocache.cache.store import NO_SLOT, UNREADABLE, Store
from lightning_stocache.source.access import load_one
from lightning_stocache.source.generators import Generators, are_draws_evidence
from lightning_stocache.source.probe import FEW, SOME, Probe, spread
from lightning_stocache.source.proof import Proof
from lightning_stocache.source.samples import bits, same_sample, walk
from lightning_stocache.source.transforms import UncuttableError
from lightning_stocache.source.witness import Difference

__all__ = ["AT_ONCE", "MOST", "Due", "Look", "Schedule", "judged", "read_again"]

log = logging.getLogger(__name__)

MOST = FEW
"""The most samples of a look."""
AT_ONCE = SOME
"""The samples that are read at once if a state has moved."""
_SHARE = 0.01  # of the training's time
SMALL_COMPARE_NS = 5_000_000  # a comparison that takes less is made in any case
SMALL_READ_NS = 20_000_000  # so are the reads of a state that has moved
_SURE = 2  # the first epochs, which have a look in any case
_TRIED = 16  # stored samples among which those of a look are drawn

Cause: TypeAlias = Literal["changed", "random", "written", "uncut"]


class Due(NamedTuple):
    """What a look is to do.

    Args:
        samples: how many stored samples are read again.
        at_once: how many may be read if the source's state has moved.
        is_compared: whether the source's state is still to be compared.
        finds_lent: whether to find out, by one read more, if the source hands out its own memory.
        indices: samples that are read besides.
        moved: where the state has moved, so that samples must prove that they have not changed.
        change: the path of a difference that is a change without a look; None if there is none.
        hastens: whether the next look comes early.
        compare_ns: nanoseconds that it took to compare the source's state.
    """

    samples: int = 0
    at_once: int = 0
    is_compared: bool = False
    finds_lent: bool = False
    indices: tuple[int, ...] = ()
    moved: tuple[Difference, ...] = ()
    change: str | None = None
    hastens: bool = False
    compare_ns: int = 0

    @property
    def reads(self) -> bool:
        """Whether samples are to be read."""
        return self.change is None and bool(self.samples or self.indices)


@dataclass(frozen=True)
class Look:
    """The result of a look.

    Args:
        samples: how many were read.
        spent_ns: nanoseconds that it took.
        change: what is not as it was, in words; None if all is.
        cause: "changed"; "random": no two reads are equal; "written": a read writes where others read; "uncut": it was
            cut where it cannot be.
        hastens: whether the next look comes early.
        lends: whether the source hands out its own memory: whoever changes a sample in place changes the source.
        load_ns: of `spent_ns`, nanoseconds in the source.
        compare_ns: nanoseconds that it took to compare the source's state.
        machinery: the places that reads move in the process that looked.
    """

    samples: int = 0
    spent_ns: int = 0
    change: str | None = None
    cause: Cause = "changed"
    hastens: bool = False
    lends: bool = False
    load_ns: int = 0
    compare_ns: int = 0
    machinery: frozenset[str] = frozenset()


# ---- when ----


@dataclass
class Schedule:
    """When the next look is due, and how many samples it may read.

    Args:
        next_epoch: the epoch of the next look; it waits until there is time for it.
        sample_ns: the time of one sample in the last look, in nanoseconds; 0 before the first.
        load_ns: of that, the time in the source.
        compare_ns: the time of a comparison of the source's state, in nanoseconds.

    Example:
        >>> schedule = Schedule()
        >>> for epoch in range(1, 20):
        ...     if schedule.due(epoch, spent_ns=0, elapsed_ns=10**9).samples:
        ...         schedule.end(epoch, Look(samples=1, spent_ns=1000))
        ...         print(epoch, end=" ")
        1 2 3 5 9 17
    """

    next_epoch: int = 1
    sample_ns: int = 0
    load_ns: int = 0
    compare_ns: int = 0
    _compared_ns: int = 0  # since the training began, at the last comparison

    def due(self, epoch: int, spent_ns: int, elapsed_ns: int) -> Due:
        """What to do in an epoch that begins now.

        Args:
            epoch: the number of the epoch; the first is 1.
            spent_ns: nanoseconds that all looks have taken.
            elapsed_ns: nanoseconds since the training began.
        """
        left_ns = _SHARE * elapsed_ns - spent_ns
        samples = 0
        if epoch >= self.next_epoch:
            # Before the first look nobody knows what a sample takes.
            allowed = min(int(left_ns / self.sample_ns), MOST) if self.sample_ns else int(left_ns > 0)
            samples = max(allowed, int(epoch <= _SURE))
        at_once = AT_ONCE
        if self.load_ns:
            at_once = min(int(max(left_ns, SMALL_READ_NS) / self.load_ns), AT_ONCE)
        return Due(samples, at_once, self._compares(epoch, elapsed_ns))

    def _compares(self, epoch: int, elapsed_ns: int) -> bool:
        """Whether the source's state is compared in an epoch: in the first two, and where that takes little time."""
        left_ns = max(_SHARE * (elapsed_ns - self._compared_ns), SMALL_COMPARE_NS)
        if epoch > _SURE and self.compare_ns > left_ns:
            return False
        self._compared_ns = elapsed_ns
        return True

    def end(self, epoch: int, look: Look) -> None:
        """End the look of an epoch. After one that has read samples, the next is due in 1, 2, 4, 8, ... epochs."""
        if look.compare_ns:  # one that was interrupted counts as twice the one before at most
            self.compare_ns = min(look.compare_ns, 2 * self.compare_ns) if self.compare_ns else look.compare_ns
        if look.samples:
            self.load_ns = look.load_ns // look.samples
            self.sample_ns = max(look.spent_ns // look.samples, 1)
            gap = 1
            while 1 + gap <= epoch:
                gap *= 2
            self.next_epoch = 1 + gap
        if look.hastens:
            self.next_epoch = min(self.next_epoch, epoch + 1)


# ---- what has moved ----


def judged(due: Due, differences: Sequence[Difference]) -> Due:
    """What a look is to do, given where the source's state differs from that of the last look.

    Example:
        >>> judged(Due(at_once=8), [Difference("epoch", "setting")]).samples
        8
        >>> judged(Due(at_once=1), [Difference("epoch", "setting")]).change
        'epoch'
    """
    samples = due.samples
    indices = list(due.indices)
    hastens = due.hastens
    allowed = due.at_once
    for difference in differences:
        if difference.kind == "machinery":
            hastens = True
            continue
        is_everywhere = difference.kind == "data" and not difference.indices
        is_unproven = is_everywhere or (difference.kind == "setting" and allowed < AT_ONCE)
        if is_unproven and not difference.is_filled:
            return due._replace(change=difference.path)
        most = AT_ONCE
        if difference.kind == "unread":
            most = min(allowed, AT_ONCE)
        elif difference.is_filled:
            most = min(max(allowed, 1), AT_ONCE)
        if most == 0:
            hastens = True
        elif difference.indices:
            indices += spread(difference.indices, most)
        else:
            samples = max(samples, most)
    moved = tuple(difference for difference in differences if difference.kind != "machinery")
    return due._replace(samples=samples, indices=tuple(indices), moved=due.moved + moved, hastens=hastens)


# ---- the look ----


def read_again(source: Any, cache: Store, due: Due, proof: Proof | None = None) -> Look:
    """Read stored samples again in this process, and compare them with what is stored. All generators are put back.

    A sample that cannot be read now is no change: an error of the source is for whoever asks for the sample. Nor is one
    whose numbers differ in their last bits, because another number of threads adds in another order; but it is one if
    something has moved that may change them.

    Args:
        source: the dataset that loads the samples of the cache.
        cache: the store.
        due: which samples are read, as far as so many are stored.
        proof: of the cut, if the source was cut.
    """
    begun = time.perf_counter_ns()
    dice = random.Random()  # not a process-wide generator, whose draws are the user's
    stored = cache.some_stored(_TRIED, dice)  # always the same ones would leave the others unseen
    asked = [*due.indices, *dice.sample(stored, min(due.samples, len(stored)))]
    read = 0
    load_ns = 0
    lends = False
    with Generators(source) if are_draws_evidence() else nullcontext():
        for index in asked:
            before = _stored(cache, index)
            if before is UNREADABLE:
                continue
            start = time.perf_counter_ns()
            try:
                now = load_one(source, index) if proof is None else proof.load(index)
            except UncuttableError as error:
                return Look(read + 1, time.perf_counter_ns() - begun, str(error), "uncut")
            except Exception:  # the source is the user's, and may raise anything
                log.debug("sample %d could not be read again", index, exc_info=True)
                continue
            load_ns += time.perf_counter_ns() - start
            read += 1
            if not _is_same(before, now, cache.codec, index, exact=bool(due.moved)):
                cause: Cause = "random" if _differs_each_time(source, index, now, dice.getrandbits(31)) else "changed"
                return Look(read, time.perf_counter_ns() - begun, f"sample {index}", cause)
            if due.finds_lent and read == 1:
                read += 1
                lends = _is_lent(source, index, now)
    return Look(read, time.perf_counter_ns() - begun, lends=lends, load_ns=load_ns)


def _is_lent(source: Any, index: int, now: Any) -> bool:
    """Whether two reads of a sample, both alive, lie in the same memory."""
    memory = _memory_of(now)
    with suppress(Exception):  # as above
        again = load_one(source, index) if memory else None
        return not memory.isdisjoint(_memory_of(again))
    return False


def _memory_of(sample: Any) -> set[int]:
    """The addresses of a sample's arrays and tensors, and of the containers that can be changed."""
    addresses = set[int]()
    for _, node in walk(sample):
        if isinstance(node, torch.Tensor) and node.layout is torch.strided and node.nbytes:
            addresses.add(node.data_ptr())
        elif isinstance(node, np.ndarray) and node.nbytes and node.flags.writeable:
            addresses.add(node.__array_interface__["data"][0])
        elif isinstance(node, list | dict):
            addresses.add(id(node))
    return addresses


def _stored(cache: Store, index: int) -> Any:
    """A stored sample; UNREADABLE if there is none."""
    seen = cache.changes
    slot = cache.ready_slot(index, verify=True)
    if slot == NO_SLOT:
        return UNREADABLE
    [sample] = cache.read(np.array([slot]))
    return sample if cache.changes == seen else UNREADABLE


def _is_same(before: Any, now: Any, codec: Codec, index: int, *, exact: bool) -> bool:
    """Whether a sample is the stored one. It may look another way until it has been stored, too."""
    if bits(before) == bits(now):
        return True
    try:
        parts = codec.contents(codec.encode(now, index))
    except Exception:  # it does not fit any more, or its class may raise anything
        return False
    now = codec.decoded(parts)
    return bits(before) == bits(now) if exact else same_sample(before, now)


def _differs_each_time(source: Any, index: int, now: Any, seed: int) -> bool:
    """Whether a sample is another one when it is read once more, under another seed."""
    seen = bits(now)
    try:
        if not are_draws_evidence():
            return bits(load_one(source, index)) != seen
        with Probe(source) as probe:
            return probe.read(source, index, seed).bits != seen
    except Exception:  # as above
        return False
