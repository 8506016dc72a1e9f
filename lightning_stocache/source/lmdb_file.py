"""An LMDB that many processes read, each with an environment of its own; and the keys that `pack` writes into one.

LMDB forbids to use an environment across a fork, and to open a file twice in one process. So an `LMDBFile` is a path:
its environment is opened on first use in each process, closed and opened anew where a fork has brought one along, and
shared by all LMDBFiles of that file. It is opened without locks, which a shared filesystem may not have and a read-only
one does not allow: nobody may write to the file meanwhile.

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
from collections.abc import Iterator
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
    """An LMDB, for reading.

    Args:
        path: of the file, or of a folder with a `data.mdb`.

    Raises:
        FileNotFoundError: there is none.
        LMDBError: it is no LMDB, is truncated, or this process has it open otherwise.

    Example:
        >>> LMDBFile("photos.lmdb")
        Traceback (most recent call last):
            ...
        FileNotFoundError: there is no LMDB photos.lmdb: give the path of its file, or of the folder of its data.mdb
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._in_folder = os.path.isdir(self.path)
        self._file = os.path.abspath(os.path.join(self.path, "data.mdb") if self._in_folder else self.path)
        self._version = self._find_version()
        self._opened: _Environment | None = None
        self.environment()
        self._warn_of_writer()

    def environment(self) -> _Environment:
        """The environment of this process."""
        if (opened := self._opened) is None or opened.pid != os.getpid():
            if self._find_version() != self._version:
                raise LMDBError(f"{self.path} has changed since it was opened by another process: open it anew")
            self._opened = opened = _Environment.of(self.path, self._file)
        return opened

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None.

        Raises:
            LMDBError: it cannot be read.
        """
        return self.environment().get(key)

    def __iter__(self) -> Iterator[bytes]:
        """All keys, in LMDB's order, which is that of their bytes."""
        with self.environment().lmdb.begin() as transaction, transaction.cursor() as cursor:
            yield from cursor.iternext(keys=True, values=False)

    @property
    def entries(self) -> int:
        """How many keys there are."""
        return int(self.environment().lmdb.stat()["entries"])

    def close(self) -> None:
        """Give the environment of this process up; the next read opens it again."""
        self._opened = None

    def _find_version(self) -> tuple[int, int]:
        """What changes when the file is written to, or replaced."""
        try:
            status = os.stat(self._file)
        except FileNotFoundError:
            way = "give the path of its file, or of the folder of its data.mdb"
            raise FileNotFoundError(f"there is no LMDB {self.path}: {way}") from None
        return status.st_size, status.st_mtime_ns

    def _warn_of_writer(self) -> None:
        lock_file = os.path.join(self.path, "lock.mdb") if self._in_folder else f"{self.path}-lock"
        try:
            with open(lock_file, "rb") as file:
                holder = lock_owner(file.fileno(), 0)
        except OSError:  # there is none, or it may not be read
            return
        if holder is not None:
            log.warning(
                "%s is open in process %d, too. If that writes to it, wait until it has ended: it is read without "
                "locks, and samples could be torn",
                self.path,
                holder,
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}


class _Environment:
    """An environment of one process, shared by all who read this file there.

    Args:
        path: as it was given.
        file: the file with the data.
    """

    def __init__(self, path: str, file: str) -> None:
        self.pid, self.path, self._file = os.getpid(), path, -1
        self.lmdb: Any = None
        lmdb = import_lmdb()
        self._error = lmdb.Error
        try:
            self.lmdb = lmdb.open(
                path,
                subdir=os.path.isdir(path),
                readonly=True,
                lock=False,
                readahead=False,  # for samples in random order it reads what nobody has asked for
                create=False,
                max_spare_txns=4,
            )
        except lmdb.Error as error:
            why = "is not an LMDB, is damaged, or may not be read"
            if "already open" in str(error):
                why = "is open in this process by other code, and LMDB allows that once: close that environment"
            raise LMDBError(f"{path} {why} ({error})") from error
        self._needed = bytes_needed(self.lmdb)
        self._file = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self.check()

    @classmethod
    def of(cls, path: str, file: str) -> _Environment:
        """That of this process, opened if nobody has; one that a fork has brought along is closed first."""
        with _opening:
            status = os.stat(file)
            known = _environments.get((status.st_dev, status.st_ino))
            if known is not None and known.pid == os.getpid():
                known.check()
                return known
            if known is not None:
                known.close()  # without locks that is this process's own affair
            opened = _environments[status.st_dev, status.st_ino] = cls(path, file)
            return opened

    def check(self) -> None:
        """Raise LMDBError if the file is shorter than LMDB needs."""
        if (size := os.fstat(self._file).st_size) < self._needed:
            raise LMDBError(
                f"{self.path} is truncated: it has {size:,} bytes, and its last commit needs {self._needed:,}. Copy or "
                "pack it again. (If it was never copied, `mdb_copy -c` writes the free pages at its end)"
            )

    def get(self, key: bytes) -> bytes | None:
        self.check()
        try:
            with self.lmdb.begin() as transaction:
                value: bytes | None = transaction.get(key)
                return value
        except self._error as error:
            raise LMDBError(f"{self.path}: key {key!r} cannot be read: {error}") from error

    def close(self) -> None:
        if self.lmdb is not None:
            self.lmdb.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close


_environments: weakref.WeakValueDictionary[tuple[int, int], _Environment] = weakref.WeakValueDictionary()
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
