"""What a loader draws its indices from: its batch sampler, the sampler within, and their random generators.

A sampler is the user's. Of torch's own and of LocalitySampler it is known what they draw from; of any other it is taken
that it may draw from the process-wide generators, and from those among its attributes.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.source.generators import KINDS, PROCESS_WIDE

__all__ = [
    "batch_size_of",
    "batches_of",
    "drawn_from",
    "index_sampler",
    "replicas_of",
    "sampler_of",
    "set_epoch",
]

_DRAW_FROM_TORCH = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
_DRAW_NOTHING = (DistributedSampler.__iter__, LocalitySampler.__iter__, SequentialSampler.__iter__)


def batches_of(loader: DataLoader[Any]) -> Any:
    """What a loader draws its batches from; without batches, its samples."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def index_sampler(loader: DataLoader[Any]) -> Any:
    """What gives a loader's indices one by one, or in batches where that is a batch sampler of the user's own.

    It is not always `loader.sampler`: beside a `batch_sampler` that is a SequentialSampler, which nobody draws from.
    """
    batches = batches_of(loader)
    return batches.sampler if type(batches) is BatchSampler else batches


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Tell a loader's samplers, each once, which epoch the next one is; one that is not interested is left alone.

    They are those that Lightning and Fabric tell: a batch sampler itself is told by nobody.
    """
    samplers = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    for sampler in samplers[:1] if samplers[0] is samplers[1] else samplers:
        if callable(tell := getattr(sampler, "set_epoch", None)):
            tell(epoch)


def drawn_from(batches: Any) -> dict[str, Any]:
    """The generators that the order of an epoch may be drawn from, by name; none for samplers that draw from none."""
    sampler, plain = sampler_of(batches), type(batches) is BatchSampler or sampler_of(batches) is batches
    dealt = sampler.draws if isinstance(sampler, LocalitySampler) else None
    if plain and dealt is None and getattr(type(sampler), "__iter__", None) in _DRAW_NOTHING:
        return {}
    around = getattr(getattr(sampler, "dataset", None), "__dict__", {})  # Lightning's wrapper reads the user's sampler
    inner = [value for value in (dealt, *around.values()) if isinstance(value, Sampler)]
    generators = {
        f"{number}.{name}": value
        for number, drawing in enumerate((batches, sampler, *inner))
        for name, value in getattr(drawing, "__dict__", {}).items()
        if isinstance(value, KINDS)
    }
    if plain and type(sampler) in _DRAW_FROM_TORCH:
        return generators or {"torch": PROCESS_WIDE["torch"]}
    return {**PROCESS_WIDE, **generators}


def sampler_of(batches: Any) -> Any:
    """What says which samples come: of a batch sampler, the sampler within."""
    sampler = getattr(batches, "sampler", None)
    return batches if sampler is None else sampler  # an array of indices is neither true nor false


def replicas_of(sampler: Any) -> int:
    """Among how many ranks a sampler deals the data; 1 if it does not."""
    replicas = getattr(sampler, "num_replicas", 1)
    return replicas if isinstance(replicas, int) else 1


def batch_size_of(batches: Any) -> int | None:
    """Samples per batch; None where only the user's own batch sampler knows."""
    return batches.batch_size if type(batches) is BatchSampler else None
