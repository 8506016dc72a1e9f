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
from collections.abc import Iterator, Sized
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
from lightning_stocache.source.lmdb_file import LMDBError, PackManifest
from lightning_stocache.source.lmdb_writer import LMDBWriter
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
    classes: Any = getattr(source, "classes", None)
    named = isinstance(classes, list | tuple) and all(type(name) is str for name in classes)
    length, title = len(cast(Sized, source)), class_name(source)
    manifest = PackManifest(length, title, encoded, fingerprint, tuple(classes) if named else ())
    writer = LMDBWriter(Path(path), manifest)
    if allow_random:
        writer.known.clear()  # its samples are other ones now
    whole = False
    try:
        _write(_Blobs(samples, allow_random or encoded), writer, workers, progress)
        whole = True
    finally:
        writer.close(complete=whole)
    return length - writer.done


class _Failure(NamedTuple):
    """Why a sample could not be made into a blob. An exception may not be fit to be sent by a worker, its text is."""

    words: str
    traceback: str = ""


class _Blobs(Dataset[Any]):
    """The samples of a source as blobs; what goes wrong is a value, so that what came before it arrives.

    Args:
        source: what is read.
        allow_random: whether it may draw random numbers.
    """

    def __init__(self, source: Any, allow_random: bool) -> None:
        self.source, self._left = source, 0 if allow_random else _WATCHED
        self._generators: Generators | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[int, bytes | _Failure]:
        try:
            return index, encode_blob(self._load(index), index)
        except PackError as error:
            return index, _Failure(str(error))
        except UnsupportedSampleError as error:
            return index, _Failure(f"{error}. {_WHAT_CAN}")
        except Exception as error:  # the source is the user's, and may raise anything
            return index, _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())

    def _load(self, index: int) -> Any:
        if not self._left:
            return self.source[index]
        self._left -= 1
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


def _write(blobs: _Blobs, writer: LMDBWriter, workers: int, progress: bool) -> None:
    """Compare some of what is there, and write what is not."""
    length = writer.done if writer.complete else len(blobs)
    done = done_bytes = 0
    start = time.monotonic()

    def chunks() -> Iterator[list[int]]:
        """Indices, as many as make a message of a megabyte, or take a quarter of a second to load."""
        if writer.known:
            yield list(writer.known)
        begin, count = writer.done, 1
        while begin < length:
            if done:
                by_size = _CHUNK_BYTES * done // max(done_bytes, 1)
                by_time = int(CHUNK_SECONDS * done / (time.monotonic() - start))
                count = max(min(2 * count, by_size, by_time, _MOST_PER_CHUNK), 1)
            yield list(range(begin, min(begin + count, length)))
            begin += count

    loader = DataLoader(
        blobs,
        batch_sampler=cast(Any, chunks()),
        num_workers=workers,
        collate_fn=list,
        worker_init_fn=partial(_begin, writer.lock_file, writer.path),
        generator=torch.Generator(),  # nothing is drawn from the user's
    )
    title = type(blobs.source.source if isinstance(blobs.source, FileSamples) else blobs.source).__name__
    bar = _bar(len(blobs), writer.done) if progress else None
    try:
        for index, blob in chain.from_iterable(loader):
            if isinstance(blob, _Failure):
                failure = PackError(f"sample {index} of {title}: {blob.words}")
                if blob.traceback:
                    failure.add_note(blob.traceback)
                raise failure
            done, done_bytes = done + 1, done_bytes + len(blob)
            if index >= writer.done:
                writer.put(blob)
                if bar is not None:
                    bar.update()
            elif not _same(blob, writer.known[index], index):
                raise LMDBError(
                    f"{writer.path} holds other data: its sample {index} is another one than {title} gives now. Give "
                    "another path, or remove it first"
                )
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        raise PackError(
            f"a worker that loads {title} has died ({error}): if it was killed for want of memory, take fewer workers. "
            "What was packed is kept: run the same command again"
        ) from error
    finally:
        if bar is not None:
            bar.close()


def _same(blob: bytes, known: bytes, index: int) -> bool:
    return blob == known or same_sample(decode_blob(blob, index), decode_blob(known, index))


def _bar(total: int, done: int) -> Any:
    from tqdm import tqdm  # its lock is a semaphore, which nobody needs who sees no bar

    return tqdm(total=total, initial=done, unit=" samples", desc="pack", disable=None)


def _begin(lock_file: int, path: Path, worker: int) -> None:
    """What a worker does first: a killed parent must leave neither it nor its lock behind."""
    try:
        if lock_file >= 0 and os.path.samestat(os.fstat(lock_file), os.stat(path)):
            os.close(lock_file)
    except OSError:  # spawned: it was never there
        pass
    end_with_parent()  # torch's worker would wait for ever, to send what nobody reads
