"""Which indices a sampler can draw, if that can be seen without drawing from it.

It is known of torch's own samplers, of MONAI's distributed ones, and of lists of indices or of batches. Of any other
nothing is known: all of the dataset may be drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stocache.cache.domain import Domain
from lightning_stocache.sampling.locality_sampler import LocalitySampler

__all__ = ["indices_of", "is_monai", "sampler_domain"]

log = logging.getLogger(__name__)


def sampler_domain(sampler: Any, length: int) -> Domain | None:
    """The indices that a sampler, or a batch sampler, can draw; None for all of them, or where that is not known.

    Args:
        sampler: a loader's.
        length: number of samples in its dataset.

    Example:
        >>> sampler_domain(WeightedRandomSampler([0.5, 0, 0, 2], num_samples=4), length=4).indices.tolist()
        [0, 3]
        >>> sampler_domain(RandomSampler(range(4)), length=4) is None
        True
    """
    try:
        indices = indices_of(sampler)
        domain = None if indices is None else Domain(indices, length)
    except Exception:  # keys that only the source understands, attributes that are not what they are called
        log.debug("what %s draws cannot be told", type(sampler).__name__, exc_info=True)
        return None
    return None if domain is None or domain.is_whole or not len(domain) else domain


def indices_of(sampler: Any) -> Any | None:
    """The list of indices that a sampler draws from, each as often as it comes there; None where it is not known."""
    kind = type(sampler)
    if kind is BatchSampler:
        return indices_of(sampler.sampler)
    if isinstance(sampler, SubsetRandomSampler):
        return _numbers(sampler.indices)
    if isinstance(sampler, WeightedRandomSampler) or is_monai(sampler, "DistributedWeightedRandomSampler"):
        return np.flatnonzero(np.asarray(torch.as_tensor(sampler.weights)) > 0)
    if kind in (DistributedSampler, LocalitySampler) or is_monai(sampler, "DistributedSampler"):
        return np.arange(len(sampler.dataset))
    if kind in (RandomSampler, SequentialSampler):
        return np.arange(len(sampler.data_source))
    if isinstance(sampler, list | tuple | range | np.ndarray | torch.Tensor):
        batches: Any = sampler
        in_batches = len(sampler) > 0 and isinstance(sampler[0], Sequence)
        return _numbers(list(chain.from_iterable(batches)) if in_batches else sampler)
    return None


def is_monai(sampler: Any, name: str) -> bool:
    """Whether a sampler is the one of this name in MONAI, which need not be installed."""
    return (type(sampler).__module__, type(sampler).__name__) == ("monai.data.samplers", name)


def _numbers(indices: Any) -> Any | None:
    """Indices as an array; None for keys of another kind."""
    try:
        numbers = np.asarray(indices)
    except (TypeError, ValueError):  # lists of unlike lengths, tensors on a device
        return None
    return numbers if numbers.ndim == 1 and numbers.dtype.kind in "iu" else None
