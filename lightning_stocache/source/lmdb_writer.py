"""Samples into an LMDB, by a thread that commits while others are loaded.

LMDB has one writer. Here that is a thread with a queue of at most 64 MiB: it takes all that is waiting, once there are
64 MiB or two seconds have passed, and writes it in one transaction, so what a killed process leaves is a whole number
of samples, from the first on. The map grows by doubling where LMDB says that it is full, and the transaction is run
again. The file is locked by `flock`, so two processes do not pack into it, and the kernel frees it when they end.

The file is not made before the first sample is there.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_stocache.source.lmdb_file import LMDBError, LMDBFile, bytes_needed, import_lmdb
from lightning_stocache.source.pack_manifest import MANIFEST_KEY, PackManifest, key_of

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    import lmdb

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
        FileNotFoundError: its folder does not exist.
        PermissionError: it may not be written.
    """

    def __init__(self, path: Path, manifest: PackManifest) -> None:
        self.path, self.manifest = path, manifest
        self.done, self.known = 0, dict[int, bytes]()
        """Samples that lie there already, and the blobs of some of them, the last one's too."""
        self.complete = False
        self._lock_file = -1
        self._environment: lmdb.Environment | None = None
        self._next = 0
        self._items: list[Item] = []
        self._bytes, self._since = 0, 0.0
        self._changed = threading.Condition()
        self._ended, self._error = False, list[BaseException]()
        self._thread: threading.Thread | None = None
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

    @property
    def lock_file(self) -> int:
        """Descriptor that holds the lock: whoever is forked closes it, or it is held until that one ends; -1: none."""
        return self._lock_file

    def put(self, blob: bytes) -> None:
        """Write the next sample, soon. Waits while too many wait to be written."""
        if self._thread is None:
            self._begin()
        with self._changed:
            while self._bytes >= BATCH_BYTES and not self._error:
                self._changed.wait()
            self._raise()
            if not self._items:
                self._since = time.monotonic()
            self._items.append((key_of(self._next), blob))
            self._bytes += len(blob)
            self._next += 1
            self._changed.notify_all()

    def close(self, *, complete: bool) -> None:
        """Write what waits, and let the file go.

        Args:
            complete: whether that is all.
        """
        last = (
            [(MANIFEST_KEY, replace(self.manifest, complete=True).to_bytes())] if complete and not self.complete else []
        )
        try:
            if self._thread is not None:
                with self._changed:
                    self._items += last  # in the same commit as the last samples
                    self._ended = True
                    self._changed.notify_all()
                self._thread.join()
                self._raise()
            elif last:
                self._open()
                self._commit(last)
        finally:
            environment, self._environment = self._environment, None
            if environment is not None:
                environment.close()
            self._unlock()

    # ---- what is there ----

    def _lock(self, flags: int) -> None:
        if sys.platform == "win32":
            raise LMDBError("Windows has not the locks that packing needs: pack on Linux or macOS, read it here")
        if self.path.is_dir():
            raise LMDBError(f"{self.path} is a folder: give the path of a file that does not exist yet")
        try:
            self._lock_file = os.open(self.path, flags | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise LMDBError(f"another process has begun to pack into {self.path}") from None
        except PermissionError:
            raise PermissionError(f"{self.path} may not be written by this user") from None
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LMDBError(f"another process is packing into {self.path}: wait for its end") from None

    def _unlock(self) -> None:
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def _examine(self) -> None:
        """Find out how many samples are there; refuse what is none of ours."""
        if os.path.getsize(self.path) == 0:  # a process was killed before its first commit
            return
        other = f"{self.path} is not overwritten: it is"
        way = "give another path, or remove it first"
        try:
            file = LMDBFile(self.path)
        except LMDBError as error:
            raise LMDBError(f"{other} something else ({error}): {way}") from error
        content = file.get(MANIFEST_KEY)
        if content is None:
            if file.entries:
                raise LMDBError(f"{other} an LMDB that this package has not packed: {way}")
            return
        try:
            known = PackManifest.parse(content)
        except ValueError as error:
            raise LMDBError(f"{other} a pack that cannot be gone on with ({error}): {way}") from None
        if differing := _differences(known, self.manifest):
            raise LMDBError(f"{other} a pack of another source ({differing}): {way}")
        self.complete, self.done = known.complete, file.entries - 1
        some = {number * (self.done - 1) // (_COMPARED - 1) for number in range(_COMPARED)} if self.done else ()
        self.known = {index: file.get(key_of(index)) or b"" for index in sorted(some)}
        if self.done > known.samples:
            raise LMDBError(
                f"{other} a damaged pack, of {self.done:,} samples where there were {known.samples:,}: {way}"
            )
        self._next = self.done
        file.close()

    # ---- writing ----

    def _open(self) -> None:
        if self._environment is not None:
            return
        if self._lock_file < 0:
            self._lock(os.O_RDWR | os.O_CREAT | os.O_EXCL)
        size = os.path.getsize(self.path)
        self._environment = import_lmdb().open(
            str(self.path), subdir=False, lock=False, readahead=False, map_size=max(2 * size, FIRST_MAP_BYTES)
        )

    def _begin(self) -> None:
        self._open()
        if not self.done:
            self._items.append((MANIFEST_KEY, self.manifest.to_bytes()))
        self._thread = threading.Thread(target=self._run, name="lmdb-writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while items := self._take():
                self._commit(items)
        except BaseException as error:
            with self._changed:
                self._error.append(error)
                self._changed.notify_all()

    def _take(self) -> list[Item]:
        """All that waits, once it is enough or there will be no more."""
        with self._changed:
            while not self._ended and self._bytes < BATCH_BYTES:
                left = self._since + BATCH_SECONDS - time.monotonic()
                if self._bytes and left <= 0:
                    break
                self._changed.wait(left if self._bytes else None)
            items, self._items, self._bytes = self._items, [], 0
            self._changed.notify_all()
            return items

    def _commit(self, items: Sequence[Item]) -> None:
        lmdb, environment = import_lmdb(), self._environment
        assert environment is not None
        while True:
            try:
                with environment.begin(write=True) as transaction:
                    for key, content in items:
                        transaction.put(key, content, append=key != MANIFEST_KEY)
                if os.path.getsize(self.path) < (size := bytes_needed(environment)):
                    os.truncate(self.path, size)  # free pages at the end, which LMDB does not write
                return
            except lmdb.MapFullError:
                self._grow(environment)
            except lmdb.Error as error:
                raise self._refusal(error, sum(len(content) for _, content in items)) from error

    def _grow(self, environment: lmdb.Environment) -> None:
        size = environment.info()["map_size"]
        try:
            environment.set_mapsize(2 * size)
        except (import_lmdb().Error, MemoryError, OverflowError) as error:
            raise LMDBError(
                f"{self.path} cannot grow beyond {size:,} bytes, since that much address space cannot be had "
                f"({error}): look at `ulimit -v`"
            ) from error

    def _refusal(self, error: Exception, size: int) -> Exception:
        """Why it could not be written: LMDB says of a full disk that it had an input or output error."""
        free = shutil.disk_usage(self.path.parent).free
        if free < 2 * size + (1 << 20):
            return OSError(
                errno.ENOSPC,
                f"the disk of {self.path} is full: {free:,} bytes are free, and the next samples need {size:,}. What "
                "was packed before is kept: make room, and run the same command again",
            )
        return LMDBError(f"{self.path} cannot be written: {error}. What was packed before is kept")

    def _raise(self) -> None:
        if self._error:
            raise self._error[0]


def _differences(known: PackManifest, given: PackManifest) -> str:
    """What two manifests say differently, in words."""
    names = ("source", "samples", "encoded", "fingerprint")
    pairs = ((name, getattr(known, name), getattr(given, name)) for name in names)
    return ", ".join(f"{name} {there!r}, here {here!r}" for name, there, here in pairs if there != here)
