"""pack: any source into one LMDB, which LMDBSource reads.

Workers load samples and make blobs of them; the main process hands them on, in the order of their indices, to the one
thread that writes: LMDB has one writer. Once 64 MiB of samples wait, or the first of them has waited for two seconds,
the thread commits them in one transaction, while the next ones are loaded (without it, packing has 0.5 to 0.9 of its
speed). The map grows by doubling where LMDB says that it is full, and the transaction is run again. The file is locked
by `flock`, so two processes do not pack into it, and the kernel frees it when they end.

Each index is read once. A pack that was stopped goes on after the last sample that was committed: that one is read
again, and has to give the same bytes, or it is not the same source.

What a sample is made of has to be known to `blob`: nothing is pickled. The first sample that holds anything else ends
the packing with its place in words; if that is the very first one, nothing has been written.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_stocache.cache.codec import UnsupportedSampleError
from lightning_stocache.node.parent import end_with_parent
from lightning_stocache.source.access import check_source
from lightning_stocache.source.blob import decode_blob, encode_blob
from lightning_stocache.source.encoded import packed_reader
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.identity import class_name
from lightning_stocache.source.lmdb_file import (
    MANIFEST_KEY,
    LMDBError,
    LMDBFile,
    PackManifest,
    bytes_needed,
    import_lmdb,
    key_of,
)
from lightning_stocache.source.samples import same_sample

if sys.platform != "win32":
    import fcntl

__all__ = ["PackError", "pack"]

BATCH_BYTES = 64 << 20  # a commit of 16 MiB has a third of the speed
BATCH_SECONDS = 2.0
FIRST_MAP_BYTES = 16 << 20
_COMPARED = 4  # samples of a pack that is gone on with
_WATCHED = 8  # reads of each process that are looked at for draws
_CHUNK_BYTES = 1 << 20  # of what a worker sends at once
CHUNK_SECONDS = 0.25  # in which it is loaded
_MOST_PER_CHUNK = 256


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
    blobs = _Blobs(source, encoded, allow_random)
    classes: Any = getattr(source, "classes", None)
    named = isinstance(classes, list | tuple) and all(type(name) is str for name in classes)
    manifest = PackManifest(len(blobs), class_name(source), encoded, fingerprint, tuple(classes) if named else ())
    with _Writer(Path(path), manifest) as writer, _bar(len(blobs), writer.done, progress) as bar:
        if allow_random:
            writer.known.clear()  # its samples are other ones now
        for index, blob in _loaded(blobs, writer, workers):
            if index in writer.known:
                writer.compare(index, blob, blobs.title)
                continue
            writer.put(index, blob)
            if bar is not None:
                bar.update()
    return len(blobs) - writer.done


def _bar(total: int, done: int, shown: bool) -> AbstractContextManager[Any]:
    if not shown:
        return nullcontext()
    from tqdm import tqdm  # its lock is a semaphore, which nobody needs who sees no bar

    bar: AbstractContextManager[Any] = tqdm(total=total, initial=done, unit=" samples", desc="pack", disable=None)
    return bar


# ---- loading ----


class _Blobs(Dataset[Any]):
    """The samples of a source as blobs; what goes wrong is a value, so that what came before it arrives.

    Args:
        source: what is read.
        encoded: whether images are kept as their files.
        allow_random: whether it may draw random numbers.
    """

    def __init__(self, source: Any, encoded: bool, allow_random: bool) -> None:
        self.source, self.title = source, type(source).__name__
        self._read = packed_reader(source) if encoded else source.__getitem__
        self._left = 0 if allow_random or encoded else _WATCHED
        self._generators: Generators | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[int, bytes | PackError]:
        place = f"sample {index} of {self.title}"
        try:
            return index, encode_blob(self._load(index), index)
        except (PackError, UnsupportedSampleError) as error:
            return index, PackError(f"{place}: {error}")
        except Exception as error:  # the source is the user's, and may raise anything, also what cannot be sent
            failure = PackError(f"{place}: {type(error).__name__}: {error}")
            failure.add_note(traceback.format_exc())
            return index, failure

    def _load(self, index: int) -> Any:
        if not self._left:
            return self._read(index)
        self._left -= 1
        if self._generators is None:
            self._generators = Generators(self.source)
        with self._generators.watch() as moved:
            sample = self._read(index)
        if moved:
            raise PackError(
                f"reading it moves the generator of {' and '.join(moved)}: one draw would be frozen for all epochs. "
                "Pack the deterministic part, and give the rest to LMDBSource as transform=; of image folders, "
                "`encoded` packs the files; allow_random freezes the draw"
            )
        return sample


def _loaded(blobs: _Blobs, writer: _Writer, workers: int) -> Iterator[tuple[int, bytes]]:
    """Blobs with their indices: of the samples that are compared, then of those that are missing, in their order."""
    done, done_bytes, start = 0, 0, time.monotonic()

    def chunks() -> Iterator[list[int]]:
        """Indices, as many as make a message of a megabyte, or take a quarter of a second to load."""
        if writer.known:
            yield list(writer.known)
        begin = writer.done
        while begin < len(blobs):
            loaded = max(done_bytes / _CHUNK_BYTES, (time.monotonic() - start) / CHUNK_SECONDS, 1e-6)
            end = begin + min(max(int(done / loaded), 1), _MOST_PER_CHUNK)
            yield list(range(begin, min(end, len(blobs))))
            begin = end

    loads: Iterable[tuple[int, bytes | PackError]] = map(
        blobs.__getitem__, chain(writer.known, range(writer.done, len(blobs)))
    )
    if workers:
        loads = chain.from_iterable(
            DataLoader(
                blobs,
                batch_sampler=cast(Any, chunks()),
                num_workers=workers,
                collate_fn=list,
                worker_init_fn=partial(_begin, writer.lock_file, writer.path),
                generator=torch.Generator(),  # nothing is drawn from the user's
            )
        )
    try:
        for index, blob in loads:
            if isinstance(blob, PackError):
                raise blob
            done, done_bytes = done + 1, done_bytes + len(blob)
            yield index, blob
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        raise PackError(
            f"a worker that loads {blobs.title} has died ({error}): if it was killed for want of memory, take fewer "
            "workers. What was packed is kept: run the same command again"
        ) from error


def _begin(lock_file: int, path: Path, worker: int) -> None:
    """What a worker does first: a killed parent must leave neither it nor its lock behind."""
    try:
        if lock_file >= 0 and os.path.samestat(os.fstat(lock_file), os.stat(path)):
            os.close(lock_file)
    except OSError:  # spawned: it was never there
        pass
    end_with_parent()  # torch's worker would wait for ever, to send what nobody reads


# ---- writing ----


class _Writer:
    """Writes one LMDB, from its first sample or from where another process has stopped.

    The file is not made before the first sample is there.

    Args:
        path: of the file.
        manifest: what is packed.

    Raises:
        LMDBError: the path is taken by something else, another process packs into it, or (`put`, the end) it cannot be
            written.
        OSError: its folder does not exist, or (`put`, the end) it may not be written, or the disk is full.
    """

    def __init__(self, path: Path, manifest: PackManifest) -> None:
        self.path, self.manifest = path, manifest
        self.done, self.known = 0, dict[int, bytes]()
        """Samples that lie there already, and the blobs of some of them, the last one's too."""
        self.lock_file = -1
        """Descriptor that holds the lock: whoever is forked closes it, or it is held until that one ends; -1: none."""
        self._complete = False
        self._environment: Any = None
        self._items: list[tuple[bytes, bytes]] = []
        self._bytes, self._since = 0, 0.0
        self._thread = ThreadPoolExecutor(1, "lmdb-writer")
        self._committed: Future[None] | None = None
        import_lmdb()
        if not path.parent.is_dir():
            raise FileNotFoundError(f"the folder {path.parent} does not exist: {path} cannot be made in it")
        try:
            if os.path.lexists(path):
                self._lock(os.O_RDWR)
                self._examine()
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def compare(self, index: int, blob: bytes, title: str) -> None:
        """Refuse to go on with other data, by a sample that lies there.

        Args:
            index: of the sample.
            blob: what the source gives now.
            title: of the source.
        """
        known = self.known[index]
        if blob != known and not same_sample(decode_blob(blob, index), decode_blob(known, index)):
            raise LMDBError(
                f"{self.path} holds other data: its sample {index} is another one than {title} gives now. Give another "
                "path, or remove it first"
            )

    def put(self, index: int, blob: bytes) -> None:
        """Write the next sample, soon. Waits while too many wait to be written."""
        self._open()
        if not self._bytes:
            self._since = time.monotonic()
        self._items.append((key_of(index), blob))
        self._bytes += len(blob)
        if self._bytes >= BATCH_BYTES or time.monotonic() - self._since >= BATCH_SECONDS:
            self._flush()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        """Write what waits, and let the file go; without an error, that is all."""
        try:
            if kind is None and not self._complete:
                self._open()
                self._items.append((MANIFEST_KEY, replace(self.manifest, complete=True).to_bytes()))
            if self._items:  # the manifest in the same commit as the last samples
                self._flush()
            if self._committed is not None:
                self._committed.result()
        finally:
            self._thread.shutdown()
            if self._environment is not None:
                self._environment.close()
            if self.lock_file >= 0:
                os.close(self.lock_file)

    def _lock(self, flags: int) -> None:
        if sys.platform == "win32":
            raise LMDBError("Windows has not the locks that packing needs: pack on Linux or macOS, read it here")
        if self.path.is_dir():
            raise LMDBError(f"{self.path} is a folder: give the path of a file that does not exist yet")
        try:
            self.lock_file = os.open(self.path, flags | os.O_CLOEXEC, 0o666)
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileExistsError, BlockingIOError):
            raise LMDBError(f"another process is packing into {self.path}: wait for its end") from None

    def _examine(self) -> None:
        """Find out how many samples are there; refuse what is none of ours."""
        if os.path.getsize(self.path) == 0:  # a process was killed before its first commit
            return
        try:
            file = LMDBFile.of(str(self.path))
            if (content := file.get(MANIFEST_KEY)) is None:
                if file.entries:
                    raise LMDBError("an LMDB that this package has not packed")
                return
            known = PackManifest.parse(content)
            names = ("source", "samples", "encoded", "fingerprint")
            pairs = [(name, getattr(known, name), getattr(self.manifest, name)) for name in names]
            differing = ", ".join(f"{name} {there!r}, here {here!r}" for name, there, here in pairs if there != here)
            if differing:
                raise LMDBError(f"a pack of another source: {differing}")
        except LMDBError as error:
            way_out = "Give another path, or remove it first"
            raise LMDBError(f"{self.path} is not overwritten: {error}. {way_out}") from error
        self._complete, self.done = known.complete, file.entries - 1
        some = {number * (self.done - 1) // (_COMPARED - 1) for number in range(_COMPARED)} if self.done else ()
        self.known = {index: file.get(key_of(index)) or b"" for index in sorted(some)}

    def _open(self) -> None:
        if self._environment is not None:
            return
        if self.lock_file < 0:
            self._lock(os.O_RDWR | os.O_CREAT | os.O_EXCL)
        size = max(2 * os.path.getsize(self.path), FIRST_MAP_BYTES)
        path = str(self.path)
        self._environment = import_lmdb().open(path, subdir=False, lock=False, readahead=False, map_size=size)
        if not self.done:
            self._items.append((MANIFEST_KEY, self.manifest.to_bytes()))

    def _flush(self) -> None:
        """Give what waits to the thread, once it has committed what it had; its errors come here."""
        if self._committed is not None:
            self._committed.result()
        self._committed = self._thread.submit(self._commit, self._items)
        self._items, self._bytes = [], 0

    def _commit(self, items: Sequence[tuple[bytes, bytes]]) -> None:
        lmdb, environment = import_lmdb(), self._environment
        while True:
            try:
                with environment.begin(write=True) as transaction:
                    for key, content in items:
                        transaction.put(key, content, append=key != MANIFEST_KEY)
                if os.path.getsize(self.path) < (size := bytes_needed(environment)):
                    os.truncate(self.path, size)  # free pages at the end, which LMDB does not write
                return
            except lmdb.MapFullError:
                environment.set_mapsize(2 * environment.info()["map_size"])
            except lmdb.Error as error:
                # Of a full disk LMDB says that it had an input or output error.
                size, free = sum(len(content) for _, content in items), shutil.disk_usage(self.path.parent).free
                kept = "What was packed before is kept"
                if free >= 2 * size + (1 << 20):
                    raise LMDBError(f"{self.path} cannot be written: {error}. {kept}") from error
                words = f"the disk of {self.path} is full: {free:,} bytes are free, and the next samples need {size:,}"
                raise OSError(errno.ENOSPC, f"{words}. {kept}: make room, and run the same command again") from error
