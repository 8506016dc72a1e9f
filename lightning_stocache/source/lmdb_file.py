"""An LMDB as a process has it open, and what `pack` writes into one.

LMDB forbids to use an environment across a fork, and to open a file twice in one process. So each process opens a file
on first use, and all who read it there share it; what a fork has brought along is closed and opened anew. It is opened
without locks, which a shared filesystem may not have and a read-only one does not allow: nobody may write to the file
meanwhile.

LMDB maps the file, and a page that is missing from it is a SIGBUS. So its length is compared with what its last commit
needs when it is opened, and before each read.

In an LMDB that `pack` has written a sample lies as a blob (`blob`) under its index in twelve decimal digits, so LMDB's
order is that of the indices. A manifest in JSON lies under a key of its own. Every commit has it, with `complete:
false` until the last sample is there. The number of keys beside it is the number of samples that are packed. Commits
are atomic, so resuming needs nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from dataclasses import asdict, dataclass
from typing import Any

from lightning_stocache.node.files import lock_owner

__all__ = ["MANIFEST_KEY", "LMDBError", "LMDBFile", "PackManifest", "bytes_needed", "import_lmdb", "key_of"]

log = logging.getLogger(__name__)

MANIFEST_KEY = b"#lightning_stocache"  # before the digits
_FORMAT = {"format": "lightning_stocache pack", "version": 1}


class LMDBError(RuntimeError):
    """An LMDB cannot be read, or not written; the message says which, why, and what to do."""


def import_lmdb() -> Any:
    """The package lmdb.

    Raises:
        ModuleNotFoundError: it is not installed; the message names the extra.
    """
    try:
        import lmdb
    except ModuleNotFoundError as error:
        words = 'LMDB needs the package lmdb: pip install "lightning-stocache[lmdb]"'
        raise ModuleNotFoundError(words, name="lmdb") from error
    return lmdb


def bytes_needed(environment: Any) -> int:
    """How long the file of an environment must be for its last commit."""
    return int((environment.info()["last_pgno"] + 1) * environment.stat()["psize"])


class LMDBFile:
    """An LMDB that this process has open, for reading; it is closed with the last reference to it.

    Args:
        file: the file with the data.

    Raises:
        LMDBError: it is no LMDB, is truncated, or this process has it open otherwise.
    """

    def __init__(self, file: str) -> None:
        self.pid, self.file = os.getpid(), file
        lmdb = import_lmdb()
        try:
            # No readahead: for samples in random order it reads what nobody has asked for.
            self._environment = lmdb.open(
                file, subdir=False, readonly=True, lock=False, readahead=False, create=False, max_spare_txns=4
            )
        except lmdb.Error as error:
            why = "is not an LMDB, is damaged, or may not be read"
            if "already open" in str(error):
                why = "is open in this process by other code, and LMDB allows that once: close that environment"
            raise LMDBError(f"{file} {why} ({error})") from error
        self._needed = bytes_needed(self._environment)
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        self.version = status.st_size, status.st_mtime_ns
        """What changes when the file is written to, or replaced."""

    @classmethod
    def of(cls, path: str) -> LMDBFile:
        """The one that this process has open, or a new one.

        Args:
            path: of the file, or of a folder with a `data.mdb`.

        Raises:
            FileNotFoundError: there is none.

        Example:
            >>> LMDBFile.of("photos.lmdb")
            Traceback (most recent call last):
                ...
            FileNotFoundError: there is no LMDB photos.lmdb: give the path of its file, or of the folder of its data.mdb
        """
        file = os.path.join(path, "data.mdb") if os.path.isdir(path) else path
        with _opening:
            try:
                status = os.stat(file)
            except FileNotFoundError:
                way = "give the path of its file, or of the folder of its data.mdb"
                raise FileNotFoundError(f"there is no LMDB {path}: {way}") from None
            known = _files.get((status.st_dev, status.st_ino))
            if known is None or known.pid != os.getpid():
                if known is not None:
                    known.close()  # without locks that is this process's own affair
                known = _files[status.st_dev, status.st_ino] = cls(file)
            known.check()
            return known

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None.

        Raises:
            LMDBError: it cannot be read.
        """
        self.check()
        try:
            with self._environment.begin() as transaction:
                value: bytes | None = transaction.get(key)
                return value
        except import_lmdb().Error as error:
            raise LMDBError(f"{self.file}: key {key!r} cannot be read: {error}") from error

    def keys(self) -> list[bytes]:
        """All keys, in LMDB's order, which is that of their bytes."""
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            return list(cursor.iternext(keys=True, values=False))

    @property
    def entries(self) -> int:
        """How many keys there are."""
        return int(self._environment.stat()["entries"])

    def check(self) -> None:
        """Raise LMDBError if the file is shorter than LMDB needs."""
        if (size := os.fstat(self._descriptor).st_size) < self._needed:
            raise LMDBError(
                f"{self.file} is truncated: it has {size:,} bytes, and its last commit needs {self._needed:,}. Copy or "
                "pack it again. (If it was never copied, `mdb_copy -c` writes the free pages at its end)"
            )

    def warn_of_writer(self) -> None:
        """Say that another process has it open: it is read without locks."""
        folder, name = os.path.split(self.file)
        lock_file = os.path.join(folder, "lock.mdb") if name == "data.mdb" else f"{self.file}-lock"
        try:
            with open(lock_file, "rb") as file:
                holder = lock_owner(file.fileno(), 0)
        except OSError:  # there is none, or it may not be read
            return
        if holder is not None:
            words = "If that writes to it, wait until it has ended: it is read without locks, and samples could be torn"
            log.warning("%s is open in process %d, too. %s", self.file, holder, words)

    def close(self) -> None:
        """Close it, in a process that cannot use it."""
        self._environment.close()


_files: weakref.WeakValueDictionary[tuple[int, int], LMDBFile] = weakref.WeakValueDictionary()
_opening = threading.Lock()
if hasattr(os, "register_at_fork"):
    # A thread that was opening is not there in the child, and would never let go.
    os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_opening.release)


def key_of(index: int) -> bytes:
    """The key of a packed sample.

    Example:
        >>> key_of(7)
        b'000000000007'
    """
    return b"%012d" % index


@dataclass(frozen=True)
class PackManifest:
    """What an LMDB was packed from.

    Args:
        samples: how many there are, once all are packed.
        source: class of the dataset.
        encoded: whether images lie there as their files.
        fingerprint: the user's word for whatever else decides what the samples are.
        classes: names of classes that the source had, else empty.
        complete: whether all samples are there.

    Example:
        >>> manifest = PackManifest(3, "photos.Photos")
        >>> PackManifest.parse(manifest.to_bytes()) == manifest
        True
    """

    samples: int
    source: str
    encoded: bool = False
    fingerprint: str = ""
    classes: tuple[str, ...] = ()
    complete: bool = False

    def to_bytes(self) -> bytes:
        """As it lies in the LMDB."""
        return json.dumps(_FORMAT | asdict(self)).encode()

    @classmethod
    def parse(cls, content: bytes) -> PackManifest:
        """Read one.

        Raises:
            LMDBError: it is damaged, or one of another version.
        """
        try:
            read = json.loads(content)
            form = {key: read.pop(key) for key in _FORMAT}
            if form == _FORMAT:
                return cls(**read | {"classes": tuple(read["classes"])})
        except Exception as error:  # whatever lies there
            raise LMDBError(f"its manifest is damaged ({error!r})") from error
        raise LMDBError(f"it was packed as {form}, and this package reads {_FORMAT}: pack it again")
