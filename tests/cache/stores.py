"""Stores of each kind, as tests open them: samples, codecs, how one gets a store for them, and what it serves.

The fences of this room know stores by the contract (`Store`) and by this file, which alone changes when stores
are made or opened in another way. The fences of the whole package, which a change of its inside leaves as they are:

- test_any_store.py: every kind of store against a dict, whatever happens to its jobs and its disk
- test_kills.py: a process may be killed at any line, and at any moment, and nobody is served a torn sample
- ../loading/twins.py: a loader beside the DataLoader that it must equal
- ../interop/test_freezing.py: no random transform of any library is frozen
- ../conftest.py, ../processes.py: a test leaves no process, memory or environment variable behind
"""

import errno
import os
import random
import sys
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.cache.head import ROLLING
from lightning_stocache.cache.placement import Arc, Ring
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import NO_SLOT, Store
from lightning_stocache.node.files import HEADER_BYTES, prefix
from lightning_stocache.node.named import open_named
from lightning_stocache.node.segment import Segment
from tests.cache.leaves import same

KINDS = ("memory", "disk")
LAYOUTS = ("rows", "records")
LENGTH = 48
ALL = list(range(LENGTH))
ARC = Ring.cut(LENGTH, (1.0,), (LENGTH,)).arcs[0]
GRANTED = 2**20
PAGE = 4096

# ---- samples ----


def sample(layout: str, number: int) -> Any:
    """A sample whose every word says which it is, and is not zero; a record has a size of its own, too."""
    if layout == "rows":
        return torch.full((1024,), ~number), number
    words = random.Random(number).randrange(1, 1500)
    return {"number": number, "words": torch.full((words,), ~number), "text": f"{number} " * (words % 50)}


_stored = lru_cache(2048)(sample)


def number_of(read: Any) -> int:
    """The number of a sample that was read, each word of which is compared with the sample that was stored."""
    layout, number = ("rows", read[1]) if isinstance(read, tuple) else ("records", read["number"])
    assert same(read, _stored(layout, number)), f"sample {number} is torn or damaged"
    return int(number)


def infer_codec(layout: str, samples: list[Any]) -> Any:
    """The codec of such samples, as rows or as records that others have written."""
    return SampleSpec.infer(samples[0]) if layout == "rows" else RecordCodec.infer(samples)


@lru_cache(2)
def codec_of(layout: str) -> Any:
    """The codec of these samples."""
    return infer_codec(layout, [sample(layout, number) for number in range(20)])


def layout_of(store: Any) -> str:
    return "rows" if store.codec.is_fixed else "records"


def encoded(store: Any, number: int) -> list[memoryview]:
    """A sample as `put` takes it."""
    return _encoded(layout_of(store), number)


@lru_cache(2048)
def _encoded(layout: str, number: int) -> list[memoryview]:
    codec = codec_of(layout)
    return list(codec.contents(codec.encode(_stored(layout, number), number)))


# ---- opening ----


def memory_store(codec: Any, granted: int = GRANTED, arc: Any = ARC, backend: Any = None) -> Any:
    """A new store in memory, which children of this process have, too."""
    return Store.create(codec, arc, backend, granted=granted)


def rolling_store(codec: Any, samples: int) -> Any:
    """A new store for about so many samples, of which the oldest leave. `attach_rolling` opens it by its handle."""
    return RollingStore.empty(codec, samples, granted=samples * codec.nbytes)


attach_rolling = RollingStore.attach


# ---- filling and reading ----


def filled(store: Any, indices: Iterable[int] = ALL) -> list[int]:
    """Store samples under their numbers. Returns the indices that were stored."""
    layout = layout_of(store)
    return [index for index in indices if store.fill(index, _stored(layout, index))]


def append(store: Any, numbers: Iterable[int]) -> None:
    """Append samples to a rolling store under their numbers."""
    layout = layout_of(store)
    assert all(store.append(sample(layout, number), number) for number in numbers)


def served(store: Any) -> list[int]:
    """The indices that can be read now; each sample is compared, by itself, among others and in a gather."""
    seen = store.changes
    places = store.lookup(np.array(ALL), verify=True)
    found, ready = np.flatnonzero(places != NO_SLOT).tolist(), places[places != NO_SLOT]
    samples = list(store.read(ready))
    if store.changes != seen:  # some were lost: who reads looks up again
        return served(store)
    assert list(map(number_of, samples)) == found
    assert [number_of(store.get(index)) for index in found] == found
    assert gathered(store, ready[::-1]) == found[::-1]
    return list(found)


def gathered(store: Any, places: Any) -> list[int]:
    """The numbers of the samples that a gather of these places gives; records are read, as nothing gathers them."""
    if not store.codec.is_fixed:
        return [number_of(read) for read in store.read(places)]
    memory = [np.empty(size, dtype=np.uint8) for size in store.codec.sizes(len(places))]
    store.gather(places, memory)
    return [number_of(read) for read in store.codec.split(memory, len(places))]


def resident(store: Any) -> list[int]:
    """The numbers of the samples that a rolling store has now, in order; each is compared, on a disk with its index."""
    substituted = store.substituted
    slots = np.array([slot for slot in store.readable_slots().tolist() if store.is_sound(slot)], dtype=np.int64)
    numbers = [number_of(read) for read in store.read(slots)]
    assert store.substituted == substituted
    if store.segment.on_disk:
        indices, by_index = store.slots_by_index(10**15)  # no array has that length
        assert dict(zip(indices.tolist(), by_index.tolist(), strict=True)) == dict(zip(numbers, slots, strict=True))
    return sorted(numbers)


def append_for_ever(handle: Any, number: int) -> None:
    """Append samples to a rolling store, from this number on, until this process or its parent is killed."""
    store = attach_rolling(handle)
    layout = layout_of(store)
    while os.getppid() != 1:
        number += store.append(sample(layout, number), number)


# ---- what happens to a disk ----


class Disk:
    """A directory in which one job after the other opens the same named store; `granted` are bytes for records."""

    def __init__(self, directory: Path, layout: str, granted: int = GRANTED) -> None:
        self.directory, self.layout, self.granted = directory, layout, granted
        self.codec, self.path = codec_of(layout), directory / f"{prefix()}store"

    def open(self) -> Any:
        """Open the store as the next job does, or make it."""
        size, manifest = Store.plan(self.codec, ARC, granted=self.granted, on_disk=True)
        mend = partial(Store.mend, self.codec)
        segment, found = open_named("store", size, manifest, str(self.directory), mend)
        return Store.open(segment, self.codec, found.geometry, LENGTH)

    def fill(self, indices: Iterable[int] = ALL) -> None:
        """Store samples, as one job."""
        store = self.open()
        filled(store, indices)
        store.close()

    def served(self) -> list[int]:
        """The indices that the next job is served."""
        store = self.open()
        indices = served(store)
        store.close()
        return indices


class RollingDisk(Disk):
    """A directory in which one job after the other opens the same rolling store, for about so many samples."""

    def __init__(self, directory: Path, layout: str, samples: int = 24) -> None:
        super().__init__(directory, layout)
        self.samples = samples

    def open(self) -> Any:
        """Open the store as the next job does, or make it."""
        codec, samples = self.codec, self.samples
        count, granted = RollingStore.fit(codec, samples, samples * codec.nbytes, sys.maxsize)
        whose = {"fingerprint": ROLLING}
        size, manifest = RollingStore.plan(codec, Arc(count, count), whose, granted=granted, on_disk=True)
        mend = partial(RollingStore.mend, codec)
        segment, found = open_named("store", size, manifest, str(self.directory), mend)
        return RollingStore.open(segment, codec, found.geometry, found.geometry.size)


def flip(content: bytearray, generator: random.Random, count: int) -> None:
    """Flip bits somewhere behind the header, each a different one."""
    for place in generator.sample(range(HEADER_BYTES * 8, len(content) * 8), count):
        content[place // 8] ^= 1 << place % 8


def power_cut(before: bytes, after: bytes, generator: random.Random) -> bytes:
    """What a disk may hold after a power cut: what was synced, and some of the pages that were written since."""
    image = bytearray(before.ljust(len(after), b"\0"))
    for start in range(0, len(after), PAGE):
        if after[start : start + PAGE] != image[start : start + PAGE] and generator.random() < 0.5:
            image[start : start + PAGE] = after[start : start + PAGE]
    return bytes(image)


def lose_pages(path: Path, before: bytes, generator: random.Random) -> None:
    """Lose some of the pages that were written since the disk had `before`: they show that again."""
    with path.open("r+b") as file:
        image = power_cut(before, path.read_bytes(), generator)
        for start in range(HEADER_BYTES, len(image), PAGE):
            os.pwrite(file.fileno(), image[start : start + PAGE], start)


def refuse_stores(patch: pytest.MonkeyPatch, error: int = errno.ENOSPC) -> None:
    """Have the system refuse to store anything from now on, until `patch` is undone; a full disk by default."""

    def refuse(segment: Segment, offset: int, *parts: Any) -> None:
        raise OSError(error, os.strerror(error))

    patch.setattr(Segment, "store", refuse)
    patch.setattr(Segment, "put", refuse)


def break_one_block(patch: pytest.MonkeyPatch) -> None:
    """Have the next read through a file fail, as from a bad block; later reads succeed."""
    fetch, failed = Segment.fetch, []

    def broken(segment: Segment, offset: int, length: int) -> bytes:
        if not failed:
            failed.append(offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return fetch(segment, offset, length)

    patch.setattr(Segment, "fetch", broken)
