"""What the first samples of a stream, or of the source of a rolling cache, are; a `Child` reads them.

`codec_of` says what samples look like: of a rolling cache from two, because its sources are slow; of a stream from 16.
`difference` reads those of a stream again, to see that what was stored of it is what it gives. Seeds are others than
training's, and the generators of the process that reads are put back.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from typing import Any, TypeAlias, cast

from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.setup.child import Child, NoAnswerError, Told, start_method
from lightning_stocache.setup.forms import choose_codec
from lightning_stocache.setup.request import Layout
from lightning_stocache.source.draws import Draws, EndOfStreamError
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.samples import bits, mark_of

__all__ = ["FirstSampleError", "codec_of", "difference"]

_SAMPLES = 2  # one would not show that shapes differ
_OF_STREAM = 16
_TRIES = 6  # draws that fail before the source is given up
_SECONDS = 10.0  # after which fewer samples will do

Judge: TypeAlias = Callable[[list[int], list[Any], str], Any]
"""Is given the indices of the first samples, the samples, and the last error in words; its answer is sent."""


class FirstSampleError(RuntimeError):
    """No sample of a source could be read, or samples cannot be kept."""


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
    try:
        return cast("SampleSpec | RecordCodec", _ask(draws, partial(_codec, layout), what, method))
    except (TypeError, ValueError, LookupError) as error:
        raise FirstSampleError(f"{what} cannot be kept: {error}") from error
    except (RuntimeError, OSError, NoAnswerError) as error:
        raise FirstSampleError(f"{what} cannot be read: {error}") from error


def difference(source: Any, known: Callable[[int], Iterable[Any]]) -> str | None:
    """Why a stream is not what was kept of it, in words, found by reading its first samples again; None if it is.

    Args:
        source: the stream.
        known: gives the samples that were kept and have this mark.
    """
    try:
        return cast("str | None", _ask(Draws(source, passes=1, as_stream=True), partial(_differs, known), "a stream"))
    except (RuntimeError, OSError) as error:
        return f"reading it again: {str(error).partition(chr(10))[0]}"


def _codec(layout: Layout, indices: list[int], samples: list[Any], words: str) -> SampleSpec | RecordCodec:
    if not samples:
        raise LookupError(words or "it gives no samples")
    return choose_codec(indices, samples, layout).codec


def _differs(known: Callable[[int], Iterable[Any]], indices: list[int], samples: list[Any], words: str) -> str | None:
    for number, sample in enumerate(samples):
        seen = bits(sample)
        if not any(bits(other) == seen for other in known(mark_of(sample))):
            return f"sample {number}, when it was read again, was not among those of the epoch before"
    return f"reading it again raised {words}" if words else None


def _ask(draws: Draws, judge: Judge, what: str, method: str | None = None) -> Any:
    """The answer of a process. A stream is read here where none can be started: a worker may have none of its own.

    Other sources are not: a generator would have lost these samples. They may take their time; a stream is given up,
    because the trainer may read it in the meantime.
    """
    read = partial(_read, draws, judge)
    method = start_method(method)
    if method is None and not draws.as_stream:
        method = multiprocessing.get_start_method()
    if method is not None:
        try:
            with closing(Child(read, draws.source, method, what, gives_up=draws.as_stream)) as child:
                return child.ask()
        except NoAnswerError:
            if not draws.as_stream:
                raise
    return read(None, lambda index: None)


def _read(draws: Draws, judge: Judge, _: None, told: Told) -> Any:
    """Read the first samples, and judge them."""
    samples, indices, failed, words, begun = list[Any](), list[int](), 0, "", time.monotonic()
    most = _OF_STREAM if draws.as_stream else _SAMPLES
    with Generators(draws.source) as generators:
        generators.seed(random.SystemRandom().getrandbits(31))
        for draw in draws.share(0, 1):
            told(draw.index)
            try:
                samples.append(draw.load())
                indices.append(draw.index)
            except Exception as error:  # the source is the user's, and may raise anything
                words = words if isinstance(error, EndOfStreamError) else f"{type(error).__name__}: {error}"
                failed += 1
            late = time.monotonic() - begun > _SECONDS
            if len(samples) == most or failed > _TRIES or (late and len(samples) >= _SAMPLES):
                break
    return judge(indices, samples, words)
