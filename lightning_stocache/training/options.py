"""What a user may say about the caches of a Trainer call. The three doors of Lightning take the same words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from lightning_stocache.loading.allocation import BackendChoice
from lightning_stocache.loading.dataset import OnError
from lightning_stocache.loading.sampler import Mode
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.named import check_name

__all__ = ["STAGES", "CacheOptions"]

STAGES = ("train", "val", "test", "predict")


@dataclass(frozen=True)
class CacheOptions:
    """The options, checked.

    Args:
        budget: memory per node, shared by the datasets of a Trainer call by their size; see `CachedDataset`.
        stage_budgets: a budget of its own for some stages, for instance {"val": "1GiB"} or {"test": 0}; None is none.
        allow_random: cache random sources as they are, with their first draw frozen.
        backend: where the memory lies, see `CachedDataset`.
        on_error: "raise" or "disable" when the memory cannot be had.
        keep_cache: keep the caches when the Trainer call ends, for the next call in this process.
        sampling: how the training set is dealt to ranks, see `LocalitySampler`.
        name: under which the caches outlive the job; that of the n-th dataset of a stage is `<name>-<stage><n>`.
        fingerprint: what else decides what the samples are, see `CachedDataset`.
        strict: whether what cannot be cached is an error, not passed through with a warning.

    Raises:
        ValueError: an option that is none of these.
    """

    budget: int | float | str = "auto"
    stage_budgets: Mapping[str, int | float | str | None] | None = None
    allow_random: bool = False
    backend: BackendChoice = "auto"
    on_error: OnError = "raise"
    keep_cache: bool = False
    sampling: Mode = "locality"
    name: str | None = None
    fingerprint: str = ""
    strict: bool = False
    budgets: dict[str, Budget] = field(init=False)
    """The budget of every pot; stages without one of their own share the pot ""."""

    def __post_init__(self) -> None:
        given = {stage: budget for stage, budget in (self.stage_budgets or {}).items() if budget is not None}
        if unknown := set(given) - set(STAGES):
            raise ValueError(f"stage_budgets may name {', '.join(STAGES)}; got {', '.join(map(str, sorted(unknown)))}")
        if self.backend not in get_args(BackendChoice):
            raise ValueError(f"backend must be one of {', '.join(get_args(BackendChoice))}, got {self.backend!r}")
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error must be 'raise' or 'disable', got {self.on_error!r}")
        if self.sampling not in get_args(Mode):
            raise ValueError(f"sampling must be one of {', '.join(get_args(Mode))}, got {self.sampling!r}")
        if self.name is not None:
            check_name(self.name)
        budgets = {stage: Budget.parse(budget) for stage, budget in given.items()}
        object.__setattr__(self, "budgets", budgets | {"": Budget.parse(self.budget)})

    def pot(self, stage: str) -> str:
        """The pot that a stage's datasets draw on."""
        return stage if stage in self.budgets else ""

    def is_off(self, stage: str) -> bool:
        """Whether the budget of a stage is 0."""
        return self.budgets[self.pot(stage)].off
