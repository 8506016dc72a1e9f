"""Sources for tests: deterministic from the index, and counted by something that no cache can reach."""

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, get_worker_info

_INDEX_BYTES = 8


class CountedSource(Dataset[tuple[torch.Tensor, int]]):
    """Samples `(uint8 tensor, label)` that follow from their index; every load, in any process, is added to a file."""

    def __init__(self, length: int, shape: Sequence[int] = (3, 8, 8), log_path: str | Path = "", classes: int = 10):
        self.length, self.shape, self.classes = length, tuple(shape), classes
        self.log_path = str(log_path)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(f"index {index} is outside of {self.length} samples")
        self.count(index)
        return self.expected(index)

    def count(self, index: int) -> None:
        """Add a load to the file, in one write to its end: none is lost."""
        if self.log_path:
            with open(self.log_path, "ab", buffering=0) as log:
                log.write(int(index).to_bytes(_INDEX_BYTES, "little"))

    def expected(self, index: int) -> tuple[torch.Tensor, int]:
        """The sample of an index, without a load."""
        generator = torch.Generator().manual_seed(int(index))
        return torch.randint(0, 256, self.shape, dtype=torch.uint8, generator=generator), index % self.classes

    @property
    def loaded(self) -> list[int]:
        """The indices that have been loaded, in that order, by all processes together."""
        data = Path(self.log_path).read_bytes() if os.path.exists(self.log_path) else b""
        return [int.from_bytes(data[at : at + _INDEX_BYTES], "little") for at in range(0, len(data), _INDEX_BYTES)]

    @property
    def loads(self) -> int:
        """How many that are."""
        return os.path.getsize(self.log_path) // _INDEX_BYTES if os.path.exists(self.log_path) else 0


class Made(CountedSource):
    """Whatever a function makes of an index."""

    def __init__(self, make: Callable[[int], Any], length: int = 12, log_path: str | Path = "") -> None:
        super().__init__(length, log_path=log_path)
        self.make = make

    def expected(self, index: int) -> Any:
        return self.make(index)


class CountedFiles(CountedSource):
    """Samples that `decoded` makes of the bytes that `content` gives for an index, as of files; reads are counted."""

    def __init__(self, content: Any, decoded: Any, length: int = 12, log_path: str | Path = "") -> None:
        super().__init__(length, log_path=log_path)
        self.content, self.decoded = content, decoded

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.read(index), index)

    def read(self, index: int) -> bytes:
        self.count(index)
        return self.content(index)

    def decode(self, content: bytes, index: int) -> Any:
        return self.decoded(content, index)


class TransformedSource(CountedSource):
    """Images that its `transform` changes, if it has one, as most users' sources have."""

    transform: Any = None

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return (image if self.transform is None else self.transform(image)), label


class Allowance:
    """Each process may load as many samples as a file has bytes; the next load waits for more."""

    def __init__(self, path: Path, loads: int) -> None:
        self.path = path
        self._process, self._loads = 0, 0
        self.more(loads)

    def more(self, loads: int) -> None:
        """Allow so many more."""
        with open(self.path, "ab") as file:
            file.write(bytes(loads))

    def __call__(self, index: int) -> None:
        """Before a load."""
        if self._process != os.getpid():
            self._process, self._loads = os.getpid(), 0
        self._loads += 1
        while self.path.stat().st_size < self._loads:
            time.sleep(0.002)


def write_photos(root: Path) -> Path:
    """Two classes of three photographs of several sizes, as ImageFolder reads them."""
    noise = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(3):
            pixels = noise.integers(0, 256, (12 + number, 20 - number, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.jpg")
    return root


def write_lmdb(path: Path, values: Mapping[Any, bytes], *, subdir: bool = False) -> Path:
    """Write values into an LMDB, as others do. A key is bytes, or whatever `str` makes one of."""
    lmdb = importlib.import_module("lmdb")
    with lmdb.open(str(path), subdir=subdir, lock=False, map_size=1 << 24) as environment:
        with environment.begin(write=True) as transaction:
            for key, value in values.items():
                transaction.put(key if isinstance(key, bytes) else str(key).encode(), value)
    return path


def lmdb_values(path: Path) -> dict[bytes, bytes]:
    """The values of an LMDB by their keys."""
    lmdb = importlib.import_module("lmdb")
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment:
        with environment.begin() as transaction:
            return dict(transaction.cursor())


class CountedStream(IterableDataset[Any]):
    """What `make` makes of the numbers from 0 up to a length, by default the numbers; workers share them."""

    length = 0

    def __init__(self, length: int = 0, make: Callable[[int], Any] | None = None) -> None:
        self.length, self.make = length or self.length, make
        self.counts = torch.zeros(9, dtype=torch.int64).share_memory_()  # one per worker: adding is not atomic

    @property
    def reads(self) -> int:
        return int(self.counts.sum())

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.length, step):
            self.counts[0 if info is None else 1 + info.id] += 1
            yield self.sample(number)

    def sample(self, number: int) -> Any:
        return number if self.make is None else self.make(number)
