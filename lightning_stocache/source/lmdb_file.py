"""An LMDB that is read by many processes, each with an environment of its own.

LMDB forbids to use an environment across a fork, and to open a file twice in one process. So an `LMDBFile` is a path:
its environment is opened on first use in each process, closed and opened anew where a fork has brought one along, and
shared by all LMDBFiles of that file. It is opened without locks, which a shared filesystem may not have and a read-only
one does not allow: nobody may write to the file meanwhile.

LMDB maps the file, and a page that is missing from it is a SIGBUS. So its length is compared with what its last commit
needs when it is opened, and before each read.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_stocache.node.files import lock_owner

if TYPE_CHECKING:
    import lmdb

__all__ = ["LMDBError", "LMDBFile", "bytes_needed", "import_lmdb"]

log = logging.getLogger(__name__)

_EXTRA = 'LMDB needs the package lmdb: pip install "lightning-stocache[lmdb]"'


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
        raise ModuleNotFoundError(_EXTRA, name="lmdb") from error
    return lmdb


def bytes_needed(environment: lmdb.Environment) -> int:
    """How long the file of an environment must be for its last commit."""
    return int((environment.info()["last_pgno"] + 1) * environment.stat()["psize"])


class LMDBFile:
    """An LMDB, for reading.

    Args:
        path: of the file, or of a folder with a `data.mdb`.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: it may not be read.
        LMDBError: it is no LMDB, is truncated, or this process has it open otherwise.

    Example:
        >>> LMDBFile("photos.lmdb")
        Traceback (most recent call last):
            ...
        FileNotFoundError: there is no LMDB photos.lmdb: give the path of its file, or of the folder of its data.mdb
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = _data_file(self.path)
        self._version = _version(self._file)
        self._opened: _Opened | None = None
        self.environment()
        lock_file = os.path.join(self.path, "lock.mdb") if os.path.isdir(self.path) else f"{self.path}-lock"
        if (writer := _holder(lock_file)) is not None:
            log.warning(
                "%s is open in process %d, too. If that writes to it, wait until it has ended: it is read without "
                "locks, and samples could be torn",
                self.path,
                writer,
            )

    def environment(self) -> _Opened:
        """The environment of this process."""
        if (opened := self._opened) is None or opened.pid != os.getpid():
            if _version(_data_file(self.path)) != self._version:
                raise LMDBError(f"{self.path} has changed since it was opened by another process: open it anew")
            self._opened = opened = _open(self.path, self._file)
        return opened

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None.

        Raises:
            LMDBError: it cannot be read.
        """
        return self.environment().get(key)

    def __iter__(self) -> Iterator[bytes]:
        """All keys, in LMDB's order, which is that of their bytes."""
        return self.environment().keys()

    @property
    def entries(self) -> int:
        """How many keys there are."""
        return int(self.environment().lmdb.stat()["entries"])

    def close(self) -> None:
        """Give the environment of this process up; the next read opens it again."""
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}


class _Opened:
    """An environment of one process, shared by all who read this file there.

    Args:
        path: as it was given, for messages.
        file: the file with the data.
        environment: of LMDB.
    """

    def __init__(self, path: str, file: str, environment: lmdb.Environment) -> None:
        self.pid, self.path, self.lmdb, self._file = os.getpid(), path, environment, -1
        self._error = import_lmdb().Error
        self._needed = bytes_needed(environment)
        self._file = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def check(self) -> None:
        """Raise LMDBError if the file is shorter than LMDB needs."""
        if (size := os.fstat(self._file).st_size) < self._needed:
            raise LMDBError(
                f"{self.path} is truncated: it has {size:,} bytes, and its last commit needs {self._needed:,}. Copy or "
                "pack it again. (If it was never copied, and LMDB itself has left free pages at its end unwritten, "
                "`mdb_copy -c` makes a whole one)"
            )

    def get(self, key: bytes) -> bytes | None:
        self.check()
        try:
            with self.lmdb.begin() as transaction:
                value: bytes | None = transaction.get(key)
                return value
        except self._error as error:
            raise LMDBError(f"{self.path}: key {key!r} cannot be read: {error}") from error

    def keys(self) -> Iterator[bytes]:
        self.check()
        with self.lmdb.begin() as transaction, transaction.cursor() as cursor:
            yield from cursor.iternext(keys=True, values=False)

    def close(self) -> None:
        self.lmdb.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close


_environments: weakref.WeakValueDictionary[tuple[int, int], _Opened] = weakref.WeakValueDictionary()
_opening = threading.Lock()
if hasattr(os, "register_at_fork"):
    # A thread that was opening is not there in the child, and would never let go.
    os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_opening.release)


def _open(path: str, file: str) -> _Opened:
    """The environment of a file in this process, opened if nobody has; one that a fork has brought is closed first."""
    lmdb = import_lmdb()
    with _opening:
        status = os.stat(file)
        name = status.st_dev, status.st_ino
        if (known := _environments.get(name)) is not None:
            if known.pid == os.getpid():
                known.check()
                return known
            known.close()  # without locks that is this process's own affair
        if not status.st_size:
            raise LMDBError(f"{path} is empty: 0 bytes are no LMDB")
        try:
            environment = lmdb.open(
                path,
                subdir=os.path.isdir(path),
                readonly=True,
                lock=False,
                readahead=False,  # for samples in random order it reads what nobody has asked for
                create=False,
                max_spare_txns=4,
            )
        except lmdb.Error as error:
            raise _refusal(path, error) from error
        opened = _Opened(path, file, environment)
        opened.check()
        _environments[name] = opened
    return opened


def _refusal(path: str, error: Exception) -> LMDBError:
    """What is wrong with a file, in words."""
    if "already open" in str(error):
        return LMDBError(
            f"{path} is open in this process by other code, and LMDB allows that once: close that environment, or open "
            "it in the workers only"
        )
    if "MDB_INVALID" in str(error):
        return LMDBError(f"{path} is not an LMDB (it does not begin as one), or its first pages are damaged")
    if "MDB_VERSION" in str(error):
        return LMDBError(f"{path} was made by another version of LMDB; copy it by that version's mdb_dump and mdb_load")
    return LMDBError(f"{path} cannot be opened: {error}")


def _data_file(path: str) -> str:
    """The file that holds the data, once it is known that it can be read."""
    where = Path(path)
    file = where / "data.mdb" if where.is_dir() else where
    try:
        with open(file, "rb"):
            return os.path.abspath(file)
    except FileNotFoundError:
        missing = f"{path} is a folder without a data.mdb" if where.is_dir() else f"there is no LMDB {path}"
        raise FileNotFoundError(f"{missing}: give the path of its file, or of the folder of its data.mdb") from None
    except PermissionError:
        raise PermissionError(f"{file} may not be read by this user: chmod a+r {file}") from None
    except OSError as error:
        raise LMDBError(f"{path} cannot be opened: {error.strerror}") from error


def _version(file: str) -> tuple[int, int]:
    """What changes when a file is written to, or replaced."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _holder(lock_file: str) -> int | None:
    """A process that has the LMDB of this lock file open with locks; None if nobody has, or the system does not say."""
    try:
        with open(lock_file, "rb") as file:
            return lock_owner(file.fileno(), 0)
    except OSError:  # none, or it may not be read
        return None
