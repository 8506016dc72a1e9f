"""pack: any source into one LMDB, which LMDBSource reads.

Workers load samples and make blobs of them; the main process puts these, in the order of their indices, into
transactions of 64 MiB or two seconds. Each index is read once. A pack that was stopped goes on after the last sample
that was committed; four samples that are there are read again and compared, or it might be another source.

What a sample is made of has to be known to `blob`: nothing is pickled. The first sample that holds anything else ends
the packing with its place in words; if that is the very first one, nothing has been written.

LMDB has one writer: `flock` locks the file until the process ends. The map of the file doubles when LMDB says that it
is full.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_stocache.cache.codec import UnsupportedSampleError
from lightning_stocache.node.parent import end_with_parent
from lightning_stocache.source.access import check_source
from lightning_stocache.source.blob import BlobError, decode_blob, encode_blob
from lightning_stocache.source.file_samples import FileSamples
from lightning_stocache.source.generators import Generators, owned_generators
from lightning_stocache.source.lmdb_file import LMDBError, LMDBFile, bytes_needed, import_lmdb
from lightning_stocache.source.pack_manifest import MANIFEST_KEY, PackManifest, key_of
from lightning_stocache.source.same_sample import same_sample

if sys.platform != "win32":
    import fcntl
if TYPE_CHECKING:
    import lmdb

__all__ = ["PackError", "pack"]

COMMIT_BYTES = 64 << 20  # a commit of 16 MiB has a third of the speed
COMMIT_SECONDS = 2.0
FIRST_MAP_BYTES = 16 << 20
_SAME = ("source", "samples", "encoded", "fingerprint")
_COMPARED = 4  # samples of a pack that is gone on with
_WATCHED = 8  # reads of each process that are looked at for draws
_PER_MESSAGE, _MESSAGES = 8, 4  # of a worker: samples, and messages that may wait while a commit is written
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
    blobs = _Blobs(FileSamples(source) if encoded else source, allow_random or encoded)
    classes = getattr(source, "classes", None)
    named = isinstance(classes, list | tuple) and all(type(name) is str for name in classes)
    title = f"{type(source).__module__}.{type(source).__qualname__}"
    manifest = PackManifest(len(blobs), title, encoded, fingerprint, tuple(cast(Any, classes)) if named else ())
    with _locked(Path(path)) as lock:
        target = _Target(Path(path), manifest)
        known = {} if allow_random else target.known
        missing = range(target.done, len(blobs))
        samples: Any = zip(chain(known, missing), _load(blobs, chain(known, missing), workers, lock, path), strict=True)
        if progress:
            from tqdm import tqdm  # its lock is a semaphore, which only a bar needs

            begin = target.done - len(known)
            samples = tqdm(samples, total=len(blobs), initial=begin, unit=" samples", desc="pack", disable=None)
        complete = False
        try:
            for number, blob in samples:
                if isinstance(blob, PackError):
                    raise blob
                if number in known:
                    blobs.compare(blob, known[number], number, path)
                else:
                    target.put(number, blob)
            complete = True
        finally:
            target.close(complete)
    return len(missing)


class _Blobs(Dataset[Any]):
    """The samples of a source as blobs. An error is a value, so that what came before it arrives."""

    def __init__(self, source: Any, allow_random: bool) -> None:
        self.source, self.allow_random = source, allow_random
        self.title = type(source.source if isinstance(source, FileSamples) else source).__name__
        self._watched = 0
        self._generators: Generators | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> bytes | PackError:
        try:
            return encode_blob(self._load(index), index)
        except PackError as error:
            return PackError(f"sample {index} of {self.title}: {error}")
        except UnsupportedSampleError as error:
            return PackError(f"sample {index} of {self.title}: {error}. {_WHAT_CAN}")
        except Exception as error:  # the source is the user's, and may raise what no worker can send
            failure = PackError(f"sample {index} of {self.title}: {type(error).__name__}: {error}")
            failure.add_note(traceback.format_exc())
            return failure

    def _load(self, index: int) -> Any:
        if self.allow_random or self._watched == _WATCHED:
            return self.source[index]
        self._watched += 1
        if self._generators is None:
            self._generators = Generators(owned_generators(self.source))
        before = self._generators.state()
        sample = self.source[index]
        after = self._generators.state()
        if moved := [name for name in before if before[name] != after[name]]:
            raise PackError(
                f"reading it moves the generator of {' and '.join(moved)}: one draw would be frozen for all epochs. "
                "Pack the deterministic part, and give the rest to LMDBSource as transform=; of image folders, "
                "`encoded` packs the files; allow_random freezes the draw"
            )
        return sample

    def compare(self, blob: bytes, known: bytes, number: int, path: str | os.PathLike[str]) -> None:
        """Raise LMDBError if the pack has another sample than the source gives now."""
        try:
            same = blob == known or same_sample(decode_blob(blob, number), decode_blob(known, number))
        except BlobError:
            same = False
        if not same:
            raise LMDBError(
                f"{os.fspath(path)} holds other data: its sample {number} is another one than {self.title} gives now. "
                "Give another path, or remove it first"
            )


def _load(
    blobs: _Blobs, numbers: Iterable[int], workers: int, lock: int, path: str | os.PathLike[str]
) -> Iterator[bytes | PackError]:
    """The blobs of these indices, in their order, or the error that took the place of one."""
    if not workers:
        yield from map(blobs.__getitem__, numbers)
        return
    loader = DataLoader(
        blobs,
        _PER_MESSAGE,
        sampler=cast(Any, numbers),
        num_workers=workers,
        prefetch_factor=_MESSAGES,
        collate_fn=list,
        worker_init_fn=partial(_begin, lock, path),
        generator=torch.Generator(),  # nothing is drawn from the user's
    )
    try:
        for batch in loader:
            yield from batch
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        raise PackError(
            f"a worker that loads {blobs.title} has died ({error}): if it was killed for want of memory, take fewer "
            "workers. What was packed is kept: run the same command again"
        ) from error


def _begin(lock: int, path: str | os.PathLike[str], worker: int) -> None:
    """What a worker does first: a killed parent must leave neither it nor its lock behind."""
    try:
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            os.close(lock)
    except OSError:  # spawned: it was never there
        pass
    end_with_parent()  # torch's worker would wait for ever, to send what nobody reads


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """A descriptor that holds the lock of the file. The file is made, and goes again if nothing is written to it."""
    import_lmdb()
    if sys.platform == "win32":
        raise LMDBError("Windows has not the locks that packing needs: pack on Linux or macOS, read it here")
    if path.is_dir():
        raise LMDBError(f"{path} is a folder: give the path of a file that does not exist yet")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} does not exist: {path} cannot be made in it")
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise LMDBError(f"another process is packing into {path}: wait for its end") from None
    try:
        yield lock
    finally:
        if path.exists() and not path.stat().st_size:
            path.unlink()
        os.close(lock)


class _Target:
    """An LMDB that is locked: what lies there already, and what waits to be written."""

    def __init__(self, path: Path, manifest: PackManifest) -> None:
        self.path, self.manifest = path, manifest
        self.done, self.known = 0, dict[int, bytes]()
        """Samples that are there, and the blobs of some of them, the last one's too."""
        self._complete = False
        self._items: list[tuple[bytes, bytes]] = []
        self._bytes, self._since = 0, time.monotonic()
        self._environment: lmdb.Environment | None = None
        if path.stat().st_size:  # else it is new, or a process was killed before its first commit
            self._examine()

    def put(self, number: int, blob: bytes) -> None:
        """Write a sample, with those before it if it is time for a commit."""
        self._items.append((key_of(number), blob))
        self._bytes += len(blob)
        if self._bytes >= COMMIT_BYTES or time.monotonic() - self._since >= COMMIT_SECONDS:
            self._commit(complete=False)

    def close(self, complete: bool) -> None:
        """Write what waits. `complete`: whether that is all."""
        try:
            if self._items or (complete and not self._complete):
                self._commit(complete)
        finally:
            if self._environment is not None:
                self._environment.close()

    def _examine(self) -> None:
        """Find out which samples are there; refuse what is none of ours."""
        other, way = f"{self.path} is not overwritten: it is", "give another path, or remove it first"
        try:
            file = LMDBFile(self.path)
        except LMDBError as error:
            raise LMDBError(f"{other} something else ({error}): {way}") from error
        if (content := file.get(MANIFEST_KEY)) is None:
            if file.entries:
                raise LMDBError(f"{other} an LMDB that this package has not packed: {way}")
            return
        try:
            known = PackManifest.parse(content)
        except ValueError as error:
            raise LMDBError(f"{other} a pack that cannot be gone on with ({error}): {way}") from None
        pairs = {name: (getattr(known, name), getattr(self.manifest, name)) for name in _SAME}
        if differing := ", ".join(f"{name} {a!r}, here {b!r}" for name, (a, b) in pairs.items() if a != b):
            raise LMDBError(f"{other} a pack of another source ({differing}): {way}")
        self._complete, self.done = known.complete, file.entries - 1
        last = self.done - 1
        for number in sorted({part * last // (_COMPARED - 1) for part in range(_COMPARED)}) if self.done else ():
            self.known[number] = file.get(key_of(number)) or b""
        if self.done > known.samples or b"" in self.known.values():
            raise LMDBError(f"{other} a damaged pack, of {self.done:,} of {known.samples:,} samples: {way}")
        file.close()

    def _commit(self, complete: bool) -> None:
        try:
            self._write(replace(self.manifest, complete=complete).to_bytes())
        except (import_lmdb().Error, MemoryError, OverflowError) as error:
            raise self._refusal(error) from error
        self._items, self._bytes, self._since = [], 0, time.monotonic()

    def _write(self, manifest: bytes) -> None:
        """Write what waits and the manifest in one transaction; again with a larger map if it was too small."""
        lmdb = import_lmdb()
        if self._environment is None:
            size = max(2 * self.path.stat().st_size, FIRST_MAP_BYTES)
            self._environment = lmdb.open(str(self.path), subdir=False, lock=False, readahead=False, map_size=size)
        environment = self._environment
        try:
            with environment.begin(write=True) as transaction:
                transaction.cursor().putmulti(self._items, append=True)
                if transaction.get(MANIFEST_KEY) != manifest:
                    transaction.put(MANIFEST_KEY, manifest)
        except lmdb.MapFullError:
            environment.set_mapsize(2 * environment.info()["map_size"])
            self._write(manifest)
        if self.path.stat().st_size < (size := bytes_needed(environment)):
            os.truncate(self.path, size)  # free pages at the end, which LMDB does not write

    def _refusal(self, error: Exception) -> Exception:
        """Why it could not be written: LMDB says of a full disk that it had an input or output error."""
        free = shutil.disk_usage(self.path.parent).free
        if free < 2 * self._bytes + (1 << 20):
            return OSError(
                errno.ENOSPC,
                f"the disk of {self.path} is full: {free:,} bytes are free, and the next samples need "
                f"{self._bytes:,}. What was packed before is kept: make room, and run the same command again",
            )
        return LMDBError(
            f"{self.path} cannot be written: {error}. What was packed before is kept. (LMDB needs as much address "
            "space as the file is long: `ulimit -v`)"
        )
