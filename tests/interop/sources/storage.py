"""Arrays in the files of other libraries, opened in `__init__` or, as is usually advised, on first use."""

import os
import sqlite3
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from tests.interop.sources.files import SAMPLES
from tests.interop.training import Setting

SHAPE = (3, 8, 8)


def rows(count: int = SAMPLES) -> np.ndarray:
    """What lies in the files: a row of bytes per sample."""
    return np.random.default_rng(5).integers(0, 256, (count, *SHAPE), dtype=np.uint8)


class _Stored(Dataset[Any]):
    """Rows of a file that is opened when the first is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.file: Any = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = self.open()
        return torch.from_numpy(np.array(self.row(index))).reshape(SHAPE), index

    def open(self) -> Any:
        raise NotImplementedError

    def row(self, index: int) -> Any:
        return self.file[index]


class H5(_Stored):
    """Rows of an HDF5 file, whose handle cannot be pickled."""

    def open(self) -> Any:
        return pytest.importorskip("h5py").File(self.path, "r")["rows"]


def h5_path(folder: Path) -> Path:
    """A small HDF5 file."""
    path = folder / "rows.h5"
    if not path.exists():
        with pytest.importorskip("h5py").File(path, "w") as file:
            file["rows"] = rows()
    return path


def h5py_opened_on_first_use(setting: Setting) -> Any:
    return setting.loader(H5(h5_path(setting.folder)))


def h5py_opened_in_init(setting: Setting) -> Any:
    dataset = H5(h5_path(setting.folder))
    dataset.file = dataset.open()
    return setting.loader(dataset)


class _LMDB(_Stored):
    def open(self) -> Any:
        return pytest.importorskip("lmdb").open(self.path, readonly=True, lock=False)

    def row(self, index: int) -> Any:
        with self.file.begin() as transaction:
            return np.frombuffer(transaction.get(str(index).encode()), np.uint8)


def lmdb_opened_on_first_use(setting: Setting) -> Any:
    path = setting.folder / "lmdb"
    if not path.exists():
        environment = pytest.importorskip("lmdb").open(str(path), map_size=2**20)
        with environment.begin(write=True) as transaction:
            for index, row in enumerate(rows()):
                transaction.put(str(index).encode(), row.tobytes())
        environment.close()
    return setting.loader(_LMDB(path))


class _Memmap(Dataset[Any]):
    """Rows of a memory-mapped file, as they are or as tensors."""

    def __init__(self, path: Path, *, as_tensors: bool) -> None:
        self.rows, self.as_tensors = np.memmap(path, np.uint8, "r", shape=(SAMPLES, *SHAPE)), as_tensors

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return torch.from_numpy(np.array(row)) if self.as_tensors else (row, np.float32(index))


def _memmap(setting: Setting, *, as_tensors: bool) -> Any:
    path = setting.folder / "rows.bin"
    if not path.exists():
        rows().tofile(path)
    return setting.loader(_Memmap(path, as_tensors=as_tensors))


def memmap(setting: Setting) -> Any:
    return _memmap(setting, as_tensors=False)


def memmap_as_tensors(setting: Setting) -> Any:
    return _memmap(setting, as_tensors=True)


class _Zarr(_Stored):
    def open(self) -> Any:
        return pytest.importorskip("zarr").open(self.path, mode="r")


def zarr_array(setting: Setting) -> Any:
    path = setting.folder / "rows.zarr"
    if not path.exists():
        pytest.importorskip("zarr").save(str(path), rows())
    return setting.loader(_Zarr(path))


class _SQLite(_Stored):
    def open(self) -> Any:
        return sqlite3.connect(self.path)

    def row(self, index: int) -> Any:
        [[blob]] = self.file.execute("select row from samples where number = ?", [index]).fetchall()
        return np.frombuffer(blob, np.uint8)


def sqlite_opened_on_first_use(setting: Setting) -> Any:
    path = setting.folder / "rows.sqlite"
    if not path.exists():
        connection = sqlite3.connect(path)
        connection.execute("create table samples (number integer primary key, row blob)")
        blobs = [(index, row.tobytes()) for index, row in enumerate(rows())]
        connection.executemany("insert into samples values (?, ?)", blobs)
        connection.commit()
        connection.close()
    return setting.loader(_SQLite(path))


class _Zip(_Stored):
    def open(self) -> Any:
        return zipfile.ZipFile(self.path)

    def row(self, index: int) -> Any:
        return np.frombuffer(self.file.read(f"{index}.bin"), np.uint8)


def zip_opened_on_first_use(setting: Setting) -> Any:
    path = setting.folder / "rows.zip"
    if not path.exists():
        with zipfile.ZipFile(path, "w") as archive:
            for index, row in enumerate(rows()):
                archive.writestr(f"{index}.bin", row.tobytes())
    return setting.loader(_Zip(path))


class PlainFile(_Stored):
    """Rows of a file that is read by `seek` and `read`, without a buffer: two processes must not share its offset."""

    def __init__(self, path: Path, length: int = SAMPLES) -> None:
        super().__init__(path)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def open(self) -> Any:
        return open(self.path, "rb", buffering=0)

    def row(self, index: int) -> Any:
        size = int(np.prod(SHAPE))
        self.file.seek(index * size, os.SEEK_SET)
        time.sleep(1e-4)  # as long as a busy machine may take, for others to come between
        return np.frombuffer(self.file.read(size), np.uint8)


def plain_file_opened_on_first_use(setting: Setting) -> Any:
    path = setting.folder / "plain.bin"
    rows().tofile(path)
    return setting.loader(PlainFile(path))
