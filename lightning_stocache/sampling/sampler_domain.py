"""The indices that a sampler draws, found without drawing from it, and whether it draws each index once.

They are known for torch's own samplers, for LocalitySampler, and for lists of indices or of batches. Any other sampler
may draw the whole dataset. The slots of a cache and the expected hit rate follow from them.
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

from lightning_stocache.cache.placement import Domain
from lightning_stocache.sampling.locality_sampler import LocalitySampler

__all__ = ["draws_once", "sampler_domain"]

log = logging.getLogger(__name__)


def sampler_domain(sampler: Any, length: int) -> Domain | None:
    """The indices that a sampler can draw from a dataset of that length; None for all, or if unknown.

    Example:
        >>> sampler_domain(WeightedRandomSampler([0.5, 0, 0, 2], num_samples=4), length=4).indices.tolist()
        [0, 3]
        >>> sampler_domain(RandomSampler(range(4)), length=4) is None
        True
    """
    try:
        indices = _indices(sampler)
        if indices is None or (isinstance(indices, range) and indices == range(length)):
            return None
        domain = Domain(indices, length)
    except Exception:  # keys that only the source understands, indices of another dataset, attributes of another kind
        log.debug("the indices that %s draws are unknown", type(sampler).__name__, exc_info=True)
        return None
    return None if domain.is_whole or not len(domain) else domain


def draws_once(sampler: Any) -> bool:
    """Whether a sampler draws each of its indices once in an epoch, if its length agrees.

    Example:
        >>> draws_once(RandomSampler(range(4))), draws_once(RandomSampler(range(4), replacement=True))
        (True, False)
    """
    kind = type(sampler)
    if kind is LocalitySampler and sampler.draws is not None:
        return draws_once(sampler.draws)
    if kind is RandomSampler:
        return not sampler.replacement
    return kind in (SequentialSampler, SubsetRandomSampler, DistributedSampler, LocalitySampler)


def _indices(sampler: Any) -> Any:
    """The indices that a sampler draws from; None if unknown."""
    kind = type(sampler)
    if kind is BatchSampler:
        return _indices(sampler.sampler)
    if isinstance(sampler, SubsetRandomSampler):
        return sampler.indices
    if isinstance(sampler, WeightedRandomSampler):
        return np.flatnonzero(np.asarray(torch.as_tensor(sampler.weights).double()) > 0)
    if kind is LocalitySampler and sampler.draws is not None:
        return _indices(sampler.draws)
    if kind in (DistributedSampler, LocalitySampler):
        return range(len(sampler.dataset))
    if kind in (SequentialSampler, RandomSampler):
        return range(len(sampler.data_source))
    if isinstance(sampler, Sequence | np.ndarray | torch.Tensor):
        in_batches = len(sampler) > 0 and isinstance(sampler[0], Sequence)
        return list(chain.from_iterable(sampler)) if in_batches else sampler
    return None
