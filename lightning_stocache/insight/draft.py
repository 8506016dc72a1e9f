"""The draft of a plan: a job on this machine, with what its samples cost.

It brings together what is asked of the system (cores, free memory), what the trial measures, and how the user trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Sized
from typing import Any, cast

from torch.utils.data import Dataset

from lightning_stocache.cache.field import UnsupportedSampleError
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.insight.costs import Costs, Job, Loading, PlanError
from lightning_stocache.insight.trial import measure
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.sampler import Mode
from lightning_stocache.loading.source import check_source
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import grant, loader_reserve

__all__ = ["draft", "largest_safe"]

_LARGE = 2**62


def draft(
    source: Dataset[Any],
    loading: Loading,
    transform: Callable[[Any], Any] | None = None,
    *,
    others: Sequence[Dataset[Any]] = (),
    allow_random: bool = False,
    mode: Mode = "locality",
    nodes: int = 1,
    ranks: int = 1,
    epochs: int = 10,
    seconds: float = 3.0,
) -> tuple[Job, Costs]:
    """Measure what a `Planner` needs for training on a dataset, with this machine as one of the nodes.

    Args:
        source: the training set.
        loading: how one rank loads it.
        transform: per sample, after the cache.
        others: datasets that share the budget; one sample of each is read.
        allow_random: whether a random source is cached as it is.
        mode: how samples are dealt to nodes.
        nodes: number of nodes.
        ranks: ranks on each node.
        epochs: number of epochs.
        seconds: what each measurement may take.

    Raises:
        PlanError: a dataset is empty, iterable-style or raises, or there is no memory for a few samples.

    Example:
        >>> import torch
        >>> job, costs = draft([torch.zeros(100)] * 64, Loading(batch_size=8), nodes=2, seconds=0.01)
        >>> job.samples, job.own_samples, costs.spec.nbytes
        (64, 32.0, 400)
    """
    try:
        check_source(source, CachedDataset)
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from error
    load = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0  # of the others, so far
    factor = loading.settings.get("prefetch_factor")
    room = largest_safe(_LARGE, 0, loading.num_workers, factor, ranks)
    costs = measure(source, loading, room, transform, allow_random=allow_random, seconds=seconds)
    samples = len(cast(Sized, source))
    batch_bytes = loading.batch_size * (costs.spec.nbytes if costs.spec is not None else 0)
    job = Job(
        samples,
        loading.batch_size,
        loading.num_workers,
        nodes,
        ranks,
        epochs,
        mode,
        sum(map(_cached_bytes, others)),
        largest_safe(_LARGE, batch_bytes, loading.num_workers, factor, ranks),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        loading.persistent,
        0 < (costs.reads.from_disk or 0) * samples < FreeMemory.measure(None).bytes,
        load,
    )
    return job, costs


def largest_safe(
    dataset_bytes: int, batch_bytes: int, num_workers: int, prefetch_factor: int | None, ranks: int
) -> int:
    """The bytes that a cache of this size may take on this node, at most: of /dev/shm or, if that is small, of a memfd.

    Example:
        >>> largest_safe(2**20, batch_bytes=2**10, num_workers=0, prefetch_factor=None, ranks=1) == 2**20
        True
    """
    places = [memory_directory()] + ([None] if hasattr(os, "memfd_create") else [])
    frees = [FreeMemory.measure(place) for place in places]
    reserve = loader_reserve(batch_bytes, num_workers, prefetch_factor, ranks, own=frees[0].own)
    return max(grant(Budget.parse("auto"), dataset_bytes, free, reserve, ranks).bytes for free in frees)


def _cached_bytes(source: Dataset[Any]) -> int:
    """What a whole dataset takes in the cache; 0 if it cannot be cached."""
    try:
        check_source(source, CachedDataset)
    except (TypeError, ValueError):  # empty or iterable-style
        return 0
    try:
        return len(cast(Sized, source)) * SampleSpec.infer(source[0]).slot_bytes
    except UnsupportedSampleError:
        return 0
    except Exception as error:  # code of the user's may raise anything
        raise PlanError(
            f"sample 0 of {type(source).__name__} cannot be had: {type(error).__name__}: {error}"
        ) from error
