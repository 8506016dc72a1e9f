"""Notice that a stream is random, while it is served.

`StreamReader` watches the generators while the stream is read. Samples of a map-style source are read again (`looks`),
and its state is compared (`witness`).
"""

from __future__ import annotations

import time
from typing import Any

from lightning_stocache.source.access import iterate
from lightning_stocache.source.generators import Generators, are_draws_evidence
from lightning_stocache.source.probe import MANY

__all__ = ["StreamReader"]

_WATCHED = MANY  # samples of a stream that are watched in any case
_SLOW_NS = 1_000_000  # a sample of a stream that takes so long is watched, too: watching takes 0.05 ms


class StreamReader:
    """Reads a stream from its beginning, and watches whether it draws random numbers for its samples.

    The first sample is left out, because many streams draw their order there. The next 31 are watched, and later those
    that follow a slow one, so that watching takes at most a twentieth of the stream's time. Not seen are the generators
    of WebDataset's and `datasets`' shuffling. Shuffling by process-wide generators cannot be told from augmentation.

    Args:
        source: the stream, whose own generators are watched, too.
        watched: whether draws matter.
    """

    def __init__(self, source: Any, watched: bool = True) -> None:
        self._generators = Generators(source) if watched else None
        self._stream, self._samples = iterate(source), 0
        self.moved: str | None = None
        """The generators that moved while a sample was read, in words; None as long as none has."""
        self.source_ns = 0
        """Nanoseconds that the last sample took."""

    def __next__(self) -> Any:
        """The next sample. Errors of the stream are raised as they are."""
        is_watched = self._samples > 0 and (self._samples < _WATCHED or self.source_ns > _SLOW_NS)
        generators = self._generators if is_watched else None
        before = None if generators is None else generators.state()
        start = time.perf_counter_ns()
        sample = next(self._stream)
        self.source_ns = time.perf_counter_ns() - start
        # Another thread may have drawn meanwhile: then a generator that has moved is no evidence.
        if generators is not None and before is not None and are_draws_evidence():
            moved = generators.moved(before)
            if moved:
                self.moved, self._generators = " and ".join(moved), None
        self._samples += 1
        return sample
