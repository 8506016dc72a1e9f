"""Several cached datasets that open at once, because they share budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_stocache.loading.allocation import BackendChoice, InFlight
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.opening import open_caches
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.group import NodeGroup

__all__ = ["open_together"]


def open_together(
    datasets: Sequence[CachedDataset],
    budgets: Mapping[str, Budget],
    group: NodeGroup,
    pots: Sequence[str] | None = None,
    in_flight: Sequence[InFlight | None] | None = None,
    *,
    backend: BackendChoice = "auto",
    disable: bool = False,
    later_bytes: int = 0,
    kept_back: int = 0,
) -> None:
    """Open the caches of several datasets at once. Collective over the group.

    Args:
        datasets: the same ones in the same order on every rank.
        budgets: the budget of every pot.
        group: which ranks share memory.
        pots: the pot of each dataset; by default the one pot that there is.
        in_flight: the loader of each dataset, whose workers and batches need memory too.
        backend: where segments lie, see `open_caches`.
        disable: whether to go on uncached where the memory cannot be had.
        later_bytes: memory that each rank's training will take and does not hold yet.
        kept_back: bytes of this node's free memory that are for something else.

    Raises:
        Exception: as `open_caches`.

    Example:
        >>> train, val = (CachedDataset(list(range(length)), defer=True) for length in (30, 10))
        >>> open_together([train, val], {"": Budget.parse("50%")}, NodeGroup())
        >>> len(train.cache), len(val.cache)
        (15, 5)
        >>> train.close(), val.close()
        (None, None)
    """
    if not datasets:
        return
    only = next(iter(budgets))
    requests = [
        dataset.request(pot, loader)
        for dataset, pot, loader in zip(
            datasets, pots or [only] * len(datasets), in_flight or [None] * len(datasets), strict=True
        )
    ]
    for dataset in datasets:
        dataset.close()
    opened = open_caches(
        requests, budgets, group, backend, disable=disable, later_bytes=later_bytes, kept_back=kept_back
    )
    for dataset, cache in zip(datasets, opened, strict=True):
        dataset.adopt(cache)
