"""What the next epoch of a stream comes from, by what the one before has shown.

    stream   it is read, and kept
      -> stream   the epoch was broken off, or raised: from nothing, for no sample may come twice; or there was memory,
                  but the first sample has misled about the layout: later ones are no rows
      -> cache    all of it was kept, and its first samples, read again, are among them
      -> pass     not all of it could be kept
    cache    all comes from memory, shuffled
    pass     it is read, and nothing is kept

A stream passes for good when it does not fit, is random, another one in every epoch, or never read to its end: three
epochs that were broken off one after the other.
"""

from __future__ import annotations

import logging
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch.utils.data import IterableDataset

from lightning_stocache.cache.ledger import Mode
from lightning_stocache.cache.stream import StreamStore
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.setup.look import PATIENCE_SECONDS
from lightning_stocache.setup.reader_process import NotStartedError, read_apart
from lightning_stocache.source.stream import difference, draws_shards
from lightning_stocache.torch_internals import set_worker_dataset

__all__ = ["BY_HAND", "NO_ROW", "StreamChoice"]

log = logging.getLogger(__name__)

BY_HAND = "Give its deterministic part to CachedStream, and the random rest as transform=; or allow_random=True"
NO_ROW, _TURNED = 1, 2
"""Flags of the decision: a sample was no row; the stream was begun anew for that."""

_MOST_BROKEN = 3


class StreamChoice:
    """Decides for one epoch, in the process that is chosen to.

    Args:
        source: the user's stream.
        store: what is kept of it.
        allow_random: whether a random stream is kept as it is.
        tell: is given the reason why nothing is kept any more.
    """

    def __init__(self, source: Any, store: StreamStore, allow_random: bool, tell: Callable[[str], None]) -> None:
        self._source, self._store, self._allow_random, self._tell = source, store, allow_random, tell

    def of(self, epoch: int) -> Mode:
        """What an epoch comes from that all ranks have begun."""
        if epoch == 1:
            return self._first()
        totals = self._store.ledger.totals(epoch - 1, self._length())
        if totals is None:
            if self._store.ledger.count_broken() >= _MOST_BROKEN:
                return self._pass(
                    f"{_MOST_BROKEN} epochs were broken off before it came to its end (limit_train_batches, break, an "
                    "error), so nobody knows what is in it. Read it to its end once"
                )
            return self._anew("stream")
        self._store.ledger.count_broken(reset=True)
        if not totals.passed:
            return "stream"
        if self._store.filled != totals.stored:  # a process was killed while all was turned into records
            return self._anew("stream")
        if totals.stored == totals.passed:
            found = None if self._allow_random else _read_again(self._source, self._store)
            if found is None:
                return "cache"
            return self._pass(
                f"{found}: it is random, or another one in every epoch, as batches are that it makes of shuffled "
                f"samples (make them in the loader).\n{BY_HAND}"
            )
        if self._store.ledger.has(NO_ROW) and self._store.ledger.is_first(_TURNED):
            return self._anew("stream")
        if self._store.lacks_slots:
            return self._pass(
                f"the first of its {totals.passed:,} samples is far larger than the others, so that there are slots "
                f"for {totals.stored:,} alone. Raise the budget, or have a smaller one first"
            )
        size = self._store.memory_bytes * totals.passed // max(totals.stored, 1)
        return self._pass(
            f"its {totals.passed:,} samples take about {format_bytes(size)}, and its budget is "
            f"{format_bytes(self._store.granted)}. A stream is kept whole or not at all"
        )

    def _first(self) -> Mode:
        if self._allow_random or not draws_shards(self._source):
            return "stream"
        return self._pass(
            "it draws its shards anew in every epoch (resampled=True), and what is kept would be one draw of them. "
            "resampled=False reads each once; allow_random=True keeps the first draw"
        )

    def _anew(self, mode: Mode) -> Mode:
        self._store.clear()
        return mode

    def _pass(self, reason: str) -> Mode:
        self._tell(reason)
        return self._anew("pass")

    def _length(self) -> int | None:
        try:
            return len(self._source)
        except Exception:  # whatever the user's code raises: most streams have none
            return None


class _Again(IterableDataset[bytes]):
    """Reads the first samples of a stream again, in a process that is thrown away, and compares them."""

    def __init__(self, source: Any, store: StreamStore) -> None:
        self.source, self.store = source, store

    def __iter__(self) -> Iterator[bytes]:
        set_worker_dataset(self.source)
        yield pickle.dumps(difference(self.source, self.store.marked))


def _read_again(source: Any, store: StreamStore) -> str | None:
    """Why a stream is not what was kept of it, in words; None if it is.

    It is read where `look` reads a dataset, so that nothing which it opens stays in the trainer, and a read that blocks
    is given up. A worker, which may have no process of its own, reads it itself.
    """
    begun = time.monotonic()

    def on_wait() -> None:
        seconds = time.monotonic() - begun
        log.warning("a stream waits for its first samples to be read again, for %.0f s", seconds)
        if seconds > PATIENCE_SECONDS:
            raise TimeoutError(f"reading it again has not ended in {PATIENCE_SECONDS:.0f} s")

    if sys.platform != "linux":  # a spawned process would run the user's script again
        return difference(source, store.marked)
    try:
        return cast("str | None", pickle.loads(read_apart(_Again(source, store), "fork", on_wait)))
    except NotStartedError:
        return difference(source, store.marked)
    except (TimeoutError, RuntimeError) as error:
        return str(error).splitlines()[0]
