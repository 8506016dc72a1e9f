"""Samples into an LMDB, committed by a thread while others are loaded.

LMDB has one writer. Here that is a thread: once 64 MiB of samples wait, or the first of them has waited for two
seconds, the thread writes them in one transaction, while the next ones are gathered. So what a killed process leaves is
a whole number of samples, from the first on. The map grows by doubling where LMDB says that it is full, and the
transaction is run again. The file is locked by `flock`, so two processes do not pack into it, and the kernel frees it
when they end.

The file is not made before the first sample is there.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_stocache.source.lmdb_file import (
    MANIFEST_KEY,
    LMDBError,
    LMDBFile,
    PackManifest,
    bytes_needed,
    import_lmdb,
    key_of,
)

if sys.platform != "win32":
    import fcntl

__all__ = ["LMDBWriter"]

BATCH_BYTES = 64 << 20  # a commit of 16 MiB has a third of the speed
BATCH_SECONDS = 2.0
FIRST_MAP_BYTES = 16 << 20
_COMPARED = 4  # samples of a pack that is gone on with

Item = tuple[bytes, bytes]


class LMDBWriter:
    """Writes one LMDB, from its first sample or from where another process has stopped.

    Args:
        path: of the file.
        manifest: what is packed.

    Raises:
        LMDBError: the path is taken by something else, another process packs into it, or (`put`, `close`) it cannot be
            written.
        OSError: its folder does not exist, it may not be written, or (`put`, `close`) the disk is full.
    """

    def __init__(self, path: Path, manifest: PackManifest) -> None:
        self.path, self.manifest = path, manifest
        self.done, self.known = 0, dict[int, bytes]()
        """Samples that lie there already, and the blobs of some of them, the last one's too."""
        self.complete = False
        self.lock_file = -1
        """Descriptor that holds the lock: whoever is forked closes it, or it is held until that one ends; -1: none."""
        self._environment: Any = None
        self._next = 0
        self._items: list[Item] = []
        self._bytes, self._since = 0, 0.0
        self._thread = ThreadPoolExecutor(1, "lmdb-writer")
        self._committed: Future[None] | None = None
        import_lmdb()
        if not path.parent.is_dir():
            raise FileNotFoundError(f"the folder {path.parent} does not exist: {path} cannot be made in it")
        if os.path.lexists(path):
            try:
                self._lock(os.O_RDWR)
                self._examine()
            except BaseException:
                self._unlock()
                raise
        elif not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path} cannot be made: the folder {path.parent} may not be written by this user")

    def put(self, blob: bytes) -> None:
        """Write the next sample, soon. Waits while too many wait to be written."""
        if self._environment is None:
            self._open()
        if not self._items:
            self._since = time.monotonic()
        self._items.append((key_of(self._next), blob))
        self._bytes += len(blob)
        self._next += 1
        if self._bytes >= BATCH_BYTES or time.monotonic() - self._since >= BATCH_SECONDS:
            self._flush()

    def close(self, *, complete: bool) -> None:
        """Write what waits, and let the file go.

        Args:
            complete: whether that is all.
        """
        try:
            if complete and not self.complete:
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
            self._unlock()

    # ---- what is there ----

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

    def _unlock(self) -> None:
        if self.lock_file >= 0:
            os.close(self.lock_file)
            self.lock_file = -1

    def _examine(self) -> None:
        """Find out how many samples are there; refuse what is none of ours."""
        if os.path.getsize(self.path) == 0:  # a process was killed before its first commit
            return
        try:
            file = LMDBFile(self.path)
            content = file.get(MANIFEST_KEY)
            if content is None and file.entries:
                raise LMDBError("an LMDB that this package has not packed")
            if content is None:
                return
            known = PackManifest.parse(content)
            if differing := _differences(known, self.manifest):
                raise LMDBError(f"a pack of another source: {differing}")
        except LMDBError as error:
            raise LMDBError(
                f"{self.path} is not overwritten: {error}. Give another path, or remove it first"
            ) from error
        self.complete, self.done = known.complete, file.entries - 1
        some = {number * (self.done - 1) // (_COMPARED - 1) for number in range(_COMPARED)} if self.done else ()
        self.known = {index: file.get(key_of(index)) or b"" for index in sorted(some)}
        self._next = self.done
        file.close()

    # ---- writing ----

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

    def _commit(self, items: Sequence[Item]) -> None:
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
                raise self._failure(error, sum(len(content) for _, content in items)) from error

    def _failure(self, error: Exception, size: int) -> Exception:
        """Why it could not be written: LMDB says of a full disk that it had an input or output error."""
        kept = "What was packed before is kept"
        free = shutil.disk_usage(self.path.parent).free
        if free < 2 * size + (1 << 20):
            words = f"the disk of {self.path} is full: {free:,} bytes are free, and the next samples need {size:,}"
            return OSError(errno.ENOSPC, f"{words}. {kept}: make room, and run the same command again")
        return LMDBError(f"{self.path} cannot be written: {error}. {kept}")


def _differences(known: PackManifest, given: PackManifest) -> str:
    """What two manifests say differently, in words."""
    names = ("source", "samples", "encoded", "fingerprint")
    pairs = ((name, getattr(known, name), getattr(given, name)) for name in names)
    return ", ".join(f"{name} {there!r}, here {here!r}" for name, there, here in pairs if there != here)
