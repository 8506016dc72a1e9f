"""pack: any source into one LMDB, which LMDBSource reads.

Workers load samples and make blobs of them; the main process hands them on, in the order of their indices, to the one
thread that writes (`lmdb_writer`). Each index is read once. A pack that was stopped goes on after the last sample that
was committed: that one is read again, and has to give the same bytes, or it is not the same source.

What a sample is made of has to be known to `blob`: nothing is pickled. The first sample that holds anything else ends
the packing with its place in words; if that is the very first one, nothing has been written.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_stocache.cache.codec import UnsupportedSampleError
from lightning_stocache.node.parent import end_with_parent
from lightning_stocache.source.access import check_source
from lightning_stocache.source.blob import decode_blob, encode_blob
from lightning_stocache.source.encoded import FileSamples
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.identity import class_name
from lightning_stocache.source.lmdb_file import LMDBError
from lightning_stocache.source.lmdb_writer import LMDBWriter
from lightning_stocache.source.pack_manifest import PackManifest
from lightning_stocache.source.samples import same_sample

__all__ = ["PackError", "pack"]

_WATCHED = 8  # reads of each process that are looked at for draws
_CHUNK_BYTES = 1 << 20  # of what a worker sends at once
CHUNK_SECONDS = 0.25
_MOST_PER_CHUNK = 256
_WHAT_CAN = (
    "What can be packed: tensors, arrays, numbers, strings, bytes, None and images of PIL, in dicts, lists and tuples"
)


class PackError(RuntimeError):
    """A sample cannot be packed; the message says which one, and why. What came before it is kept."""


def pack(
    source: Dataset[Any],
    path: str | os.PathLike[str],
    *,
    encoded: bool = False,
    workers: int = 0,
    fingerprint: str = "",
    allow_random: bool = False,
    progress: bool = False,
) -> int:
    """Write all samples of a source into an LMDB. Stopped at any moment, the same call goes on where it was.

    Args:
        source: a map-style dataset. Its samples are tensors, arrays, numbers, strings, bytes, None and images of PIL
            (which are kept as their pixels), by themselves or in dicts, lists and tuples.
        path: of a file that does not exist yet, or that this call has begun.
        encoded: keep images as their files: of torchvision's ImageFolder and its kin, whose transforms are left out and
            can be given to LMDBSource, or of a source with a method `read(index)`, of which what that returns is
            packed.
        workers: processes that load; 0: this one.
        fingerprint: a word of yours for whatever decides what the samples are, besides class and length of the source:
            a pack with another one is refused.
        allow_random: pack a source that draws random numbers when it is read, with its first draw frozen.
        progress: show a progress bar.

    Returns:
        How many samples were written by this call; 0 if all were there.

    Raises:
        LMDBError: the path holds something else, or a pack of another source, or another process packs into it.
        PackError: a sample cannot be packed, or its source draws random numbers.
        OSError: the disk is full, or the file may not be written.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/squares.lmdb"
        >>> pack([number**2 for number in range(10)], path), pack([number**2 for number in range(10)], path)
        (10, 0)
    """
    check_source(source, cached=_Blobs)
    samples = FileSamples(source) if encoded else source
    length = len(cast(Sized, source))
    classes = getattr(source, "classes", None)
    named = isinstance(classes, list | tuple) and all(type(name) is str for name in classes)
    title = class_name(source)
    manifest = PackManifest(length, title, encoded, fingerprint, tuple(cast(Any, classes)) if named else ())
    writer = LMDBWriter(Path(path), manifest)
    written, whole = 0, False
    try:
        written = _pack(_Blobs(samples, allow_random or encoded), writer, workers, allow_random, progress)
        whole = True
    finally:
        writer.close(complete=whole)
    return written


class _Failure(NamedTuple):
    """Why a sample could not be made into a blob. An exception may not be fit to be sent by a worker, its text is."""

    number: int
    words: str
    traceback: str = ""


class _Blobs(Dataset[Any]):
    """The samples of a source as blobs; what goes wrong is a value, so that what came before it arrives.

    Args:
        source: what is read.
        allow_random: whether it may draw random numbers.
    """

    def __init__(self, source: Any, allow_random: bool) -> None:
        self.source, self.allow_random = source, allow_random
        self._watched = 0
        self._generators: Generators | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> bytes | _Failure:
        try:
            return encode_blob(self._load(index), index)
        except PackError as error:
            return _Failure(index, str(error))
        except UnsupportedSampleError as error:
            return _Failure(index, f"{error}. {_WHAT_CAN}")
        except Exception as error:  # the source is the user's, and may raise anything
            return _Failure(index, f"{type(error).__name__}: {error}", traceback.format_exc())

    def _load(self, index: int) -> Any:
        if self.allow_random or self._watched == _WATCHED:
            return self.source[index]
        self._watched += 1
        if self._generators is None:
            self._generators = Generators(self.source)
        before = self._generators.state()
        sample = self.source[index]
        if moved := self._generators.moved(before):
            raise PackError(
                f"reading it moves the generator of {' and '.join(moved)}: one draw would be frozen for all epochs. "
                "Pack the deterministic part, and give the rest to LMDBSource as transform=; of image folders, "
                "`encoded` packs the files; allow_random freezes the draw"
            )
        return sample


class _Chunks:
    """Indices, some at a time: as many as make a message of a megabyte, or take a quarter of a second to load.

    Args:
        known: indices of samples that are to be compared, all at once before the others.
        begin: the first index.
        end: the one after the last.
    """

    def __init__(self, known: Sequence[int], begin: int, end: int) -> None:
        self.known, self.begin, self.end = known, begin, end
        self.blobs, self.bytes, self.start = 0, 0, time.monotonic()

    def __iter__(self) -> Iterator[list[int]]:
        begin, count = self.begin, 1
        if self.known:
            yield list(self.known)
        while begin < self.end:
            if self.blobs:
                by_size = _CHUNK_BYTES * self.blobs // max(self.bytes, 1)
                by_time = int(self.blobs / (time.monotonic() - self.start) * CHUNK_SECONDS)
                count = max(min(2 * count, by_size, by_time, _MOST_PER_CHUNK), 1)
            yield list(range(begin, min(begin + count, self.end)))
            begin += count


def _pack(blobs: _Blobs, writer: LMDBWriter, workers: int, allow_random: bool, progress: bool) -> int:
    """Compare some of what is there, and write what is not; how many samples that were."""
    known = {} if allow_random else writer.known
    length = writer.done if writer.complete else len(blobs)
    if not known and writer.done == length:
        return 0
    chunks = _Chunks(list(known), writer.done, length)
    numbers = chain(known, range(writer.done, length))
    loader = DataLoader(
        blobs,
        batch_sampler=cast(Any, chunks),
        num_workers=workers,
        collate_fn=cast(Any, _as_they_are),
        worker_init_fn=partial(_begin, writer.lock_file, writer.path),
        generator=torch.Generator(),  # nothing is drawn from the user's
    )
    written = 0
    with _bar(len(blobs), writer.done, progress) as tell:
        for batch in _guarded(loader, blobs.source):
            for blob in batch:
                if isinstance(blob, _Failure):
                    failure = PackError(f"sample {blob.number} of {_title(blobs.source)}: {blob.words}")
                    if blob.traceback:
                        failure.add_note(blob.traceback)
                    raise failure
                if (number := next(numbers)) in known:
                    _compare(blob, number, writer, blobs.source)
                else:
                    writer.put(blob)
                    written += 1
                    tell()
                chunks.blobs, chunks.bytes = chunks.blobs + 1, chunks.bytes + len(blob)
    return written


def _guarded(loader: DataLoader[Any], source: Any) -> Iterator[list[Any]]:
    """Batches of a loader; a worker that dies is told of in words."""
    try:
        yield from loader
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        raise PackError(
            f"a worker that loads {_title(source)} has died ({error}): if it was killed for want of memory, take fewer "
            "workers. What was packed is kept: run the same command again"
        ) from error


def _compare(blob: bytes, number: int, writer: LMDBWriter, source: Any) -> None:
    known = writer.known[number]
    if blob != known and not same_sample(decode_blob(blob, number), decode_blob(known, number)):
        raise LMDBError(
            f"{writer.path} holds other data: its sample {number} is another one than {_title(source)} gives now. Give "
            "another path, or remove it first"
        )


@contextmanager
def _bar(total: int, done: int, shown: bool) -> Iterator[Callable[[], object]]:
    """What is called once per sample."""
    if not shown:
        yield lambda: None
        return
    from tqdm import tqdm  # its lock is a semaphore, which nobody needs who sees no bar

    with tqdm(total=total, initial=done, unit=" samples", desc="pack", disable=None) as bar:
        yield bar.update


def _begin(lock_file: int, path: Path, worker: int) -> None:
    """What a worker does first: a killed parent must leave neither it nor its lock behind."""
    try:
        if lock_file >= 0 and os.path.samestat(os.fstat(lock_file), os.stat(path)):
            os.close(lock_file)
    except OSError:  # spawned: it was never there
        pass
    end_with_parent()  # torch's worker would wait for ever, to send what nobody reads


def _as_they_are(batch: list[Any]) -> list[Any]:
    return batch


def _title(source: Any) -> str:
    return type(source.source if isinstance(source, FileSamples) else source).__name__
