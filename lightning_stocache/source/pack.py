"""pack: any source into one LMDB, which LMDBSource reads.

Workers load samples and encode them (`blob`). The main process takes the blobs in the order of their indices; a thread
commits 64 MiB, or those of two seconds, while the next ones are loaded (without it, packing has 0.5 to 0.9 of its
speed). The file is locked by `flock`, which the kernel frees when the process and its workers have ended.

Each index is read once. A pack that was stopped goes on after the last committed sample: the number of keys says which.
Up to four committed samples are read again and compared, so that no other source goes on with it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from lightning_stocache.cache.codec import UnsupportedSampleError
from lightning_stocache.node.errors import text_of, trace_of
from lightning_stocache.node.processes import THREAD_PREFIX, end_with_parent
from lightning_stocache.source.access import check_source
from lightning_stocache.source.blob import decode_blob, encode_blob
from lightning_stocache.source.encoded import packed_reader
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.lmdb_source import (
    MANIFEST_KEY,
    VERSION,
    LMDBError,
    LMDBFile,
    bytes_needed,
    key_of,
)
from lightning_stocache.source.probe import FEW, SOME, spread
from lightning_stocache.source.samples import same_sample
from lightning_stocache.source.walk import class_name

if sys.platform != "win32":
    import fcntl

__all__ = ["PackError", "pack"]

BATCH_BYTES = 64 << 20  # a commit of 16 MiB has a third of the speed
BATCH_SECONDS = 2.0
MAP_BYTES = 4 << 40  # of addresses, not of memory: the file is as long as what was committed
_WATCHED = SOME  # reads of each process that are watched for draws


class PackError(RuntimeError):
    """A sample cannot be packed; the message says which one, and why. The samples before it are kept."""


def pack(
    source: Dataset[Any],
    path: str | os.PathLike[str],
    *,
    encoded: bool = False,
    workers: int = 0,
    fingerprint: str = "",
    freeze_random: bool = False,
    progress: bool = False,
) -> int:
    """Write all samples of a source into an LMDB. After a stop at any moment, the same call goes on from there.

    Args:
        source: a map-style dataset. Its samples are tensors, arrays, numbers, strings, bytes, None and images of PIL
            (which are kept as their pixels), by themselves or in dicts, lists and tuples.
        path: a file that does not exist yet, or that the same call has begun.
        encoded: pack files instead of samples: the image files of torchvision's ImageFolder and its kin, without their
            transforms, which can be given to LMDBSource; or the results of `read(index)`, if the source has methods
            `read` and `decode`.
        workers: processes that load; 0: this one, which is faster if a sample loads within 0.2 ms.
        fingerprint: your version of the data, where class and length of the source do not tell it. A pack with another
            fingerprint is refused.
        freeze_random: pack a source that draws random numbers when it is read, with its first draw frozen.
        progress: show a progress bar.

    Returns:
        The number of samples that this call has written; 0 if all were there.

    Raises:
        LMDBError: the path holds something else or a pack of another source, another process packs into it, it cannot
            be written, or it would be larger than 4 TiB.
        PackError: a sample cannot be packed, or its source draws random numbers.
        TypeError, ValueError: the source is no map-style dataset, or empty; (`encoded`) its files are not known.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/squares.lmdb"
        >>> pack([number**2 for number in range(10)], path), pack([number**2 for number in range(10)], path)
        (10, 0)
    """
    check_source(source, cached=_Blobs)
    blobs = _Blobs(source, encoded, freeze_random)
    classes: Any = getattr(source, "classes", None)
    named = isinstance(classes, list | tuple) and all(type(name) is str for name in classes)
    manifest = {
        "version": VERSION,
        "source": class_name(type(source)),
        "samples": len(blobs),
        "encoded": encoded,
        "fingerprint": fingerprint,
        "classes": list(classes) if named else [],
    }
    hidden = None if progress else True  # None: where there is no terminal
    with (
        _Writer(Path(path), manifest) as writer,
        tqdm(desc="pack", total=len(blobs), initial=writer.done, unit=" samples", disable=hidden) as bar,
    ):
        if freeze_random:
            writer.known.clear()  # another read gives other samples
        loader = DataLoader(
            blobs,
            batch_size=None,
            sampler=cast(Any, chain(writer.known, range(writer.done, len(blobs)))),
            num_workers=workers,
            collate_fn=tuple,
            worker_init_fn=_begin,
            generator=torch.Generator(),  # nothing is drawn from the user's
        )
        for index, blob in loader:
            if isinstance(blob, PackError):
                raise blob
            if index in writer.known:
                writer.compare(index, blob)
                continue
            writer.put(index, blob)
            bar.update()
    return len(blobs) - writer.done


def _begin(worker: int) -> None:
    """Begin a worker, which has a copy of the lock: it ends soon after its parent."""
    end_with_parent()


class _Blobs(Dataset[Any]):
    """The samples of a source as indices with blobs; a PackError in place of a sample that cannot be packed."""

    def __init__(self, source: Any, encoded: bool, freeze_random: bool) -> None:
        self._source = source
        self._read = packed_reader(source) if encoded else source.__getitem__
        self._left = 0 if freeze_random else _WATCHED  # in each process

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[int, bytes | PackError]:
        try:
            return index, encode_blob(self._load(index), index)
        except Exception as error:  # the source is the user's, and may raise anything, also unpicklable errors
            name = "" if isinstance(error, PackError | UnsupportedSampleError) else f"{type(error).__name__}: "
            failure = PackError(f"sample {index} of {type(self._source).__name__}: {name}{text_of(error)}")
            failure.add_note(trace_of(error))
            return index, failure

    def _load(self, index: int) -> Any:
        if not self._left:
            return self._read(index)
        self._left -= 1
        with Generators(self._source).watch() as moved:
            sample = self._read(index)
        if moved:
            raise PackError(
                f"reading it moves the generator of {' and '.join(moved)}: one draw would be frozen for all epochs. "
                "Pack the deterministic part, and give the rest to LMDBSource as transform=; of image folders, "
                "`encoded` packs the files; freeze_random freezes the draw"
            )
        return sample


class _Writer:
    """Writes one LMDB, from its first sample or from where another process has stopped.

    Args:
        path: path of the file.
        manifest: the manifest of the pack.

    Raises:
        LMDBError: the path holds something else, another process packs into it, or it cannot be written.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        import lmdb

        self.path = path
        self.manifest = manifest
        self._lmdb = lmdb
        self.done, self.known = 0, dict[int, bytes]()
        """The number of committed samples, and the blobs of those that are compared."""
        self._items: list[tuple[bytes, bytes]] = []
        self._bytes, self._last = 0, time.monotonic()
        self._committed: Future[None] | None = None
        self._is_complete = False
        self._environment: Any = None
        if sys.platform == "win32":
            raise LMDBError("Windows has not the locks that packing needs: pack on Linux or macOS, read it here")
        self._lock_file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.getsize(path):
                self._examine()
        except BaseException as error:
            os.close(self._lock_file)
            if isinstance(error, BlockingIOError):
                raise LMDBError(f"another process is packing into {path}: wait for its end") from None
            raise
        self._thread = ThreadPoolExecutor(1, f"{THREAD_PREFIX}lmdb")

    def compare(self, index: int, blob: bytes) -> None:
        """Refuse to go on if the source gives another sample than the committed one."""
        known = self.known[index]
        if blob != known and not same_sample(decode_blob(blob, index), decode_blob(known, index)):
            raise LMDBError(
                f"{self.path} holds other data: its sample {index} is another one than {self.manifest['source']} gives "
                "now. Give another path, or remove it first"
            )

    def put(self, index: int, blob: bytes) -> None:
        """Add the next sample to the next commit. Waits while the last commit runs if this one is due."""
        self._items.append((key_of(index), blob))
        self._bytes += len(blob)
        if self._bytes >= BATCH_BYTES or time.monotonic() - self._last >= BATCH_SECONDS:
            self._flush(complete=False)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        """Commit the waiting samples, marked as complete if there was no error; release the file."""
        try:
            if self._items or (kind is None and not self._is_complete):
                self._flush(complete=kind is None)
            if self._committed is not None:
                self._committed.result()
        finally:
            self._thread.shutdown()
            if self._environment is not None:
                self._environment.close()
            if not self.done and self._committed is None:  # an LMDB without a key
                self.path.unlink()
            os.close(self._lock_file)

    def _examine(self) -> None:
        """Count the committed samples; refuse a file that the same call has not begun."""
        try:
            file = LMDBFile.shared(str(self.path))
            stored, self.done = file.manifest()
            if stored is None and self.done:
                raise LMDBError("an LMDB that this package has not packed")
            names = ("source", "samples", "encoded", "fingerprint")
            pairs = [(name, stored[name], self.manifest[name]) for name in names] if stored is not None else []
            if differing := ", ".join(f"{name} {old!r}, here {new!r}" for name, old, new in pairs if old != new):
                raise LMDBError(f"a pack of another source: {differing}")
        except LMDBError as error:
            raise LMDBError(
                f"{self.path} is not overwritten: {error}. Give another path, or remove it first"
            ) from error
        self._is_complete = stored is not None and stored["complete"]
        self.known = {index: file.get(key_of(index)) or b"" for index in spread(range(self.done), FEW)}

    def _flush(self, complete: bool) -> None:
        """Give the waiting samples to the thread after its last commit, whose error is raised here."""
        if self._committed is not None:
            self._committed.result()
        if self._environment is None:  # late: a process that has a whole pack open may call `pack` again
            self._environment = self._lmdb.open(
                str(self.path), subdir=False, lock=False, readahead=False, map_size=MAP_BYTES
            )
        manifest = json.dumps(self.manifest | {"complete": complete}).encode()
        self._committed = self._thread.submit(self._commit, [*self._items, (MANIFEST_KEY, manifest)])
        self._items = []
        self._bytes = 0
        self._last = time.monotonic()

    def _commit(self, items: list[tuple[bytes, bytes]]) -> None:
        try:
            with self._environment.begin(write=True) as transaction:
                for key, content in items:
                    transaction.put(key, content, append=key != MANIFEST_KEY)
            if os.path.getsize(self.path) < (size := bytes_needed(self._environment)):
                os.truncate(self.path, size)  # LMDB does not write free pages at the end
        except self._lmdb.MapFullError as error:
            raise LMDBError(
                f"{self.path} would be larger than {MAP_BYTES:,} bytes, the most that `pack` writes into a file. Pack "
                "parts of the source (torch.utils.data.Subset) into a file each, and join them with ConcatDataset"
            ) from error
        except self._lmdb.Error as error:
            free = shutil.disk_usage(self.path.parent).free
            raise LMDBError(
                f"{self.path} cannot be written ({error}); its disk has {free:,} bytes free. What was packed before is "
                "kept: make room, and run the same command again"
            ) from error
