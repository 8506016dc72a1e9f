"""What follows if a source changes after its samples were stored.

`Changes` answers whether stored samples may be served. It compares the source's state, and reads some stored samples
again from time to time (`source.looks`):

    before each batch       `refresh`: attributes are compared; has another process said that the source has changed?
    in an epoch             `due` -> `look`, in the process that would read the samples without a cache -> `end`
    in a worker             `look_around` its `worker_init_fn`
    without a CachedLoader  `look_by_itself`: at the first call of a process, and after each pass over the dataset

A source that changes before its first sample is served gets a new cache, if the cache has no name and one process
alone has opened it: a framework may set a transform when it makes the loader. A source that changes later is served as
it is now, uncached, by every process of the job: one number in shared memory says so. The same follows where hits would
do something else than reads: a read writes into state that the sampler reads, or somebody changes samples in place that
are the dataset's own memory.

Keys that are no indices are never a hit. All processes count them together, and after many a cache that was asked for
no index is given up.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_stocache.cache.store import Store
from lightning_stocache.node.budget import Budget
from lightning_stocache.setup.open import open_caches
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.reader import Reader, Subject, start_method
from lightning_stocache.source import looks
from lightning_stocache.source.access import position_of
from lightning_stocache.source.looks import AT_ONCE, Due, Look, Schedule, judged, read_again
from lightning_stocache.source.proof import Proof
from lightning_stocache.source.samples import Bits, bits
from lightning_stocache.source.snapshot import CommonState
from lightning_stocache.source.transform_split import Tail
from lightning_stocache.source.transforms import Head, UncuttableError, reading
from lightning_stocache.source.witness import Difference, Witness

__all__ = ["Changes"]

log = logging.getLogger(__name__)

_Cause: TypeAlias = looks.Cause | Literal["in place", "strayed", "unnoted"]

_T = TypeVar("_T")

_MOST_LENT = 64  # samples of a batch that are compared after its use; a comparison costs more than to store a small row
_MANY_KEYS = 32  # keys that are no indices, after which a cache that was asked for no index is given up


_all: weakref.WeakSet[Changes] = weakref.WeakSet()


def _note_copies() -> None:
    for changes in list(_all):
        changes.note_copy()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_copies)


class Changes:
    """Tells whether the stored samples of a source may be served.

    Args:
        opened: the opened cache, with the source.
        original: of the source of which this one is a copy in the same process: if it changes, the original has not.

    Attributes:
        opened: what is served now: the cache and its source; the source alone once it has changed.
        proof: of the cut, if the source is cut.
        witness: compares the source's state.
        lends: whether the samples of the next batch are to be the source's own (`lend`).
        has_other_keys: whether this process has seen a key that is no index.
    """

    def __init__(self, opened: OpenCache, original: Changes | None = None) -> None:
        self._is_copy = original is not None
        self._home = os.getpid()  # the process that opened the cache
        self._original = 0 if self._is_copy else os.getpid()  # the process of a source that is no copy
        self._epoch = 0  # of the CachedLoaders in this process
        self._begin(opened)
        if original is not None:
            self._noted = original.seen
        _all.add(self)

    def _begin(self, opened: OpenCache) -> None:
        """Serve from a cache from which nothing was served yet."""
        self.witness = Witness(opened.request.source, getattr(opened.tail, "steps", ()))
        self.witness.learn(opened.machinery)
        self.lends = self.has_other_keys = False
        cache = opened.live_cache
        self._noted = 0 if cache is None else cache.invalidations  # changes up to the last that is surely in the source
        self._schedule = Schedule()
        self._process = self._served = 0  # since the last look by itself: this process, and the samples that it served
        self._common: CommonState | None = None
        self._other_key: Any = None  # a key that was no index, once all processes have counted `_MANY_KEYS` more
        self._lent: list[tuple[Any, Bits]] = []  # samples of an epoch's first batch, with their bits
        self.serve(opened)

    def serve(self, opened: OpenCache) -> None:
        """Serve from another record of the same source."""
        self.opened, tail = opened, opened.tail
        self.proof = Proof(opened.request.source, tail) if isinstance(tail, Tail) else None

    @property
    def source(self) -> Dataset[Any]:
        """The user's dataset."""
        return self.opened.request.source

    @property
    def heads(self) -> Sequence[Head]:
        """The heads of a cut source."""
        return getattr(self.opened.tail, "heads", ())

    # ---- may stored samples be served? ----

    @property
    def source_has_changed(self) -> bool:
        """Whether a process of the job has said that the source has changed."""
        counters = self.opened.counters
        return counters is not None and counters.says_changed

    def look_for_change(self) -> bool:
        """Whether the source has changed since it was cached: another process says so, or it is seen here.

        A change that is seen here is told to all, or a new cache is opened for the changed source.
        """
        if self._other_key is not None:
            self._check_indices()
        if self.source_has_changed:
            return True
        change = self.witness.look()
        if change is None and self.witness.doubtful:
            change = self._look_for(self.witness.take_doubtful())
        if change is None:
            return False
        if self._may_open_again:
            self._open_again()
            return False
        self.give_up("changed", f"its `{change}`")
        return True

    def refresh(self) -> None:
        """Serve the source itself, uncached, once it has changed."""
        opened = self.opened
        if (opened.cache is not None or opened.source is not self.source) and self.look_for_change():
            self.serve(opened.given_up())

    def refresh_unread(self, *, is_compared: bool = False) -> None:
        """Open a new cache if the source has changed before its first sample is served.

        Attributes are compared, and if that `is_compared` also the content of the source's state.
        """
        if not self._may_open_again:
            return
        has_changed = self.witness.look() is not None
        if is_compared and not has_changed:
            has_changed = any(difference.kind != "machinery" for difference in self.witness.differences())
        if has_changed:
            self._open_again()

    @property
    def _may_open_again(self) -> bool:
        """Whether no sample was served yet, and the cache has no name and was opened by this process alone."""
        opened = self.opened
        request = opened.request
        if opened.counters is None or opened.borrowed or self._is_copy or self._home != os.getpid():
            return False
        if request.name is not None or request.budget.off or opened.group.world > 1 or self.source_has_changed:
            return False
        return not opened.counters.totals().served

    def _open_again(self) -> None:
        """Replace the cache by a new one for the source as it is now."""
        before = self.opened
        budget = before.request.budget
        if before.request.reader is not None and before.live_cache is not None:
            budget = Budget.parse(before.budget_bytes)  # other caches of the Trainer call may have the rest
        [opened] = open_caches([before.request], {before.request.pot: budget}, before.group)
        if opened.counters is not None and before.counters is not None:
            opened.counters.take_matters(before.counters)
        before.close()
        self._begin(opened)
        opened.tell()

    def make_current(self, make: Callable[[], _T]) -> _T:
        """The result of `make`, which reads served samples. If the source changes meanwhile: made anew, uncached."""
        self.refresh()
        result = make()
        if self.opened.live_cache is None or not self.source_has_changed:
            return result
        self.refresh()
        return make()

    @property
    def seen(self) -> int:
        """The number of changes of samples that this process's source has seen: after others its samples may be old.

        Originals (ranks) say all the same changes, so each has seen those of the others. A copy has seen what was said
        before it was made, and then by itself. Once a copy has said a change, the same holds for originals.
        """
        cache, counters = self.opened.live_cache, self.opened.counters
        changes = 0 if cache is None else cache.invalidations
        if changes == self._noted:
            return changes
        is_original = self._original == os.getpid()
        return changes if is_original and not (counters and counters.copy_has_changed) else self._noted

    def note_copy(self) -> None:
        """Note the number of changes for a process that gets a copy of the source now."""
        self._noted = self.seen

    def warn_of_copies(self) -> None:
        """Warn, once on the node, that this source is older than a change in a copy of it. Not in workers."""
        counters = self.opened.counters
        if counters is None or not counters.copy_has_changed or get_worker_info() is not None:
            return
        if counters.is_first("copies"):
            log.warning(_COPIES, type(self.source).__name__)

    def invalidate(self, indices: Sequence[int] | None) -> None:
        """Forget stored samples that the user has changed (`CachedDataset.invalidate`)."""
        cache, request = self.opened.live_cache, self.opened.request
        if cache is None:
            return
        if request.name is not None:
            raise ValueError(
                f"the cache {request.name!r} outlives this job, which cannot say that its samples have changed: leave "
                "name= away, or give another name to the changed data"
            )
        if not cache.stores_misses:
            raise TypeError("samples of a stream or a rolling cache cannot be invalidated: they have no index")
        numbers = None if indices is None else _numbers(indices, len(cast(Any, self.source)))
        if not self._cut_anew():  # before: what is loaded after the change is stored
            self.give_up("changed", "its transform")
            self.refresh()
            return
        if self._original != os.getpid() and self.opened.counters is not None:
            self.opened.counters.say_copy_changed()  # first: what others load meanwhile is not stored
        try:
            change = cache.invalidate(numbers)
        except OSError as error:
            self.give_up("unnoted", error.strerror or str(error))
            self.refresh()
            return
        if not change:
            raise TimeoutError(
                "stored samples are still served: another process was stopped while it stored some, or this one was "
                "forked when no descriptor was left"
            )
        if indices is None or change == self._noted + 2:  # else there was a change before, by another
            self._noted = change
        self.witness = Witness(request.source, getattr(self.opened.tail, "steps", ()))
        self.witness.learn(self.opened.machinery)
        self._lent = []

    def _cut_anew(self) -> bool:
        """Cut the source as it is now: its copy has old attributes. Returns False if its transforms are others."""
        tail = self.opened.tail
        if not isinstance(tail, Tail):
            return True
        try:
            new_tail = tail.cut.apply(self.source)
        except (LookupError, AttributeError, TypeError, ValueError, UncuttableError):
            return False
        if new_tail.all_steps != tail.all_steps:
            return False
        self.serve(replace(self.opened, source=new_tail.head, tail=new_tail))
        return True

    def give_up(self, cause: _Cause, what: str = "") -> None:
        """Say to every process that no stored sample may be served, and warn, once on the node."""
        counters = self.opened.counters
        if counters is None:
            return
        if not self._is_copy:
            counters.say_changed()
        if counters.is_first("changed source"):
            if cause == "changed" and what.startswith("sample ") and self.opened.group.world > 1:
                what += " (of which the ranks may hold different data)"
            log.warning("%s: %s", type(self.source).__name__, _WARNINGS[cause].format(what))

    # ---- keys that are no indices ----

    def note_key(self, key: Any, count: int = 1) -> None:
        """Count keys that are no indices of the dataset, and warn.

        Slices outside of workers (`dataset[:4]` by hand) and numbers outside of the dataset (padding) give no warning
        here. If no index is asked for, the warning, which shows one of the keys, comes when the cache is given up.
        """
        counters = self.opened.counters
        if self.opened.live_cache is None or counters is None:
            return
        total = counters.add_other_keys(count)
        if total // _MANY_KEYS > (total - count) // _MANY_KEYS:
            self._other_key = key
        is_number = position_of(key) is not None
        is_by_hand = isinstance(key, slice) and get_worker_info() is None
        if not is_number and not is_by_hand:
            self.warn_of_key(key)

    def warn_of_key(self, key: Any) -> None:
        """Warn, once on the node, of a key that is no index of the dataset."""
        counters = self.opened.counters
        self.has_other_keys = True
        if counters is None or not counters.is_first("keys"):
            return
        words = _NO_INDICES if position_of(key) is None else _NUMBERS_OUTSIDE
        log.warning(words, type(self.source).__name__, _shown(key))

    def _check_indices(self) -> None:
        """Give the cache up if no process of the node has asked for an index."""
        counters = self.opened.counters
        key, self._other_key = self._other_key, None
        if counters is None or self._is_copy:
            return
        totals = counters.totals()
        if not totals.hits + totals.misses:
            self.warn_of_key(key)
            counters.say_changed()  # no process reads what set-up has stored

    # ---- what is due? ----

    def begin_epoch(self) -> Due:
        """What to do in an epoch of a CachedLoader that begins now."""
        self._epoch += 1
        return self._due(self._epoch)

    def _due(self, epoch: int) -> Due:
        counters = self.opened.counters
        if counters is None or not self._can_look:
            return Due()
        elapsed_ns = counters.begin_looks()
        return self._schedule.due(epoch, counters.looks[1], elapsed_ns)

    @property
    def _can_look(self) -> bool:
        """Whether there are stored samples that can be read again."""
        cache = self.opened.live_cache
        if cache is None or self.opened.request.freeze_random:
            return False
        return self.seen == cache.invalidations  # else this copy of the source is older than what is stored

    def _compared(self, due: Due) -> Due:
        """What to do, given what has moved in the source's state."""
        if not due.is_compared:
            return due
        begun = time.thread_time_ns()  # without the time of other processes: a comparison that seems slow is left out
        differences = self.witness.differences()
        spent_ns = time.thread_time_ns() - begun
        return judged(due, differences)._replace(is_compared=False, compare_ns=spent_ns)

    # ---- looks ----

    def look(self, due: Due) -> Look:
        """Compare the source's state, and read stored samples again in this process."""
        self.refresh()
        if not self._can_look:
            return Look()
        due = self._compared(due)
        if not due.reads:
            return _unread(due)
        look = self._read_again(due)
        if look.change is None and look.samples:
            self.witness.excuse_unread(due.moved)
        elif look.change is not None and look.cause in ("changed", "random") and due.moved:
            look = replace(look, change=f"its `{due.moved[0].path}`", cause="changed")
        return replace(look, hastens=due.hastens, compare_ns=due.compare_ns, machinery=self.witness.machinery)

    def look_apart(self, due: Due, loader: DataLoader[Any]) -> Look:
        """Look in a process like a worker of a loader, where the loader has workers and none runs.

        A loader whose samples are all stored starts no workers. Its next workers would see the source as it is now,
        after the loader's `worker_init_fn`. This process must not read it: it would open files that later workers
        share. But it compares the state, which is that of the new process.
        """
        due = self._compared(due)
        if not due.reads:
            return _unread(due)
        begun = time.perf_counter_ns()
        context = loader.multiprocessing_context
        method = start_method(None if context is None else context.get_start_method())
        subject = Subject(self.look, self.source, type(self.source).__name__, has_workers=True)
        with closing(Reader([subject], method, init=loader.worker_init_fn)) as reader:
            try:
                look: Look = reader.ask(due)
            except Exception:  # the source is the user's, and may raise anything
                log.debug("no sample could be read again", exc_info=True)
                look = Look(1)  # the time is spent
        return replace(look, spent_ns=time.perf_counter_ns() - begun, compare_ns=due.compare_ns)

    def look_around(self, init: Callable[[], Any]) -> None:
        """In a worker: compare the source's state after its `worker_init_fn`. Each worker may have another state."""
        due = self._due(self._epoch)
        if not due.is_compared:
            init()
            return
        before = self._compared(due._replace(samples=0))
        init()
        after = self._compared(before._replace(is_compared=True))
        look = self.look(after)
        moved = after.moved[len(before.moved) :]
        if moved and look.change is None and not look.samples:  # nothing is stored yet that another worker would get
            look = replace(look, change=f"its `{moved[0].path}`")
        self.end(look)

    def look_by_itself(self, samples: int, *, finds_lent: bool) -> None:
        """Where no CachedLoader iterates: look at the first call of a process, and after each pass over the dataset.

        With `finds_lent`, a look also finds out whether the source hands out its own memory, which its user may change.
        """
        self._take_back()
        if not samples or not self._can_look:
            return
        length = len(cast(Any, self.source))
        if self._process == os.getpid() and self._served < length:
            self._served += samples
            return
        self._process, self._served = os.getpid(), samples
        counters = self.opened.counters
        epoch = 1 if counters is None else 1 + counters.totals().served // max(length, 1)
        due = self._due(epoch)._replace(finds_lent=finds_lent)
        look = self.look(due)
        self.end(look, epoch)
        if due.samples:
            self.lends = look.lends

    def end(self, look: Look, epoch: int | None = None) -> None:
        """End a look of this or another process: note what it took, and give up if something has changed."""
        self.witness.learn(look.machinery)
        self._schedule.end(self._epoch if epoch is None else epoch, look)
        self._count(look)
        if look.change is not None:
            self.give_up(look.cause, look.change)
            self.refresh()

    def _count(self, look: Look) -> None:
        if not look.samples:
            return
        log.debug("%s: %d stored samples were read again", type(self.source).__name__, look.samples)
        if self.opened.counters is not None:
            self.opened.counters.add_look(look.samples, look.spent_ns)

    def _look_for(self, paths: set[str]) -> str | None:
        """Read samples again because attributes have moved, and it is not known why. Returns one that is a change."""
        if not self._can_look:
            return None
        look = self._read_again(Due(AT_ONCE, moved=tuple(Difference(path, "setting") for path in paths)))
        self._count(look)
        if look.change is not None:
            return min(paths)
        if look.samples:
            self.witness.excuse(paths)
        elif cast(Store, self.opened.cache).some_stored(1):  # which cannot be read now
            self.witness.doubtful.update(paths)
        return None

    def _read_again(self, due: Due) -> Look:
        """Read stored samples again. What that moves is learned, and what others reach is put back."""
        cache = cast(Store, self.opened.cache)
        before = self._common.content() if self._common else None
        with self.witness, self.witness.learning(), reading(self.heads):
            look = read_again(self.opened.source, cache, due, self.proof)
        place = None if before is None else before.put_back()
        return look if place is None else replace(look, change=place, cause="written")

    # ---- what hits would not do ----

    def share_with(self, others: Sequence[Any], datasets: Sequence[Any]) -> None:
        """Say what else may reach the source's state: the samplers and the `collate_fn` of a loader.

        They may hold the datasets, which are wrappers around the source.
        """
        if self._can_look and self._common is None:
            self._common = CommonState(self.source, others, datasets)

    def lend(self, samples: Sequence[Any]) -> None:
        """Note at most 64 samples of a batch that are the source's own memory, and may be changed in place."""
        self.lends = False
        step = -(-len(samples) // _MOST_LENT) or 1
        self._lent = [(sample, bits(sample)) for sample in samples[::step]]

    def _take_back(self) -> None:
        """Before the next batch: give up if the samples that were lent, the source's own memory, have been changed."""
        lent, self._lent = self._lent, []
        if any(bits(sample) != before for sample, before in lent):
            self.give_up("in place")

    def __getstate__(self) -> dict[str, Any]:
        # Also for a copy.
        self.note_copy()
        return vars(self) | {"lends": False, "_lent": [], "_copied_in": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_copy = state.pop("_copied_in") == os.getpid()
        vars(self).update({**state, "_is_copy": is_copy or state["_is_copy"], "_original": 0})
        _all.add(self)


def _numbers(indices: Sequence[int], length: int) -> npt.NDArray[np.int64]:
    """The indices of samples as int64 `[samples]`; those below zero count from the end."""
    numbers = np.asarray(indices)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise TypeError(f"indices must be numbers of samples (of a mask: mask.nonzero()), got {_shown(indices)}")
    numbers = np.atleast_1d(numbers).astype(np.int64).reshape(-1)
    if ((numbers < -length) | (numbers >= length)).any():
        raise IndexError(f"indices must lie in the {length:,} samples, got {_shown(indices)}")
    return np.where(numbers < 0, numbers + length, numbers)


def _unread(due: Due) -> Look:
    """The result of a look that has read no sample."""
    change = None if due.change is None else f"its `{due.change}`"
    return Look(change=change, hastens=due.hastens, compare_ns=due.compare_ns)


def _shown(key: Any) -> str:
    """The beginning of a key's `repr`, on one line."""
    try:
        return f"{' '.join(repr(key).split()):.60}"
    except Exception:  # of the code of the key's class
        return f"an object of class {type(key).__name__}"


_NO_INDICES = (
    "%s is asked for keys that are no indices, as %s: such samples are not cached, but loaded every time.\nTo cache "
    "them, let the sampler draw numbers (of a tensor or array: its .tolist()), and the loader make the batches"
)
_NUMBERS_OUTSIDE = (
    "%s is asked for numbers below zero or beyond its length, as %s: such samples are not cached, but loaded every "
    "time.\nTo cache them, let the sampler draw numbers from zero on"
)

_COPIES = (
    "A copy of %s (copy, fork, pickle) has called `invalidate`. What is loaded here may be older, so it is not stored "
    "from now on.\nCall invalidate of one of them alone, of the original if there is no reason for another, or here, "
    "too, without indices. A copy with data of its own needs a CachedDataset of its own"
)

_WAYS_OUT = (
    "From now on all samples are loaded uncached, as changed.\nTo keep the cache, let it hold what stays: give what "
    "changes as transform= of CachedDataset or StocacheDataModule, which runs after the cache, or the label beside the "
    "cached image. For data that grows or is replaced there is RollingCache"
)

_WARNINGS = {
    "changed": "{} has changed since it was cached. " + _WAYS_OUT,
    "random": (
        "{} is another one each time it is read: its source is random, or depends on the time or on earlier reads. All "
        "samples are loaded uncached.\nGive its deterministic part to CachedDataset, and the random rest as transform="
    ),
    "written": (
        "reading a sample writes into `{}`, which the loader's sampler, batch sampler or collate_fn reads, too. A "
        "sample from the cache would write nothing, so all samples are loaded uncached.\nTo cache it, count elsewhere: "
        "in the sampler, or in transform= of CachedDataset, which runs after the cache"
    ),
    "in place": (
        "collate_fn, or the model, changes samples in place that are the dataset's own memory: the next epoch reads "
        "them as changed. All samples are loaded uncached.\nTo cache it, let the dataset give a copy, or change a copy"
    ),
    "uncut": (
        "it cannot be cut at its random steps, as it seemed: {}. All samples are loaded uncached.\nGive its "
        "deterministic part to CachedDataset, and the random rest as transform=, which runs after the cache"
    ),
    "unnoted": (
        "its samples have changed, and the disk of the cache cannot note which: {}. From now on all samples are loaded "
        "uncached.\nA cache in memory notes them: omit dir="
    ),
    "strayed": (
        "its transform is called by another thread than the one that reads the sample, so that it cannot be cut. All "
        "samples are loaded uncached"
    ),
}
