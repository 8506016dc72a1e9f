"""Stores of each kind, as tests open them: samples, codecs, and how one gets a store for them.

The fences of this room know stores by the contract (`Store`) and by this file, which alone changes when stores
are made or opened in another way. The fences of the whole package, which a change of its inside leaves as they are:

- test_any_store.py: every kind of store against a dict, whatever happens to its jobs and its disk
- test_torn_reads.py: nobody is served half of one sample and half of another
- test_kills.py: a process may be killed at any line, and at any moment
- ../loading/twins.py: a loader beside the DataLoader that it must equal
- ../interop/test_freezing.py: no random transform of any library is frozen
- ../conftest.py, ../audit.py, ../proc.py: a test leaves no process, memory or environment variable behind
"""

import errno
import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_stocache.cache.layout import ROLLING
from lightning_stocache.cache.placement import Arc, Ring
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import NO_PLACE, Store, gathers
from lightning_stocache.node.files import HEADER_BYTES, prefix
from lightning_stocache.node.named import open_named
from lightning_stocache.node.segment import Segment

__all__ = [
    "ARC",
    "HEADER_BYTES",
    "KINDS",
    "LAYOUTS",
    "LENGTH",
    "NO_PLACE",
    "SAMPLES",
    "attach_rolling",
    "codec_of",
    "disk_store",
    "encoded",
    "evicted",
    "gathers",
    "infer_codec",
    "memory_store",
    "path_of",
    "refuse_stores",
    "resident",
    "rolling_disk_store",
    "rolling_store",
]

KINDS = ("memory", "disk")
LAYOUTS = ("rows", "records")
LENGTH = 48
ARC = Ring.cut(LENGTH, (1.0,), (LENGTH,)).arcs[0]
GRANTED = 2**20


def row(index: int) -> tuple[torch.Tensor, int]:
    """A sample of fixed fields, of which no other has the bytes."""
    return torch.from_numpy(np.random.default_rng(index).integers(0, 256, 700, dtype=np.uint8)), index


def record(index: int) -> dict[str, Any]:
    """A sample of its own size, with text, numbers and an array."""
    generator = random.Random(index)
    array = torch.arange(generator.choice([0, 3, 5000]), dtype=torch.int32) + index
    return {"index": index, "text": f"{index}," * generator.randrange(300), "array": array}


SAMPLES = {"rows": row, "records": record}


def infer_codec(layout: str, samples: list[Any]) -> Any:
    """The codec of such samples, as rows or as records that others have written."""
    return SampleSpec.infer(samples[0]) if layout == "rows" else RecordCodec.infer(samples)


def codec_of(layout: str) -> Any:
    """The codec of `SAMPLES`."""
    return infer_codec(layout, [SAMPLES[layout](index) for index in range(8)])


def encoded(codec: Any, sample: Any, index: int) -> list[memoryview]:
    """A sample as `put` takes it."""
    return codec.contents(codec.encode(sample, index))


# ---- opening ----


def memory_store(codec: Any, granted: int = GRANTED, arc: Any = ARC, backend: Any = None) -> Any:
    """A new store in memory, which children of this process have, too."""
    return Store.create(codec, arc, backend, granted=granted)


def disk_store(codec: Any, directory: Path, granted: int = GRANTED) -> Any:
    """The named store in a directory as the next job finds it, or makes it."""
    size, manifest = Store.plan(codec, ARC, granted=granted, on_disk=True)
    segment, found = open_named("store", size, manifest, str(directory), partial(Store.mend, codec))
    return Store.open(segment, codec, found.geometry, LENGTH)


def path_of(directory: Path) -> Path:
    """The file of the named store."""
    return directory / f"{prefix()}store"


def rolling_store(codec: Any, samples: int) -> Any:
    """A new store for about so many samples, of which the oldest leave. `attach_rolling` opens it by its handle."""
    return RollingStore.empty(codec, samples, granted=samples * codec.nbytes)


attach_rolling = RollingStore.attach


def rolling_disk_store(codec: Any, samples: int, directory: Path) -> Any:
    """A store for about so many samples in a directory, as the next job finds it, or makes it."""
    count, granted = RollingStore.fit(codec, samples, samples * codec.nbytes, sys.maxsize)
    whose = {"fingerprint": ROLLING}
    size, manifest = RollingStore.plan(codec, Arc(count, count), whose, granted=granted, on_disk=True)
    mend = partial(RollingStore.mend, codec)
    segment, found = open_named("store", size, manifest, str(directory), mend)
    return RollingStore.open(segment, codec, found.geometry, found.geometry.size)


# ---- what the contract of a store has no name for ----


def resident(store: Any) -> Any:
    """The places of a rolling store that can be read now."""
    return store.readable_slots()


def evicted(store: Any) -> int:
    """How many samples have left a rolling store for newer ones."""
    return int(store.evicted)


_store = Segment.store


def refuse_stores(refused: bool) -> None:
    """Have the system refuse to store anything from now on, as if memory and disk were full; or let it again."""
    Segment.store = _refuse if refused else _store  # type: ignore[method-assign]


def _refuse(segment: Segment, offset: int, *parts: memoryview) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
