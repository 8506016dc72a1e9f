"""What the first samples of a source are, which a process reads that is thrown away.

As with `look`: who opens files when it is first read would otherwise hand one handle to all processes that are forked
later. Where no process can be started (in a worker of a DataLoader, which may have none) those of a stream are read
here. Seeds are others than training's, and the generators of this process are put back.

`codec_of` says what samples look like: of a rolling cache from two, because its sources are slow; of a stream from 16.
`difference` reads those of a stream again, to see that what was kept of it is what it gives.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.setup.codec_choice import choose_codec
from lightning_stocache.setup.look import PATIENCE_SECONDS
from lightning_stocache.setup.reader_process import NotStartedError, read_apart
from lightning_stocache.setup.request import Layout
from lightning_stocache.source.draws import Draws, EndOfStreamError
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.samples import bits, mark_of
from lightning_stocache.torch_internals import set_worker_dataset

__all__ = ["FirstSampleError", "codec_of", "difference"]

log = logging.getLogger(__name__)

_SAMPLES = 2  # one would not show that shapes differ
_OF_STREAM = 16
_TRIES = 6  # draws that fail before the source is given up
_SECONDS = 10.0  # after which fewer samples will do


class FirstSampleError(RuntimeError):
    """No sample of a source could be read, or samples cannot be kept."""


class _First:
    """Reads the first samples, and answers a question about them.

    Args:
        draws: from the source.
        most: how many are read, if they come within ten seconds.
        answer: what is to be known of the samples, given their indices, and the last error in words.
    """

    def __init__(self, draws: Draws, most: int, answer: Callable[[list[int], list[Any], str], Any]) -> None:
        self.draws, self.most, self.answer = draws, most, answer

    def __call__(self) -> Any:
        """The answer, in a worker."""
        set_worker_dataset(self.draws.source)
        return self.read()

    def read(self) -> Any:
        """The answer."""
        samples, indices, failed, words, begun = list[Any](), list[int](), 0, "", time.monotonic()
        with Generators(self.draws.source) as generators:
            generators.seed(random.SystemRandom().getrandbits(31))
            for draw in self.draws.share(0, 1):
                try:
                    samples.append(draw.load())
                    indices.append(draw.index)
                except Exception as error:  # the source is the user's, and may raise anything
                    words = words if isinstance(error, EndOfStreamError) else f"{type(error).__name__}: {error}"
                    failed += 1
                late = time.monotonic() - begun > _SECONDS
                if len(samples) == self.most or failed > _TRIES or (late and len(samples) >= _SAMPLES):
                    break
        return self.answer(indices, samples, words)


def codec_of(draws: Draws, layout: Layout = "auto", method: str | None = None) -> SampleSpec | RecordCodec:
    """The codec of the first samples that are drawn.

    Args:
        draws: from the source.
        layout: "rows", "records", or "auto": rows where these samples allow it.
        method: how a process is started that reads it; None: fork, where the system has it.

    Raises:
        FirstSampleError: none of the first few could be read, or they cannot be kept.
    """
    what = f"the source of a {'stream' if draws.as_stream else 'rolling cache'} ({type(draws.source).__name__})"
    reader = _First(draws, _OF_STREAM if draws.as_stream else _SAMPLES, partial(_codec, layout))
    try:
        codec = _ask(reader, method, what)
    except FirstSampleError:
        raise
    except RuntimeError as error:
        raise FirstSampleError(f"{what} cannot be read: {error}") from error
    if isinstance(codec, str):
        raise FirstSampleError(f"{what} cannot be kept: {codec}")
    return cast("SampleSpec | RecordCodec", codec)


def difference(source: Any, known: Callable[[int], Iterable[Any]]) -> str | None:
    """Why a stream is not what was kept of it, in words, found by reading its first samples again; None if it is.

    Args:
        source: the stream.
        known: gives the samples that were kept and have this mark.
    """
    try:
        reader = _First(Draws(source, passes=1, as_stream=True), _OF_STREAM, partial(_differs, known))
        return cast("str | None", _ask(reader, None, "a stream"))
    except RuntimeError as error:
        return f"reading it again: {str(error).splitlines()[0]}"


def _codec(layout: Layout, indices: list[int], samples: list[Any], words: str) -> Any:
    """The codec, or why there is none."""
    try:
        return choose_codec(indices, samples, layout).codec if samples else words or "it gives no samples"
    except (UnsupportedSampleError, SampleMismatchError) as error:
        return str(error)


def _differs(known: Callable[[int], Iterable[Any]], indices: list[int], samples: list[Any], words: str) -> str | None:
    for number, sample in enumerate(samples):
        seen = bits(sample)
        if not any(bits(other) == seen for other in known(mark_of(sample))):
            return f"sample {number}, when it was read again, was not among those of the epoch before"
    return f"reading it again raised {words}" if words else None


def _ask(reader: _First, method: str | None, what: str) -> Any:
    """The answer of a process. A stream, which a trainer may read in the meantime, is not waited for for ever."""
    begun = time.monotonic()

    def on_wait() -> None:
        seconds = time.monotonic() - begun
        log.warning("%s: its first samples have been loading for %.0f s", what, seconds)
        if reader.draws.as_stream and seconds > PATIENCE_SECONDS:
            raise RuntimeError(f"its first samples have not come in {PATIENCE_SECONDS:.0f} s")

    method = method or ("fork" if sys.platform == "linux" else multiprocessing.get_start_method())
    if reader.draws.as_stream and method != "fork":  # a spawned process would run the user's script again
        return reader.read()
    try:
        return read_apart(reader, method, on_wait)
    except NotStartedError as error:
        if not reader.draws.as_stream:  # a generator would have lost these samples
            raise FirstSampleError(f"no process can be started to read {what}: {error}") from error
        return reader.read()
