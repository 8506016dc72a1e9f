"""What a sample looks like, from the first two, which a process reads that is thrown away.

As with `look`: who opens files when it is first read would otherwise hand one handle to all processes that are forked
later. Two samples only, because a rolling cache is for sources that are slow: training is to start with the first few.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

from torch.utils.data import IterableDataset

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.setup.codec_choice import choose_codec
from lightning_stocache.setup.reader_process import NotStartedError, read_apart
from lightning_stocache.setup.request import Layout
from lightning_stocache.source.draws import Draws
from lightning_stocache.torch_internals import set_worker_dataset

__all__ = ["FirstSampleError", "codec_of"]

log = logging.getLogger(__name__)

_TRIES = 8  # draws, before the source is given up
_SAMPLES = 2  # one would not show that shapes differ


class FirstSampleError(RuntimeError):
    """No sample of a source could be read."""


class _First(IterableDataset[bytes]):
    """In a worker: the codec of the first samples that can be read, pickled, or the last error in words."""

    def __init__(self, draws: Draws, layout: Layout) -> None:
        self.draws, self.layout = draws, layout

    def __iter__(self) -> Iterator[bytes]:
        set_worker_dataset(self.draws.source)
        words, samples, indices = "it gives no samples", list[Any](), list[int]()
        for draw in islice(self.draws.share(0, 1), _TRIES):
            try:
                samples.append(draw.load())
                indices.append(draw.index)
            except Exception as error:  # the source is the user's, and may raise anything
                words = f"{type(error).__name__}: {error}" if str(error) else words
            if len(samples) == _SAMPLES:
                break
        try:
            yield pickle.dumps(choose_codec(indices, samples, self.layout).codec if samples else words)
        except (UnsupportedSampleError, SampleMismatchError) as error:
            yield pickle.dumps(str(error))


def codec_of(draws: Draws, layout: Layout = "auto", method: str | None = None) -> SampleSpec | RecordCodec:
    """The codec of the first samples that are drawn.

    Args:
        draws: from the source.
        layout: "rows", "records", or "auto": rows where these samples allow it.
        method: how a process is started that reads it; None: fork, where the system has it.

    Raises:
        FirstSampleError: no process can be started, none of the first few could be read, or they cannot be kept.
    """
    method = method or ("fork" if sys.platform == "linux" else multiprocessing.get_start_method())
    begun = time.monotonic()

    def on_wait() -> None:
        log.warning("%s: its first sample has been loading for %.0f s", _title(draws), time.monotonic() - begun)

    try:
        answer = pickle.loads(read_apart(_First(draws, layout), method, on_wait))
    except NotStartedError as error:
        raise FirstSampleError(f"no process can be started to read {_title(draws)}: {error}") from error
    except RuntimeError as error:
        raise FirstSampleError(f"{_title(draws)} cannot be read: {error}") from error
    if isinstance(answer, str):
        raise FirstSampleError(f"{_title(draws)} cannot be kept: {answer}")
    return cast("SampleSpec | RecordCodec", answer)


def _title(draws: Draws) -> str:
    return f"the source of a rolling cache ({type(draws.source).__name__})"
