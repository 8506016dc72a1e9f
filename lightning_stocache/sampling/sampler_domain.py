"""How a sampler draws, and which indices, if that can be seen without drawing from it.

It is known of torch's own samplers, of LocalitySampler, of lists of indices or of batches, and of some of MONAI's,
timm's, torchdata's and pytorch-metric-learning's, which need not be installed. Of any other nothing is known: all of
the dataset may be drawn.

All that is known of a class of samplers stands in `drawing_of`. From it follow what needs slots (`sampler_domain`),
when a loader needs no workers any more, and what hit rate is to be expected.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
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
from lightning_stocache.cache.placement import Integers
from lightning_stocache.sampling.locality_sampler import LocalitySampler

__all__ = ["Drawing", "Order", "drawing_of", "sampler_domain"]

log = logging.getLogger(__name__)

Order = Literal["same", "anew", "replacement", "weighted", "unknown"]

_MONAI, _TIMM = "monai.data.samplers", "timm.data.distributed_sampler"
_TORCHDATA, _METRIC = "torchdata.stateful_dataloader.sampler", "pytorch_metric_learning.samplers.m_per_class_sampler"


@dataclass(frozen=True)
class Drawing:
    """How the epochs of a sampler draw.

    Args:
        indices: what they draw from, each index as often as it comes there: a range, or int64 `[length]`.
        order: "same" for that list as it is, in every epoch; "anew" for the list in another random order each time;
            "replacement" and "weighted" for draws by chance, the latter with no index twice; "unknown".
        weights: of each place of the list, by which "replacement" and "weighted" draw, float64 `[length]`; None: alike.
        together: "replacement" draws so many indices together, no index twice, and each with `weights` as its chance.
        repeats: how often in a row what is drawn is given.
        part: which part of the list it is in the "same" order, of how many (a rank's).
        deals: whether it deals one order, which all ranks know, among them.
    """

    indices: range | Integers
    order: Order
    weights: npt.NDArray[np.float64] | None = None
    together: int | None = None
    repeats: float = 1
    part: tuple[int, int] = (0, 1)
    deals: bool = False


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
    drawing = drawing_of(sampler)
    if drawing is None or (isinstance(drawing.indices, range) and len(drawing.indices) == length):
        return None
    try:
        domain = Domain(drawing.indices, length)
    except ValueError:  # of another dataset
        return None
    return None if domain.is_whole or not len(domain) else domain


def drawing_of(sampler: Any) -> Drawing | None:
    """What is known of how a sampler, or a batch sampler, draws; None where nothing is."""
    try:
        return _drawing(sampler)
    except Exception:  # keys that only the source understands, attributes that are not what they are called
        log.debug("how %s draws cannot be told", type(sampler).__name__, exc_info=True)
        return None


def _drawing(sampler: Any) -> Drawing | None:
    kind = type(sampler)
    if kind is BatchSampler or _is(sampler, _TORCHDATA, "BatchSampler"):
        return _drawing(sampler.sampler)
    if isinstance(sampler, SubsetRandomSampler):
        return _listed(sampler.indices, "anew" if kind is SubsetRandomSampler else "unknown")
    if isinstance(sampler, WeightedRandomSampler) or _is(sampler, _MONAI, "DistributedWeightedRandomSampler"):
        weights = np.asarray(torch.as_tensor(sampler.weights).double())
        drawn = np.flatnonzero(weights > 0)
        once: Order = "replacement" if getattr(sampler, "replacement", True) else "weighted"
        is_own = kind is not WeightedRandomSampler and isinstance(sampler, WeightedRandomSampler)
        return Drawing(drawn, "unknown" if is_own else once, weights[drawn])
    if kind is LocalitySampler and sampler.draws is not None:
        given = _drawing(sampler.draws)
        return (
            replace(given, order="anew") if given is not None and given.order == "same" and sampler.shuffle else given
        )
    if kind in (DistributedSampler, LocalitySampler) or _is(sampler, _MONAI, "DistributedSampler"):
        every, part = range(len(sampler.dataset)), (sampler.rank, sampler.num_replicas)
        return Drawing(every, "anew" if sampler.shuffle else "same", part=part, deals=True)
    if kind is SequentialSampler:
        return Drawing(range(len(sampler.data_source)), "same")
    if kind is RandomSampler or _is(sampler, _TORCHDATA, "RandomSampler"):
        return Drawing(range(len(sampler.data_source)), "replacement" if sampler.replacement else "anew")
    listed = isinstance(sampler, list | tuple | range | np.ndarray | torch.Tensor)
    if listed or _is(sampler, "omegaconf.listconfig", "ListConfig"):  # a list in a Hydra config
        batches: Any = sampler
        in_batches = len(sampler) > 0 and isinstance(sampler[0], Sequence)
        return _listed(list(chain.from_iterable(batches)) if in_batches else sampler, "same")
    if _is(sampler, _TIMM, "OrderedDistributedSampler"):
        return Drawing(range(len(sampler.dataset)), "same", part=(sampler.rank, sampler.num_replicas))
    if _is(sampler, _TIMM, "RepeatAugSampler") and sampler.num_replicas == 1:
        return _repeated(sampler)
    return _of_classes(sampler) if _is(sampler, _METRIC, "MPerClassSampler") else None


def _repeated(sampler: Any) -> Drawing:
    """Repeated augmentation (timm's), of one rank: the first of a list in which each index stands several times."""
    length, repeats = len(sampler.dataset), float(sampler.num_repeats)
    if sampler.shuffle:
        return Drawing(range(length), "anew", repeats=repeats)
    places = np.arange(min(sampler.num_selected_samples, int(np.ceil(length * repeats))))
    return Drawing((places // repeats).astype(np.int64), "same")


def _of_classes(sampler: Any) -> Drawing | None:
    """So many samples of each of some classes, again and again; None where a class has fewer, which then come twice."""
    each, members = sampler.m_per_class, [np.asarray(members) for members in sampler.labels_to_indices.values()]
    together = each * len(members) if sampler.batch_size is None else sampler.batch_size
    chances = [np.full(len(indices), together / len(members) / len(indices)) for indices in members]
    known = all(len(indices) >= each for indices in members)
    order: Order = "replacement" if known else "unknown"
    return Drawing(np.concatenate(members).astype(np.int64), order, np.concatenate(chances), together)


def _listed(indices: Any, order: Order) -> Drawing | None:
    """A list that is drawn from; None for keys of another kind."""
    try:
        numbers = np.asarray(indices)
    except (TypeError, ValueError):  # lists of unlike lengths, tensors on a device
        return None
    return Drawing(numbers, order) if numbers.ndim == 1 and numbers.dtype.kind in "iu" else None


def _is(sampler: Any, module: str, name: str) -> bool:
    """Whether it is a library's sampler of this name."""
    return (type(sampler).__module__, type(sampler).__name__) == (module, name)
