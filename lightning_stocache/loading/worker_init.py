"""A user's `worker_init_fn`, and the dataset that it finds.

It asks `get_worker_info().dataset` for the dataset, to open a file or to seed generators; some walk through all that
they find there, as MONAI's does. What the Trainer's doors have put in front of the user's dataset is none of their
business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import get_worker_info

from lightning_stocache.loading.stand_in import cached_in

__all__ = ["InitOnSource"]


@dataclass(frozen=True)
class InitOnSource:
    """Calls a function in a worker that has just been started, where the dataset is the user's own.

    Args:
        function: the user's.
    """

    function: Callable[[int], None]

    def __call__(self, worker: int) -> None:
        """In a worker, which has the number that is given."""
        info: Any = get_worker_info()
        cached = cached_in(info.dataset)
        if cached is not None and cached is not info.dataset:  # a CachedDataset of the user's is what he expects
            object.__setattr__(info, "dataset", cached.source)  # it refuses to be changed
        self.function(worker)

    @classmethod
    def of(cls, function: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """The function of a loader, wrapped once; None stays None."""
        return function if function is None or isinstance(function, cls) else cls(function)
