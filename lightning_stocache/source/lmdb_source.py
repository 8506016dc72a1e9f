"""LMDBSource: a dataset over an LMDB that `pack` or another program has written.

In a packed LMDB a sample is a blob (`blob`) under its index in twelve digits; a manifest in JSON has a key of its own.
Every commit has the manifest, with `complete: false` until the last sample is there. The number of the other keys is
the number of samples.

A sample is read in two steps: `read(index)` gives the bytes, `decode(content, index)` makes the sample, so that a cache
may keep either. Nothing is unpickled. There is no `__getitems__`: a transaction takes 0.4 us, and workers write samples
into their batch as they come.

LMDB forbids using an environment across a fork and opening a file twice in a process. So each process opens a file on
first use, shares it among its readers, in any thread, and opens it anew after a fork. It is opened without locks, which
shared or read-only filesystems lack: nobody may write to it meanwhile. Reading a page beyond the file's end is a
SIGBUS, so the length is checked when the file is opened.
"""

from __future__ import annotations

import json
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_stocache.source.blob import decode_blob, image_of, tensor_of

__all__ = ["MANIFEST_KEY", "VERSION", "LMDBError", "LMDBFile", "LMDBSource", "bytes_needed", "key_of"]

MANIFEST_KEY = b"#lightning_stocache"  # sorts before the digits
VERSION = 2


class LMDBError(RuntimeError):
    """An LMDB cannot be read or written; the message says which, why, and what to do."""


def bytes_needed(environment: Any) -> int:
    """The length that the file of an environment must have for its last commit."""
    return int((environment.info()["last_pgno"] + 1) * environment.stat()["psize"])


def key_of(index: int) -> bytes:
    """The key of a packed sample."""
    return b"%012d" % index


class LMDBFile:
    """An LMDB that this process has open for reading, until its last reference goes.

    Raises:
        LMDBError: it cannot be opened, or is truncated.
    """

    def __init__(self, file: str) -> None:
        import lmdb

        self.pid, self.file = os.getpid(), file
        try:
            # No readahead: samples are read in random order.
            self._environment = lmdb.open(
                file, subdir=False, readonly=True, lock=False, readahead=False, create=False, max_spare_txns=4
            )
        except lmdb.Error as error:
            raise LMDBError(
                f"{file} is not an LMDB, is damaged, or is open in this process by other code ({error})"
            ) from error
        status = os.stat(file)
        self.version = status.st_size, status.st_mtime_ns
        """Size and time of the file, which change when it is written to or replaced."""
        if status.st_size < (needed := bytes_needed(self._environment)):
            raise LMDBError(
                f"{file} is truncated: it has {status.st_size:,} bytes, and its last commit needs {needed:,}. Copy or "
                "pack it again (of a file that was never copied, `mdb_copy -c` writes the free pages at its end)"
            )

    @classmethod
    def shared(cls, path: str) -> LMDBFile:
        """The LMDB of this path (a file, or a folder with a `data.mdb`) as this process has it open.

        Raises:
            FileNotFoundError: there is none.
        """
        file = os.path.join(path, "data.mdb") if os.path.isdir(path) else path
        status = os.stat(file)
        with _opening:
            known = _files.get((status.st_dev, status.st_ino))
            if known is None or known.pid != os.getpid():
                if known is not None:
                    known._environment.close()
                known = _files[status.st_dev, status.st_ino] = cls(file)
            return known

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None."""
        with self._environment.begin() as transaction:
            value: bytes | None = transaction.get(key)
            return value

    def keys(self) -> list[bytes]:
        """All keys, in the order of their bytes."""
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            return list(cursor.iternext(keys=True, values=False))

    def manifest(self) -> tuple[dict[str, Any] | None, int]:
        """The manifest of `pack`, None if another program wrote the file; and the number of samples."""
        entries = int(self._environment.stat()["entries"])
        if (content := self.get(MANIFEST_KEY)) is None:
            return None, entries
        manifest: dict[str, Any] = json.loads(content)
        if (version := manifest["version"]) != VERSION:
            raise LMDBError(
                f"{self.file} is of version {version} of `pack`, this package reads {VERSION}: pack it again"
            )
        return manifest, entries - 1


_files: weakref.WeakValueDictionary[tuple[int, int], LMDBFile] = weakref.WeakValueDictionary()
_opening = threading.RLock()  # a process may open a file once; a signal's handler may read, too


def _renew_lock() -> None:
    """In a forked process: another thread may have held the lock, and that thread is not here."""
    global _opening
    _opening = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class LMDBSource(Dataset[Any]):
    """A map-style dataset over an LMDB.

    An LMDB that `pack` has written needs only its path: samples come back as they were, in types, structure and bits.
    In any other LMDB each key is a sample, except keys like `__len__`. They are sorted by their bytes, or as numbers if
    all are numbers; `keys` chooses keys and their order. Values are images unless `kind`, `dtype` or `decode` says
    otherwise. Several LMDBSources may read one file: `torch.utils.data.StackDataset` joins an image and a label that
    lie under two keys.

    It works in forked and in spawned processes; each opens the file itself.

    Args:
        path: path of the file, or of a folder with a `data.mdb`.
        kind: the kind of the values: `image` (encoded, opened by PIL as RGB; not EPS, for which PIL runs Ghostscript),
            `bytes`, `text` (UTF-8), `json` (also for numbers written as text), `tensor` (of `dtype` and `shape`),
            `safetensors` (a dict of tensors; needs the package).
        dtype: dtype of the values, named as in torch: `"uint8"`.
        shape: shape of the values; None: one dimension, as long as each value is.
        keys: keys of the samples, as bytes or strings.
        decode: makes a sample of the bytes of a value, in place of `kind`.
        transform: applied to the sample, or to the first item of a tuple or list of two.
        target_transform: applied to the second item of a tuple or list of two.

    Raises:
        FileNotFoundError: there is no such LMDB.
        LMDBError: the file is no LMDB, is truncated, of another version, or packed only in part; when a sample is
            read: its value is missing, damaged, or not of this `kind`.
        ValueError: the arguments do not go together.

    Example:
        >>> import tempfile
        >>> from lightning_stocache import LMDBSource
        >>> from lightning_stocache.source.pack import pack
        >>> path = tempfile.mkdtemp() + "/numbers.lmdb"
        >>> pack([(torch.tensor([float(number)]), number) for number in range(5)], path)
        5
        >>> source = LMDBSource(path)
        >>> len(source), source[-1]
        (5, (tensor([4.]), 4))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        kind: str | None = None,
        dtype: torch.dtype | str | None = None,
        shape: Sequence[int] | None = None,
        keys: Iterable[bytes | str] | None = None,
        decode: Callable[[bytes], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.transform, self.target_transform = transform, target_transform
        self.path = os.fspath(path)
        """The path as it was given."""
        self._location = os.path.abspath(self.path)
        self._opened: LMDBFile | None = None
        file = LMDBFile.shared(self._location)
        self._version = file.version
        manifest, samples = file.manifest()
        self._manifest = manifest
        self._keys: _Keys | None = None  # those of a packed LMDB follow from the index
        if manifest is None:
            self._decode = decode or _decoder_of(kind, dtype, shape)
            self._keys = _Keys(_sample_keys(file.keys()) if keys is None else keys)
            samples = len(self._keys)
        elif any(value is not None for value in (kind, dtype, shape, keys, decode)):
            raise ValueError(f"{self.path} is read by its manifest: leave kind, dtype, shape, keys and decode out")
        elif not manifest["complete"] or samples != manifest["samples"]:
            raise LMDBError(
                f"{self.path} has {samples:,} of the {manifest['samples']:,} samples of {manifest['source']}: wait for "
                "`pack` to end, or run the same command again, which goes on there"
            )
        self._length = samples

    @property
    def classes(self) -> list[str]:
        """Names of the classes that the packed source had; empty where it had none."""
        return [] if self._manifest is None else list(self._manifest["classes"])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        """The sample of an index, from the front or the back; a list of samples for a slice."""
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._length))]
        return self.decode(self.read(index), index)

    def read(self, index: SupportsIndex) -> bytes:
        """The bytes of the sample of an index.

        Raises:
            IndexError: it is outside of the dataset.
            LMDBError: its key is missing, or the file has changed since another process opened it.
        """
        position = self._position(index)
        opened = self._opened
        if opened is None or opened.pid != os.getpid():
            opened = self._opened = LMDBFile.shared(self._location)
            if opened.version != self._version:
                raise LMDBError(f"{self.path} has changed since it was opened by another process: open it anew")
        if (content := opened.get(self._key(position))) is None:
            raise LMDBError(
                f"{self.path} has no key {self._key(position)!r}, of sample {position}: pack it again, or give keys="
            )
        return content

    def decode(self, content: bytes, index: SupportsIndex) -> Any:
        """The sample of the bytes that `read` gave for this index.

        Raises:
            LMDBError: the bytes are damaged, or not of this `kind`.
        """
        position = self._position(index)
        try:
            sample = decode_blob(content, position) if self._keys is None else self._decode(content)
        except Exception as error:  # PIL, JSON and the user's function may raise anything
            advice = "copy or pack it again"
            if self._keys is not None:
                advice = "give kind=, dtype= or decode= that fits; nothing is unpickled here, unless by your function"
            raise LMDBError(
                f"{self.path}, sample {position}: the value of {self._key(position)!r}, {len(content)} bytes that "
                f"begin with {content[:16]!r}, cannot be read ({error}): {advice}"
            ) from error
        transform, target_transform = self.transform, self.target_transform
        if type(sample) not in (tuple, list) or len(sample) != 2:
            return sample if transform is None else transform(sample)
        first, second = sample
        first = first if transform is None else transform(first)
        return type(sample)((first, second if target_transform is None else target_transform(second)))

    def __repr__(self) -> str:
        packed = "" if self._manifest is None else f", packed from {self._manifest['source']}"
        return f"{type(self).__name__}({self.path!r}, {self._length} samples{packed})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def _position(self, index: SupportsIndex) -> int:
        position = operator.index(index)
        position += self._length if position < 0 else 0
        if not 0 <= position < self._length:
            raise IndexError(f"index must be one of {self._length} samples, got {index}")
        return position

    def _key(self, position: int) -> bytes:
        return key_of(position) if self._keys is None else self._keys[position]


class _Keys:
    """Keys as one run of bytes: a list of a million objects would be copied by every forked worker that reads it."""

    def __init__(self, keys: Iterable[bytes | str]) -> None:
        encoded = [key.encode() if isinstance(key, str) else bytes(key) for key in keys]
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._bytes = b"".join(encoded)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, position: int) -> bytes:
        return self._bytes[self._ends[position] : self._ends[position + 1]]


def _sample_keys(keys: list[bytes]) -> list[bytes]:
    keys = [key for key in keys if not (key.startswith(b"__") and key.endswith(b"__"))]
    return sorted(keys, key=int) if keys and all(map(bytes.isdigit, keys)) else keys


def _safetensors(content: bytes) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    return load(content)


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "image": image_of,
    "bytes": bytes,
    "text": bytes.decode,
    "json": json.loads,
    "safetensors": _safetensors,
}


def _decoder_of(
    kind: str | None, dtype: torch.dtype | str | None, shape: Sequence[int] | None
) -> Callable[[bytes], Any]:
    if dtype is not None or shape is not None or kind == "tensor":
        named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if kind not in (None, "tensor") or not isinstance(named, torch.dtype):
            raise ValueError(f"a tensor needs dtype= (and shape=, if it has one), got {kind=}, {dtype=}, {shape=}")
        return partial(tensor_of, dtype=named, shape=shape)
    if kind not in (None, *_DECODERS):
        raise ValueError(f"kind must be one of {', '.join((*_DECODERS, 'tensor'))}, got {kind!r}")
    return _DECODERS[kind or "image"]
