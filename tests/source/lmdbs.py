"""LMDBs as others write them, and all that lies in one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["entries", "put"]


def put(path: Path, values: Mapping[Any, bytes], *, subdir: bool = False) -> Path:
    """Write values into an LMDB, which is made if it is not there. A key is bytes, or whatever `str` makes one of."""
    import lmdb

    with lmdb.open(str(path), subdir=subdir, lock=False, map_size=1 << 24) as environment:
        with environment.begin(write=True) as transaction:
            for key, value in values.items():
                transaction.put(key if isinstance(key, bytes) else str(key).encode(), value)
    return path


def entries(path: Path) -> dict[bytes, bytes]:
    """The values of an LMDB by their keys."""
    import lmdb

    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment:
        with environment.begin() as transaction:
            return dict(transaction.cursor())
