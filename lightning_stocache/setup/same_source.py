"""Whether the cache of a dataset can go on with another object: the same dataset, made anew, or a longer one.

Some loader hooks make their dataset whenever they run, and a dataset that grows is often made anew to be longer. A few
samples that are in the cache are read from the new object, in a process that is thrown away, and compared.
"""

from __future__ import annotations

import logging
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from torch.utils.data import IterableDataset

from lightning_stocache.cache.store import NO_PLACE, Store
from lightning_stocache.setup.look import PATIENCE_SECONDS
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.reader_process import NotStartedError, read_apart
from lightning_stocache.source.samples import same_sample
from lightning_stocache.torch_internals import set_worker_dataset

__all__ = ["is_continued"]

log = logging.getLogger(__name__)

_TRIED, _COMPARED = 256, 4  # indices that are looked for in the cache, and samples that are compared


class _Comparison(IterableDataset[bytes]):
    """In a worker: whether samples of a source are those of a cache, pickled."""

    def __init__(self, source: Any, cache: Store, indices: Sequence[int]) -> None:
        self.source, self.cache, self.indices = source, cache, indices

    def __iter__(self) -> Iterator[bytes]:
        set_worker_dataset(self.source)
        stored = self.cache.read(self.cache.lookup(np.array(self.indices)))
        pairs = zip(self.indices, stored, strict=True)
        yield pickle.dumps(all(same_sample(self.source[index], sample) for index, sample in pairs))


def is_continued(opened: OpenCache, dataset: Any) -> bool:
    """Whether another dataset has the samples that are in a cache; it may have more behind them.

    False also where that cannot be known: nothing is stored by now, the random part of the source was cut off, or it is
    cached as it is, though random.
    """
    cache, request, length = opened.live_cache, opened.request, len(dataset)
    if sys.platform != "linux":  # a spawned process would run the user's script again
        return False
    if cache is None or type(dataset) is not type(request.source) or opened.source is not request.source:
        return False
    if request.allow_random or request.name is not None or request.domain is not None or length < cache.length:
        return False
    tried = np.unique(np.linspace(0, cache.length - 1, _TRIED).astype(np.int64))
    stored = tried[cache.lookup(tried) != NO_PLACE]
    if not len(stored):
        return False
    indices = np.unique(stored[np.linspace(0, len(stored) - 1, _COMPARED).astype(np.int64)]).tolist()
    begun = time.monotonic()

    def on_wait() -> None:
        if time.monotonic() - begun > PATIENCE_SECONDS:
            raise TimeoutError(f"reading {len(indices)} samples has not ended in {PATIENCE_SECONDS:.0f} s")

    try:
        return cast(bool, pickle.loads(read_apart(_Comparison(dataset, cache, indices), "fork", on_wait)))
    except NotStartedError:
        return False
    except Exception as error:  # the source is the user's, and may raise anything
        log.debug("%s cannot be compared with the one before: %s", request.title, error)
        return False
