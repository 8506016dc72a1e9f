"""An LMDB that many processes read, each with an environment of its own.

LMDB allows an environment neither across a fork nor twice in one process. An `LMDBFile` is therefore a path: each
process opens the environment on first use, all LMDBFiles of that file share it, and a forked child closes the ones that
it has inherited. The environment has no locks, which a shared file system may lack and a read-only one forbids, so
nobody may write to the file meanwhile.

LMDB maps the file, and a missing page is a SIGBUS. Opening and each read therefore compare the length of the file with
what its last commit needs.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from lightning_stocache.node.files import lock_owner

if TYPE_CHECKING:
    import lmdb

__all__ = ["LMDBError", "LMDBFile", "bytes_needed", "import_lmdb"]

log = logging.getLogger(__name__)

_WHY = {
    "already open": "is open in this process by other code, and LMDB allows that once: close that environment, or open "
    "it in the workers only",
    "MDB_INVALID": "is not an LMDB (it does not begin as one), or its first pages are damaged",
    "MDB_VERSION": "was made by another version of LMDB; copy it by that version's mdb_dump and mdb_load",
}


class LMDBError(RuntimeError):
    """An LMDB cannot be read or written; the message says which, why, and what to do."""


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


def bytes_needed(environment: lmdb.Environment) -> int:
    """The length that the file of an environment must have for its last commit."""
    return int((environment.info()["last_pgno"] + 1) * environment.stat()["psize"])


class LMDBFile:
    """An LMDB, for reading.

    Args:
        path: of the file, or of a folder with a `data.mdb`.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: this user may not read it.
        LMDBError: it is no LMDB, is truncated, or other code of this process has it open.

    Example:
        >>> LMDBFile("photos.lmdb")
        Traceback (most recent call last):
            ...
        FileNotFoundError: there is no LMDB photos.lmdb: give the path of its file, or of the folder of its data.mdb
    """

    _content: Any = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._is_folder = os.path.isdir(self.path)
        self._file = os.path.abspath(os.path.join(self.path, "data.mdb") if self._is_folder else self.path)
        self._version: tuple[int, int] | None = None
        self._environment: lmdb.Environment | None = None
        self._checked()
        lock_file = os.path.join(self.path, "lock.mdb") if self._is_folder else f"{self.path}-lock"
        if (writer := _holder(lock_file)) is not None:
            log.warning(
                "%s is open in process %d, too. If that writes to it, wait until it has ended: it is read without "
                "locks, and samples could be torn",
                self.path,
                writer,
            )

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None.

        Raises:
            LMDBError: LMDB cannot read it.
        """
        try:
            with self._checked().begin() as transaction:
                value: bytes | None = transaction.get(key)
                return value
        except import_lmdb().Error as error:
            raise LMDBError(f"{self.path}: key {key!r} cannot be read: {error}") from error

    def __iter__(self) -> Iterator[bytes]:
        """All keys, in the order of their bytes."""
        with self._checked().begin() as transaction, transaction.cursor() as cursor:
            yield from cursor.iternext(keys=True, values=False)

    @property
    def entries(self) -> int:
        """The number of keys."""
        return int(self._checked().stat()["entries"])

    def close(self) -> None:
        """Give the environment of this process up; the next read opens it again."""
        self._environment = None
        if self._content is not None:
            self._content.close()
            self._content = None

    __del__ = close

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_environment": None, "_content": None}

    def _checked(self) -> lmdb.Environment:
        """The environment of this process, with a file that is as long as LMDB needs."""
        if self._environment is None or self._pid != os.getpid():
            with _opening:
                if self._environment is None or self._pid != os.getpid():
                    self._open()
        if (size := os.fstat(self._content.fileno()).st_size) < self._needed:
            raise LMDBError(
                f"{self.path} is truncated: it has {size:,} bytes, and its last commit needs {self._needed:,}. Copy or "
                "pack it again. (If it was never copied, and LMDB itself has left free pages at its end unwritten, "
                "`mdb_copy -c` makes a whole one)"
            )
        return cast("lmdb.Environment", self._environment)

    def _open(self) -> None:
        lmdb = import_lmdb()
        self.close()
        self._content = self._readable()
        status = os.fstat(self._content.fileno())
        if self._version not in (None, (status.st_size, status.st_mtime_ns)):
            raise LMDBError(f"{self.path} has changed since it was opened by another process: open it anew")
        if not status.st_size:
            raise LMDBError(f"{self.path} is empty: 0 bytes are no LMDB")
        name = status.st_dev, status.st_ino
        if (environment := _environments.get(name)) is None:
            # Without reading ahead, which is of no use to samples in random order.
            options = {"readonly": True, "lock": False, "readahead": False, "create": False, "max_spare_txns": 4}
            try:
                environment = lmdb.open(self.path, subdir=self._is_folder, **options)
            except lmdb.Error as error:
                why = next((why for sign, why in _WHY.items() if sign in str(error)), f"cannot be opened: {error}")
                raise LMDBError(f"{self.path} {why}") from error
            _environments[name] = environment
        self._version, self._needed = (status.st_size, status.st_mtime_ns), bytes_needed(environment)
        self._pid, self._environment = os.getpid(), environment  # the last, for threads that look without the lock

    def _readable(self) -> Any:
        """The file that holds the data, opened to look at its length."""
        try:
            return open(self._file, "rb", buffering=0)
        except FileNotFoundError:
            what = f"{self.path} is a folder without a data.mdb" if self._is_folder else f"there is no LMDB {self.path}"
            raise FileNotFoundError(f"{what}: give the path of its file, or of the folder of its data.mdb") from None
        except PermissionError:
            raise PermissionError(f"{self._file} may not be read by this user: chmod a+r {self._file}") from None
        except OSError as error:
            raise LMDBError(f"{self.path} cannot be opened: {error.strerror}") from error


_environments: weakref.WeakValueDictionary[tuple[int, int], lmdb.Environment] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _close_inherited() -> None:
    global _opening
    _opening = threading.Lock()  # in the child, no thread would ever release the old one
    for environment in _environments.values():
        environment.close()
    _environments.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


def _holder(lock_file: str) -> int | None:
    """A process that has the LMDB of this lock file open with locks; None if nobody has, or the system does not say."""
    try:
        with open(lock_file, "rb") as file:
            return lock_owner(file.fileno(), 0)
    except OSError:  # none, or it may not be read
        return None
