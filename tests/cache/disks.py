"""Stores on a disk that one job after the other opens, and what happens to the disk in between."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np

from tests.cache.equality import same
from tests.cache.stores import ARC, HEADER_BYTES, LENGTH, SAMPLES, codec_of, disk_store, path_of

PAGE = 4096


class Disk:
    """A named store on a disk, opened by one job after the other.

    Args:
        directory: where.
        layout: rows or records.
        granted: bytes for records.
    """

    def __init__(self, directory: Path, layout: str, granted: int = 2**20) -> None:
        self.directory, self.layout, self.granted = directory, layout, granted
        self.sample, self.codec, self.arc = SAMPLES[layout], codec_of(layout), ARC
        self.path = path_of(directory)

    def open(self) -> Any:
        """Open the store as the next job does, or make it."""
        return disk_store(self.codec, self.directory, self.granted)

    def fill(self, indices: Any = range(LENGTH)) -> None:
        """Store samples, as one job."""
        store = self.open()
        for index in indices:
            store.fill(index, self.sample(index))
        store.close()

    def served(self, store: Any = None) -> list[int]:
        """The indices that a job is served, each of which is compared with what was stored."""
        opened = self.open() if store is None else store
        indices = []
        opened.lookup(np.arange(LENGTH), verify=True)
        for index in range(LENGTH):
            sample = opened.get(index)
            if sample is not None:
                assert same(sample, self.sample(index)), f"a wrong sample under {index}"
                indices.append(index)
        if store is None:
            opened.close()
        return indices

    def bytes(self) -> bytearray:
        """The content of the file."""
        return bytearray(self.path.read_bytes())

    def write(self, content: bytes) -> None:
        """Replace the content of the file."""
        self.path.write_bytes(content)
        os.chmod(self.path, 0o600)


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
