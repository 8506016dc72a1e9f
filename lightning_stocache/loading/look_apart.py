"""A look in a process like a worker of a loader, where the loader has workers and none runs.

A loader whose samples are all stored starts no workers. Its next workers would see the source as it is now, after the
loader's `worker_init_fn`. This process must not read it: it would open files that later workers share.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.setup.reader import Reader, Subject, start_method
from lightning_stocache.source.looks import Due, Look

__all__ = ["look_apart"]

log = logging.getLogger(__name__)


def look_apart(cached: CachedSource, loader: DataLoader[Any], due: Due) -> Look:
    """Read stored samples again in a process of its own.

    Args:
        cached: the cached source.
        loader: the loader, with its start method and its `worker_init_fn`.
        due: what to do.
    """
    begun = time.perf_counter_ns()
    context = loader.multiprocessing_context
    method = start_method(None if context is None else context.get_start_method())
    subject = Subject(cached.look, cached.source, type(cached.source).__name__, has_workers=True)
    with closing(Reader([subject], method, init=loader.worker_init_fn)) as reader:
        try:
            look: Look = reader.ask(due)
        except Exception:  # the source is the user's, and may raise anything
            log.debug("no sample could be read again", exc_info=True)
            return Look(1, time.perf_counter_ns() - begun)  # the time is spent
    return replace(look, spent_ns=time.perf_counter_ns() - begun)
