"""Whether the samples of a source are kept decoded or as their files: the form whose later epochs are shorter.

A sample that is kept as its file saves the reading; one that is kept decoded saves the decoding, too, and takes more
memory. The seconds and bytes of both forms are measured at set-up; what was granted says how many samples each form
would keep, and so how long a later epoch would take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import Dataset

from lightning_stocache.cache.placement import Domain
from lightning_stocache.cache.records import RecordCodec, SampleCodec
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.source.access import unwrap
from lightning_stocache.source.encoded import EncodedSource, access_to
from lightning_stocache.source.probe import Probe

__all__ = ["EncodedForm", "keeps_files", "look_at_files", "told_form"]

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
    source: Dataset[Any],
    head: Dataset[Any],
    indices: Sequence[int],
    told: Callable[[int], None],
    domain: Domain | None = None,
    *,
    chosen: bool = False,
) -> EncodedForm | str:
    """Try to take a source apart into its files and their decoding.

    Args:
        source: the user's dataset.
        head: its deterministic part.
        indices: of samples to try.
        told: is called with each index before it is read.
        domain: which indices may be read; by default all.
        chosen: whether this form has been chosen before: then no files of other indices are timed.

    Returns:
        What was measured; or why it cannot be done, in words.
    """
    if access_to(source) is None:
        return (
            f"the files of a {type(unwrap(source)).__name__} are not known. Give it two methods: read(index), which "
            "returns what is to be kept (bytes), and decode(content, index), which makes the sample of it"
        )
    kept = EncodedSource(source)
    with Probe(source, tuple(indices), told) as probe:
        try:
            for index in indices[:_PROVEN]:
                original = probe.read(source, index, 2 * index)
                again = probe.read(_Finished(kept), index, 2 * index)
                if again.bits != original.bits or probe.generators.moved(original.after, again.after):
                    return f"sample {index}, decoded from its file, is not the sample that the source returns"
            among = [] if chosen else range(len(kept)) if domain is None else domain.indices.tolist()
            return _measured(kept, head, indices, told, among)
        except Exception as error:  # methods of these names that mean something else, a file that cannot be opened
            return f"its files cannot be read and decoded apart: {error!r}"


def keeps_files(granted: int, length: int, decoded: SampleCodec, encoded: EncodedForm) -> bool:
    """Whether a later epoch is shorter with samples kept as their files than with decoded ones.

    Args:
        granted: bytes that may be taken.
        length: number of samples.
        decoded: codec of decoded samples.
        encoded: what is known of their files.

    Example:
        >>> files = EncodedForm(RecordCodec(1000 - 16), read_seconds=2e-3, decode_seconds=1e-3)
        >>> [keeps_files(size, 100, RecordCodec(10_000 - 16), files) for size in (10**6, 700_000, 600_000, 10**4)]
        [False, False, True, True]
    """
    read, decode = encoded.read_seconds, encoded.decode_seconds
    as_files, as_samples = (min(granted // codec.slot_bytes, length) for codec in (encoded.codec, decoded))
    return length * decode + (length - as_files) * read < (length - as_samples) * (read + decode)


def told_form(title: str, files: bool, decoded: SampleCodec, encoded: EncodedForm) -> str:
    """What was chosen, and why, for people."""
    read, decode = 1e3 * encoded.read_seconds, 1e3 * encoded.decode_seconds
    sizes = f"{format_bytes(decoded.nbytes)} decoded, {format_bytes(encoded.codec.nbytes)} as its file"
    chosen = "files" if files else "samples decoded"
    return f"{title} keeps {chosen}: a sample takes {sizes}, {read:.1f} ms to read and {decode:.1f} ms to decode"


class _Finished(Dataset[Any]):
    """Samples that are read and decoded at once."""

    def __init__(self, kept: EncodedSource) -> None:
        self._kept = kept

    def __getitem__(self, index: int) -> Any:
        return self._kept(self._kept[index])


def _measured(
    kept: EncodedSource,
    head: Dataset[Any],
    indices: Sequence[int],
    told: Callable[[int], None],
    among: Sequence[int],
) -> EncodedForm:
    """The costs of files that have not been read before, if there are some."""
    known = set(indices)
    fresh = [index for index in among[len(among) // 2 :] if index not in known][:_TIMED] or list(indices)
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
