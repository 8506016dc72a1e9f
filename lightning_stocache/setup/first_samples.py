"""Read the first samples of a stream, or of the source of a rolling cache, in a `Reader`.

Set-up reads 16 samples of a stream. It reads two samples of a rolling cache, because its sources are slow.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from typing import Any, cast

from torch.utils.data import get_worker_info

from lightning_stocache.cache.records import SampleCodec
from lightning_stocache.setup.forms import choose_codec
from lightning_stocache.setup.reader import Reader, Subject, start_method
from lightning_stocache.setup.request import Layout
from lightning_stocache.source.access import is_own_iterator
from lightning_stocache.source.draws import Draws, EndOfStreamError
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.probe import attributed, words_of
from lightning_stocache.source.samples import bits, mark_of

__all__ = ["BY_HAND", "FirstSampleError", "codec_of", "difference"]

_SAMPLES = 2  # one would not show that shapes differ
_OF_STREAM = 16
_TRIES = 6  # failed draws after which set-up gives up
_SECONDS = 10.0  # after which two samples are enough
BY_HAND = "Give its deterministic part to CachedStream, and the random rest as transform=; or allow_random=True"
"""The way to cache a random stream."""

_ANOTHER = (
    "it is random, or another one in every epoch, as batches are that it makes of shuffled samples (make them in the "
    f"loader).\n{BY_HAND}"
)
_AT_ITS_READ = "To cache it, let it open files and start threads at its first read"
_BY_CONTEXT = 'Give multiprocessing_context="forkserver" or "spawn"'
_ONCE = "it is its own iterator, and iterating over it again does not begin with the same samples"


class FirstSampleError(RuntimeError):
    """No sample of a source could be read, or samples cannot be stored."""


def codec_of(
    draws: Draws, layout: Layout = "auto", method: str | None = None, *, has_workers: bool = True
) -> SampleCodec:
    """Choose the codec by the first samples that are drawn.

    Args:
        draws: the draws from the source.
        layout: "rows", "records", or "auto": rows if these samples allow it.
        method: start method of the process that reads the source; None: fork, if the system has it.
        has_workers: whether workers, or fillers, read the source, not this process.

    Raises:
        FirstSampleError: none of the first samples could be read, or they cannot be stored.
    """
    title = f"the source of a {'stream' if draws.as_stream else 'rolling cache'} ({type(draws.source).__name__})"
    method, must = start_method(method), not draws.as_stream
    if must:  # read here, a generator would lose these samples
        method = method or multiprocessing.get_start_method()
    try:
        # What an iterator has given to this process would be missing in training.
        way_out = _BY_CONTEXT if must else _AT_ITS_READ
        is_iterator = is_own_iterator(draws.source)
        subject = Subject(partial(_codec, draws), draws.source, title, has_workers, is_iterator, way_out)
        with closing(Reader([subject], method, must=must)) as reader:
            return cast(SampleCodec, reader.ask(layout))
    except Exception as error:  # the source is the user's, and may raise anything
        raise FirstSampleError(f"{title} cannot be cached: {words_of(error, 'reading it')}") from error


def difference(source: Any, known: Callable[[int], Iterable[Any]]) -> str | None:
    """Read the first samples of a stream again. Returns why they differ from the stored samples, or None.

    Args:
        source: the stream.
        known: returns the stored samples with a mark.
    """
    try:
        has_workers = get_worker_info() is not None
        is_iterator = is_own_iterator(source)
        subject = Subject(partial(_differs, source, known), source, "a stream", has_workers, is_iterator, _AT_ITS_READ)
        with closing(Reader([subject], start_method(None))) as reader:
            return cast("str | None", reader.ask())
    except Exception as error:  # the source is the user's, and may raise anything
        return words_of(error, "reading it again")


def _codec(draws: Draws, layout: Layout) -> SampleCodec:
    indices, samples, words = _read(draws)
    if not samples:
        raise FirstSampleError(words or "it gives no samples")
    if draws.as_stream and is_own_iterator(draws.source):
        _, again, _ = _read(draws)
        count = min(len(samples), len(again))
        if not count or list(map(bits, samples[:count])) != list(map(bits, again[:count])):
            raise FirstSampleError(_ONCE)
    return choose_codec(indices, samples, layout)


def _differs(source: Any, known: Callable[[int], Iterable[Any]]) -> str | None:
    _, samples, words = _read(Draws(source, passes=1, as_stream=True))
    for number, sample in enumerate(samples):
        seen = bits(sample)
        if not any(bits(other) == seen for other in known(mark_of(sample))):
            return f"sample {number}, when it was read again, was not among those of the epoch before: {_ANOTHER}"
    if words:
        return f"{words} (when it was read again)"
    return None if samples else "it gives no samples when it is read again"


def _read(draws: Draws) -> tuple[list[int], list[Any], str]:
    """The indices of the first samples, the samples, and the last error in words. The seed is not the training's."""
    samples, indices, failed, words, begun = list[Any](), list[int](), 0, "", time.monotonic()
    most = _OF_STREAM if draws.as_stream else _SAMPLES
    with Generators(draws.source) as generators:
        generators.seed(random.SystemRandom().getrandbits(31))
        for draw in draws.share(0, 1):
            try:
                samples.append(draw.load())
                indices.append(draw.index if draw.index >= 0 else len(indices))  # of a stream, by number
            except Exception as error:  # the source is the user's, and may raise anything
                words = words if isinstance(error, EndOfStreamError) else words_of(attributed(error), "reading it")
                failed += 1
            late = time.monotonic() - begun > _SECONDS
            if len(samples) == most or failed > _TRIES or (late and len(samples) >= _SAMPLES):
                break
    return indices, samples, words
