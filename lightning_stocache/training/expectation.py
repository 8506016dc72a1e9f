"""What the hit rate should be, and what is wrong if it is not.

A cache that silently does nothing is the commonest failure of caches. So the hit rate of each epoch is compared with
the one that theory predicts for the arcs, the ranks and the sampler in use.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_stocache.insight.theory import expected_hit_rate, moved_share
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.sampler import LocalitySampler, Mode
from lightning_stocache.training.loaders import cached_datasets, loaders_in

__all__ = ["Expectation"]

_TOLERANCE = 0.05  # the formula is exact to 0.002 for full epochs; short epochs of small datasets spread by 0.012


class Expectation:
    """The prediction for one training set.

    Args:
        trainer: whose loader and sampler are in use.
        dataset: the cached training set.
    """

    def __init__(self, trainer: Trainer, dataset: CachedDataset) -> None:
        self._dataset = dataset
        loader = next(loader for loader in loaders_in(trainer.train_dataloader) if cached_datasets(loader))
        self._sampler: Any = loader.sampler
        self._mode: Mode = self._sampler.mode if isinstance(self._sampler, LocalitySampler) else "global"
        self._limited = trainer.limit_train_batches not in (1.0, None) or bool(getattr(trainer, "overfit_batches", 0))
        # Its first epoch may be the rest of one, which fills only a part of the cache.
        self._resumed = trainer.ckpt_path is not None
        self._epochs = 0
        ring, group = dataset.ring, dataset.group
        self._moved = 0.0
        if ring is not None and len(group.nodes) > 1 and self._mode == "locality":
            self._moved = moved_share(ring, group.nodes, loader.batch_size or 1)

    def hit_rate(self) -> float | None:
        """The predicted hit rate of the epoch that ends now; None where no formula holds."""
        ring, group = self._dataset.ring, self._dataset.group
        epochs, self._epochs = self._epochs, self._epochs + 1
        if ring is None:
            return None
        return expected_hit_rate(ring, group.shares, epochs, self._moved, self._mode)

    def complaint(self, measured: float, expected: float, fill_fraction: float) -> str | None:
        """What is wrong, in words, if the hit rate is well below the predicted one."""
        ring = self._dataset.ring
        overlapping = ring is not None and sum(arc.slots for arc in ring.arcs) > ring.arcs[0].size
        several = len(self._dataset.group.nodes) > 1
        if measured >= expected - _TOLERANCE or self._resumed or (several and overlapping):
            return None  # where arcs overlap, the formula leaves out a lag
        return (
            f"the hit rate of this epoch is {100 * measured:.1f} %, where {100 * expected:.1f} % were to be expected: "
            f"{self._cause(fill_fraction)}"
        )

    def _cause(self, fill_fraction: float) -> str:
        if self._limited:
            return "the Trainer limits the batches of an epoch, so that an epoch does not fill the cache"
        if fill_fraction < 1:
            return (
                f"only {100 * fill_fraction:.1f} % of the slots are filled; {type(self._sampler).__name__} may not "
                "visit all samples in an epoch, or memory has run out (see the warnings above)"
            )
        if len(self._dataset.group.nodes) > 1 and not isinstance(self._sampler, LocalitySampler):
            return f"{type(self._sampler).__name__} deals samples to nodes that do not have them; use LocalitySampler"
        return "the source may be made anew in every epoch, or samples be asked for more than once"
