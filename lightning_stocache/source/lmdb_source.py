"""LMDBSource: a dataset over an LMDB, as `pack` writes it or as others do.

How values are to be read stands in the manifest of an LMDB that this package has packed, and in the arguments of any
other. A sample is read in two steps, `read(index)` (the bytes that lie there, a copy) and `decode(content, index)`
(what is made of them, transforms included), so a cache may keep either: `store="encoded"` keeps the bytes.

Nothing is ever unpickled. Batches are read sample by sample: a transaction takes 0.4 us, and without `__getitems__`
workers write samples into their batch as they come.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_stocache.source.access import position_of
from lightning_stocache.source.blob import BlobError, decode_blob
from lightning_stocache.source.lmdb_file import MANIFEST_KEY, LMDBError, LMDBFile, PackManifest, key_of
from lightning_stocache.source.values import decoder_of

__all__ = ["LMDBSource"]


class LMDBSource(Dataset[Any]):
    """A map-style dataset over an LMDB.

    One that `pack` has written needs no argument but its path: samples come back as they were, in types, structure and
    bits. Of any other, all keys are samples, in the order of their bytes (as numbers, where all are), but those that
    look like `__len__`; `keys` gives some keys, or another order. Their values are images, unless `kind`, `dtype` or
    `decode` says otherwise. Several LMDBSources may read the same file: `torch.utils.data.StackDataset` puts an image
    and a label that lie under two keys together.

    It may be sent to other processes by fork and by spawn; each opens the file for itself.

    Args:
        path: of the file, or of a folder with a `data.mdb`.
        kind: what the values are: `image` (encoded, opened by PIL as RGB), `bytes`, `text` (UTF-8), `json` (which
            numbers written as text are, too), `tensor` (as `dtype` and `shape` say), `safetensors` (a dict of tensors;
            needs the package).
        dtype: of the values, as in torch: `"uint8"`.
        shape: of the values; None: one dimension, as long as each value is.
        keys: of the samples, as bytes or strings.
        decode: makes a sample of the bytes of a value, in place of `kind`.
        transform: of the sample; of a sample that is a tuple or list of two, of its first.
        target_transform: of the second of two.

    Raises:
        FileNotFoundError: there is no such LMDB.
        LMDBError: it is none, truncated, of another version, packed only in part, or (a sample) a value is missing or
            damaged, or no `kind`.
        ValueError: arguments that do not go together.

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
        """As it was given."""
        self._location = os.path.abspath(self.path)
        self._opened: LMDBFile | None = LMDBFile.of(self._location)
        self._version = self._opened.version
        self._opened.warn_of_writer()
        self.manifest = self._find_manifest()
        self._keys: _Keys | None = None  # those of a packed one follow from the index
        if self.manifest is None:
            if decode is not None and (kind, dtype, shape) != (None, None, None):
                raise ValueError("decode= says how values are read: leave kind, dtype and shape out")
            if isinstance(keys, str | bytes):
                raise ValueError(f"keys must be a list of keys, got {keys!r}")
            self._decode = decode or decoder_of(kind, dtype, shape)
            self._keys = _Keys(_sample_keys(self._opened.keys()) if keys is None else keys)
            self._length = len(self._keys)
        else:
            if any(value is not None for value in (kind, dtype, shape, keys, decode)):
                raise ValueError(f"{self.path} is read by its manifest: leave kind, dtype, shape, keys and decode out")
            self._length = self.manifest.samples
        self._opened = None  # a fork brings nothing along that has not been read in this process
        if not self._length:
            raise LMDBError(f"{self.path} is empty: it has no key that could be a sample")

    @property
    def classes(self) -> list[str]:
        """Names of the classes that the packed source had; empty where it had none."""
        return [] if self.manifest is None else list(self.manifest.classes)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        """The sample of an index, from the front or the back; a list of samples for a slice."""
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._length))]
        return self.decode(self.read(index), index)

    def read(self, index: SupportsIndex) -> bytes:
        """The bytes that lie there for an index.

        Raises:
            IndexError: it is outside of the dataset.
            LMDBError: there are none.
        """
        position = self._position(index)
        if (content := self._file().get(self._key(position))) is None:
            why = "it is damaged: pack it again" if self._keys is None else "give keys= that are there"
            raise LMDBError(f"{self.path} has no key {self._key(position)!r}, of sample {position}: {why}")
        return content

    def decode(self, content: bytes, index: SupportsIndex) -> Any:
        """The sample of the bytes that `read` gave for this index.

        Raises:
            LMDBError: they are damaged, or not what the values are said to be.
        """
        position = self._position(index)
        try:
            sample = decode_blob(content, position) if self._keys is None else self._decode(content)
        except BlobError as error:
            raise LMDBError(f"{self.path}, sample {position}: {error}. Copy or pack it again") from error
        except Exception as error:  # of PIL, JSON, or a function of the user's: they may raise anything
            raise LMDBError(
                f"{self.path}: the value of {self._key(position)!r}, {len(content)} bytes that begin with "
                f"{content[:16]!r}, cannot be read ({error}): give kind=, dtype= or decode= that fits; nothing is "
                "unpickled here, unless by a function of yours"
            ) from error
        transform, target_transform = self.transform, self.target_transform
        if transform is None and target_transform is None:
            return sample
        if type(sample) in (tuple, list) and len(sample) == 2:
            first, second = sample
            first = first if transform is None else transform(first)
            return type(sample)((first, second if target_transform is None else target_transform(second)))
        return sample if transform is None else transform(sample)

    def __repr__(self) -> str:
        packed = "" if self.manifest is None else f", packed from {self.manifest.source}"
        return f"{type(self).__name__}({self.path!r}, {self._length} samples{packed})"

    def _file(self) -> LMDBFile:
        """The LMDB, as this process has it open."""
        if (opened := self._opened) is None or opened.pid != os.getpid():
            opened = LMDBFile.of(self._location)
            if opened.version != self._version:
                raise LMDBError(f"{self.path} has changed since it was opened by another process: open it anew")
            self._opened = opened
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def _position(self, index: SupportsIndex) -> int:
        position = position_of(index, self)
        if not 0 <= position < self._length:
            raise IndexError(f"index must be one of {self._length} samples, got {index}")
        return position

    def _key(self, position: int) -> bytes:
        return key_of(position) if self._keys is None else self._keys[position]

    def _find_manifest(self) -> PackManifest | None:
        content = self._file().get(MANIFEST_KEY)
        if content is None:
            return None
        try:
            manifest = PackManifest.parse(content)
        except LMDBError as error:
            raise LMDBError(f"{self.path} cannot be read: {error}") from None
        samples = self._file().entries - 1
        if not manifest.complete or samples != manifest.samples:
            raise LMDBError(
                f"{self.path} has {samples:,} of the {manifest.samples:,} samples of {manifest.source}: wait for "
                "`pack` to end, or run the same command again, which goes on there"
            )
        return manifest


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
    """The keys of the samples of an LMDB that others have written."""
    keys = [key for key in keys if not (key.startswith(b"__") and key.endswith(b"__"))]
    return sorted(keys, key=int) if keys and all(map(bytes.isdigit, keys)) else keys
