"""Stores on a disk that one job after the other opens, and what happens to the disk in between."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_stocache.cache.disk_store import DiskStore
from lightning_stocache.cache.placement import Ring
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.cache.stores import disk_store_for
from lightning_stocache.node.files import HEADER_BYTES
from lightning_stocache.node.named import open_named, prefix

LENGTH = 48
PAGE = 4096


def row(index: int) -> tuple[torch.Tensor, int]:
    """A sample of fixed fields, of which no other has the bytes."""
    return torch.from_numpy(np.random.default_rng(index).integers(0, 256, 700, dtype=np.uint8)), index


def record(index: int) -> dict[str, Any]:
    """A sample of its own size, with text, numbers and an array."""
    generator = random.Random(index)
    array = torch.arange(generator.choice([0, 3, 5000]), dtype=torch.int32) + index
    return {"index": index, "text": f"{index}," * generator.randrange(300), "array": array}


SAMPLES = {"rows": row, "records": record}


def codec_of(layout: str) -> Any:
    """The codec of rows, or of records that others have written."""
    if layout == "rows":
        return SampleSpec.infer(row(0))
    samples = [record(index) for index in range(8)]
    return RecordCodec.infer(samples).admitting(samples)


class Disk:
    """A named store on a disk, opened by one job after the other.

    Args:
        directory: where.
        layout: rows or records.
        granted: bytes for records.
    """

    def __init__(self, directory: Path, layout: str, granted: int = 2**20) -> None:
        self.directory, self.layout, self.granted = directory, layout, granted
        self.sample, self.codec = SAMPLES[layout], codec_of(layout)
        self.arc = Ring.cut(LENGTH, (1.0,), (LENGTH,)).arcs[0]
        self.path = directory / f"{prefix()}store"

    def open(self) -> DiskStore[Any]:
        """The store as the next job finds it, or makes it."""
        kind = disk_store_for(self.codec)
        size, manifest = kind.layout(self.codec, self.arc, granted=self.granted)
        segment, found = open_named("store", size, manifest, str(self.directory), kind.mend)
        return kind.found(segment, self.codec, found.geometry, LENGTH)

    def fill(self, indices: Any = range(LENGTH)) -> None:
        """A job that stores those samples."""
        store = self.open()
        for index in indices:
            store.fill(index, self.sample(index))
        store.close()

    def served(self, store: DiskStore[Any] | None = None) -> list[int]:
        """The indices that a job is served, each of which is compared with what was stored."""
        opened = self.open() if store is None else store
        indices = []
        opened.recall(list(range(LENGTH)))
        for index in range(LENGTH):
            sample = opened.get(index)
            if sample is not None:
                assert same(sample, self.sample(index)), f"a wrong sample under {index}"
                indices.append(index)
        if store is None:
            opened.close()
        return indices

    def bytes(self) -> bytearray:
        """What lies on the disk."""
        return bytearray(self.path.read_bytes())

    def write(self, content: bytes) -> None:
        """Have something else lie on the disk."""
        self.path.write_bytes(content)
        os.chmod(self.path, 0o600)


def same(left: Any, right: Any) -> bool:
    """Whether two samples are equal, bit for bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def flip(content: bytearray, generator: random.Random, count: int, start: int = HEADER_BYTES) -> None:
    """Flip bits somewhere behind the header, each a different one."""
    for place in generator.sample(range(start * 8, len(content) * 8), count):
        content[place // 8] ^= 1 << place % 8


def power_cut(before: bytes, after: bytes, generator: random.Random) -> bytes:
    """What a disk may hold after a power cut: what was synced, and some of the pages that were written since."""
    image = bytearray(before.ljust(len(after), b"\0"))
    for start in range(0, len(after), PAGE):
        if after[start : start + PAGE] != image[start : start + PAGE] and generator.random() < 0.5:
            image[start : start + PAGE] = after[start : start + PAGE]
    return bytes(image)
