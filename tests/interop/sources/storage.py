"""Arrays in the files of other libraries, opened in `__init__` or, as is usually advised, on first use."""

import os
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from tests.interop.sources.files import SAMPLES

SHAPE = (3, 8, 8)


def _rows() -> np.ndarray:
    """What lies in the files: a row of bytes per sample."""
    return np.random.default_rng(5).integers(0, 256, (SAMPLES, *SHAPE), dtype=np.uint8)


class _Stored(Dataset[Any]):
    """Rows of a file that is written where there is none, and opened when the first row is read."""

    def __init__(self, folder: Path) -> None:
        self.path, self.file = str(folder / type(self).__name__), None
        if not os.path.exists(self.path):
            self.write(_rows())

    def write(self, rows: np.ndarray) -> None:
        rows.tofile(self.path)

    def open(self) -> Any:
        raise NotImplementedError

    def row(self, index: int) -> Any:
        return self.file[index]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = self.open()
        return torch.from_numpy(np.array(self.row(index))).reshape(SHAPE), index


class _H5(_Stored):
    """Rows of an HDF5 file, whose handle cannot be pickled."""

    def write(self, rows: np.ndarray) -> None:
        with pytest.importorskip("h5py").File(self.path, "w") as file:
            file["rows"] = rows

    def open(self) -> Any:
        return pytest.importorskip("h5py").File(self.path, "r")["rows"]


class _OpenH5(_H5):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = self.open()


class _LMDB(_Stored):
    def write(self, rows: np.ndarray) -> None:
        environment = pytest.importorskip("lmdb").open(self.path, map_size=2**20)
        with environment.begin(write=True) as transaction:
            for index, row in enumerate(rows):
                transaction.put(str(index).encode(), row.tobytes())
        environment.close()

    def open(self) -> Any:
        return pytest.importorskip("lmdb").open(self.path, readonly=True, lock=False)

    def row(self, index: int) -> Any:
        with self.file.begin() as transaction:
            return np.frombuffer(transaction.get(str(index).encode()), np.uint8)


class _Memmap(_Stored):
    """Rows of a memory-mapped file, as they are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rows = np.memmap(self.path, np.uint8, "r", shape=(SAMPLES, *SHAPE))

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], np.float32(index)


class _MemmapAsTensors(_Memmap):
    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.array(self.rows[index]))


class _Zarr(_Stored):
    def write(self, rows: np.ndarray) -> None:
        pytest.importorskip("zarr").save(self.path, rows)

    def open(self) -> Any:
        return pytest.importorskip("zarr").open(self.path, mode="r")


class _SQLite(_Stored):
    def write(self, rows: np.ndarray) -> None:
        connection = sqlite3.connect(self.path)
        connection.execute("create table samples (number integer primary key, row blob)")
        blobs = [(index, row.tobytes()) for index, row in enumerate(rows)]
        connection.executemany("insert into samples values (?, ?)", blobs)
        connection.commit()
        connection.close()

    def open(self) -> Any:
        return sqlite3.connect(self.path)

    def row(self, index: int) -> Any:
        [[blob]] = self.file.execute("select row from samples where number = ?", [index]).fetchall()
        return np.frombuffer(blob, np.uint8)


class _Zip(_Stored):
    def write(self, rows: np.ndarray) -> None:
        with zipfile.ZipFile(self.path, "w") as archive:
            for index, row in enumerate(rows):
                archive.writestr(f"{index}.bin", row.tobytes())

    def open(self) -> Any:
        return zipfile.ZipFile(self.path)

    def row(self, index: int) -> Any:
        return np.frombuffer(self.file.read(f"{index}.bin"), np.uint8)


class _PlainFile(_Stored):
    """Rows of a file that is read by `seek` and `read`, without a buffer: two processes must not share its offset."""

    def open(self) -> Any:
        self.process = os.getpid()
        return open(self.path, "rb", buffering=0)

    def row(self, index: int) -> Any:
        assert self.process == os.getpid(), "the handle of another process"
        size = int(np.prod(SHAPE))
        self.file.seek(index * size, os.SEEK_SET)
        return np.frombuffer(self.file.read(size), np.uint8)


WAYS = {
    "h5py_opened_on_first_use": lambda setting: setting.loader(_H5(setting.folder)),
    "h5py_opened_in_init": lambda setting: setting.loader(_OpenH5(setting.folder)),
    "lmdb_opened_on_first_use": lambda setting: setting.loader(_LMDB(setting.folder)),
    "memmap": lambda setting: setting.loader(_Memmap(setting.folder)),
    "memmap_as_tensors": lambda setting: setting.loader(_MemmapAsTensors(setting.folder)),
    "zarr_array": lambda setting: setting.loader(_Zarr(setting.folder)),
    "sqlite_opened_on_first_use": lambda setting: setting.loader(_SQLite(setting.folder)),
    "zip_opened_on_first_use": lambda setting: setting.loader(_Zip(setting.folder)),
    "plain_file_opened_on_first_use": lambda setting: setting.loader(_PlainFile(setting.folder)),
}
