"""Whether samples are kept decoded, as their files, or some so and some so: what saves most time in the memory at hand.

A sample that is kept as its file saves the reading; one that is kept decoded saves the decoding, too, and takes more
memory. Both savings and both sizes are measured at set-up. Where the memory holds all samples decoded, that is best.
Where it does not, it goes to what saves most seconds per byte: all files first, if those save more, and then, with what
is left, samples that are decoded; else decoded samples alone. (This is the fractional knapsack, whose greedy solution
is the best; "HyCache", USENIX ATC 2025, places the stages of a pipeline so.)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import Dataset, Subset

from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.source.encoded import EncodedSource, taken_apart
from lightning_stocache.source.file_access import access_to
from lightning_stocache.source.probe import Probe

__all__ = ["EncodedForm", "decoded_share", "look_at_files", "mixed_codec", "told_share"]

_PROVEN = 4  # samples that are decoded from their files, and compared
_TIMED = 12  # samples whose files are read for the first time, as far as there are so many


@dataclass(frozen=True)
class EncodedForm:
    """What is known of samples as their files.

    Args:
        codec: between them and records.
        read_seconds: to read one from its source, the first time.
        decode_seconds: from its file to what is kept decoded.
        reads: how many samples, or files, were read to know it.
    """

    codec: RecordCodec
    read_seconds: float
    decode_seconds: float
    reads: int = 0


def look_at_files(
    source: Dataset[Any], head: Dataset[Any], indices: Sequence[int], told: Callable[[int], None]
) -> EncodedForm | str:
    """Try to take a source apart into its files and their decoding.

    Args:
        source: the user's dataset.
        head: its deterministic part.
        indices: of samples to try.
        told: is called with each index before it is read.

    Returns:
        What was measured; or why it cannot be done, in words.
    """
    if access_to(source) is None:
        inner: Any = source
        while type(inner) is Subset:
            inner = inner.dataset
        return (
            f"the files of a {type(inner).__name__} are not known. Give it two methods: read(index), which returns "
            "what is to be kept (bytes), and decode(content, index), which makes the sample of it"
        )
    kept, decoder = taken_apart(source)
    probe = Probe(source, tuple(indices), told)
    try:
        for index in indices[:_PROVEN]:
            original = probe.read(source, index, 2 * index)
            again = probe.read(_Finished(kept, decoder), index, 2 * index)
            if again.bits != original.bits or not probe.generators.same(again.after, original.after):
                return f"sample {index}, decoded from its file, is not the sample that the source returns"
        return _measured(kept, head, indices, told)
    except Exception as error:  # methods of these names that mean something else, a file that cannot be opened
        return f"its files cannot be read and decoded apart: {error!r}"
    finally:
        probe.generators.restore(probe.before)


def decoded_share(granted: int, length: int, decoded: SampleCodec, encoded: EncodedForm) -> float | None:
    """The share of the samples to be kept decoded, the others as their files; None: decoded, as far as memory goes.

    Args:
        granted: bytes that may be taken.
        length: number of samples.
        decoded: codec of decoded samples.
        encoded: what is known of their files.

    Example:
        >>> files = EncodedForm(RecordCodec(1000 - 16), read_seconds=2e-3, decode_seconds=1e-3)
        >>> [decoded_share(size, 100, RecordCodec(10_000 - 16), files) for size in (10**6, 550_000, 10**5, 10**4)]
        [None, 0.5, 0.0, 0.0]
    """
    whole, file = decoded.slot_bytes, encoded.codec.slot_bytes
    if granted >= length * whole or file >= whole:
        return None
    if encoded.read_seconds / file <= (encoded.read_seconds + encoded.decode_seconds) / whole:
        return None
    return max(granted - length * file, 0) / (length * (whole - file))


def mixed_codec(decoded: SampleCodec, encoded: EncodedForm, share: float) -> RecordCodec:
    """The codec of a source of which a share is kept decoded."""
    mean = share * decoded.slot_bytes + (1 - share) * encoded.codec.slot_bytes
    return replace(encoded.codec, nbytes=round(mean) - (encoded.codec.slot_bytes - encoded.codec.nbytes), most_bytes=0)


def told_share(title: str, share: float | None, decoded: SampleCodec, encoded: EncodedForm) -> str:
    """What was chosen, and why, for people."""
    read, decode = 1e3 * encoded.read_seconds, 1e3 * encoded.decode_seconds
    sizes = f"{format_bytes(decoded.nbytes)} decoded, {format_bytes(encoded.codec.nbytes)} as its file"
    chosen = "samples decoded" if share is None else f"{100 * share:.0f} % of the samples decoded, the others as files"
    return f"{title} keeps {chosen}: a sample takes {sizes}, {read:.1f} ms to read and {decode:.1f} ms to decode"


class _Finished(Dataset[Any]):
    """Samples that are read and decoded at once."""

    def __init__(self, kept: EncodedSource, decoder: Callable[[Any], Any]) -> None:
        self._kept, self._decoder = kept, decoder

    def __getitem__(self, index: int) -> Any:
        return self._decoder(self._kept[index])


def _measured(
    kept: EncodedSource, head: Dataset[Any], indices: Sequence[int], told: Callable[[int], None]
) -> EncodedForm:
    """The costs of files that have not been read before, if there are some."""
    length, known = len(kept), set(indices)
    fresh = [index for index in range(length // 2, length) if index not in known][:_TIMED] or list(indices)
    contents, reads, decodes = [], [], []
    for index in fresh:
        told(index)
        try:
            begin = time.perf_counter()
            content = kept[index]
            read = time.perf_counter()
            kept[index]
            again = time.perf_counter()
            head[index]
        except Exception:  # a broken file: who asks for it is told
            continue
        contents.append(content)
        reads.append(read - begin)
        decodes.append(max(time.perf_counter() - again - (again - read), 0.0))
    codec = replace(RecordCodec.infer(contents), form="encoded")
    count = 3 * len(fresh) + 2 * len(indices[:_PROVEN])
    return EncodedForm(codec, statistics.median(reads), statistics.median(decodes), count)
