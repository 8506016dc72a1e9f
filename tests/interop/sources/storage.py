"""Arrays in the files of other libraries, opened in `__init__` or, as is usually advised, on first use."""

import os
import sqlite3
import zipfile
from collections.abc import Callable
from contextlib import closing
from operator import getitem
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop.setting import SAMPLES, Setting, held

SHAPE = (3, 8, 8)
ROWS = np.random.default_rng(5).integers(0, 256, (SAMPLES, *SHAPE), dtype=np.uint8)


def _stored(setting: Setting, name: str, write: Any, opened: Any, row: Any = getitem, *, at_once: bool = False) -> Any:
    """Rows of a file that is written where there is none, and opened when the first row is read, or at once."""
    path = str(setting.folder / name)
    if not os.path.exists(path):
        write(path)

    def load(self: Any, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = opened(path)
        return torch.from_numpy(np.frombuffer(row(self.file, index), np.uint8).copy()).reshape(SHAPE), index

    return setting.loader(held(load, file=opened(path) if at_once else None))


def _h5py(setting: Setting, *, at_once: bool) -> Any:
    """A file whose handle cannot be pickled."""
    h5py = pytest.importorskip("h5py")

    def write(path: str) -> None:
        with h5py.File(path, "w") as file:
            file["rows"] = ROWS

    return _stored(setting, "rows.h5", write, lambda path: h5py.File(path, "r")["rows"], at_once=at_once)


def _lmdb(setting: Setting) -> Any:
    lmdb = pytest.importorskip("lmdb")

    def write(path: str) -> None:
        with lmdb.open(path, map_size=2**20) as environment, environment.begin(write=True) as transaction:
            for index, row in enumerate(ROWS):
                transaction.put(str(index).encode(), row.tobytes())

    def row(environment: Any, index: int) -> bytes:
        with environment.begin() as transaction:
            return transaction.get(str(index).encode())

    return _stored(setting, "rows.lmdb", write, lambda path: lmdb.open(path, readonly=True, lock=False), row)


def _memmap(setting: Setting, load: Callable[[Any, int], Any]) -> Any:
    ROWS.tofile(path := setting.folder / "rows.bin")
    return setting.loader(held(load, rows=np.memmap(path, np.uint8, "r", shape=ROWS.shape)))


def _zarr(setting: Setting) -> Any:
    zarr = pytest.importorskip("zarr")
    return _stored(setting, "rows.zarr", lambda path: zarr.save(path, ROWS), lambda path: zarr.open(path, mode="r"))


def _sqlite(setting: Setting) -> Any:
    def write(path: str) -> None:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("create table samples (number integer primary key, row blob)")
            blobs = [(index, row.tobytes()) for index, row in enumerate(ROWS)]
            connection.executemany("insert into samples values (?, ?)", blobs)

    def row(connection: Any, index: int) -> bytes:
        return connection.execute("select row from samples where number = ?", [index]).fetchone()[0]

    return _stored(setting, "rows.sqlite", write, sqlite3.connect, row)


def _zip(setting: Setting) -> Any:
    def write(path: str) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for index, row in enumerate(ROWS):
                archive.writestr(f"{index}.bin", row.tobytes())

    return _stored(setting, "rows.zip", write, zipfile.ZipFile, lambda archive, index: archive.read(f"{index}.bin"))


def _plain_file(setting: Setting) -> Any:
    """Rows that are read by `seek` and `read`, without a buffer: two processes must not share the file's offset."""

    def row(opened: Any, index: int) -> bytes:
        process, file = opened
        assert process == os.getpid(), "the handle of another process"
        file.seek(index * ROWS[0].nbytes)
        return file.read(ROWS[0].nbytes)

    return _stored(setting, "rows.raw", ROWS.tofile, lambda path: (os.getpid(), open(path, "rb", buffering=0)), row)


STORAGE = {
    "h5py_opened_on_first_use": lambda setting: _h5py(setting, at_once=False),
    "h5py_opened_in_init": lambda setting: _h5py(setting, at_once=True),
    "lmdb_opened_on_first_use": _lmdb,
    "memmap": lambda setting: _memmap(setting, lambda self, index: (self.rows[index], np.float32(index))),
    "memmap_as_tensors": lambda setting: _memmap(setting, lambda self, index: torch.tensor(self.rows[index])),
    "zarr_array": _zarr,
    "sqlite_opened_on_first_use": _sqlite,
    "zip_opened_on_first_use": _zip,
    "plain_file_opened_on_first_use": _plain_file,
}
