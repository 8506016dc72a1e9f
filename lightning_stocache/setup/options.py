"""The options of caches: the default, the check and the description of each stand here once.

The constructors that take options repeat their names and defaults, because type checkers, editors and LightningCLI read
signatures; a test compares them. No constructor inherits the fields: Hydra turns every object of a dataclass into a
config, so a Trainer would get a config in place of a callback.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Any, TypeAlias

from torch.utils.data import Dataset

from lightning_stocache.cache.placement import Domain
from lightning_stocache.node.budget import Budget
from lightning_stocache.setup.request import CacheRequest, Form, LoaderSettings, check_flag, check_options

__all__ = ["STAGES", "Budgets", "CacheOptions", "known_options", "nearest"]

STAGES = ("train", "val", "test", "predict")

Budgets: TypeAlias = int | float | str | Mapping[str, int | float | str]
"""One budget, or a budget for each stage."""


@dataclass(frozen=True)
class CacheOptions:
    """The options of `StochasticCache`, `StocacheDataModule` and `cache_datamodule`.

    Each is an argument of these three, and a key of the config group `cache`.

    Args:
        budget: memory per node: "8GiB", "500MB", "60%" (of the datasets' cached size), "60% of free" (memory), "auto"
            (enough for all samples), bytes, or 0 (off). Samples that do not fit are loaded every time. The datasets
            that are given to `fit` share it by their size. If loaders come from hooks, Lightning's sanity check asks
            for the val set first, which then takes at most half; without a sanity check the val set gets what the
            training set leaves. A mapping
            gives stages budgets of their own, for instance {"train": "30GiB", "val": "2GiB", "test": 0}; a stage that
            it does not name has "auto".
        freeze_random: cache a random source as it is, with its first draw frozen.
        keep_cache: keep the caches when the Trainer call ends, for the next call with the same callback or DataModule
            and the same datasets, until `close` of the callback or `datamodule.caches.close()`. Their slots are for all
            samples, drawn now or later.
        name: caches with a name stay in memory when the job ends, so that the next job starts warm. Jobs that run at
            the same time share them. The n-th dataset of a stage is cached under `<name>-<stage><n>`. The caches lie in
            /dev/shm until `stocache clean NAME`.
        fingerprint: a version of the data. A cache with the same name and another fingerprint is left alone.
        strict: raise an error if a loader cannot be cached or memory is missing; else samples pass through uncached,
            with one warning.
        store: "decoded" (samples as the source returns them, up to its first random step), "encoded" (files as they
            are, decoded after the cache: more samples per GiB), or "auto": the form that saves most time within the
            budget. See `CachedDataset` for the sources whose files are known.
        prefill: let idle workers load samples that no batch has asked for yet.
        dir: a directory on a disk of this machine. The caches lie there instead of in memory, and `budget` limits the
            bytes on that disk. With a `name` they outlive machine and job. Needs the package xxhash: `pip install
            lightning-stocache[disk]`.
        streams: cache iterable-style datasets, too, as `CachedStream` does: epoch one reads the stream, later epochs
            come from memory; training epochs are shuffled. `name`, `store` and `prefill` do not apply to them. Without
            this option they pass through.

    Raises:
        ValueError: an option cannot have this value.
        TypeError: it cannot have a value of this type.

    Example:
        >>> options = CacheOptions({"train": "60%", "val": 0})
        >>> options.is_off("val"), options.is_off("test")
        (True, False)
    """

    budget: Budgets = "auto"
    freeze_random: bool = False
    keep_cache: bool = False
    name: str | None = None
    fingerprint: str = ""
    strict: bool = False
    store: Form = "decoded"
    prefill: bool = False
    dir: str | None = None
    streams: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.budget, Mapping):
            object.__setattr__(self, "budget", dict(self.budget))  # of a config
        check_flag("keep_cache", self.keep_cache)
        check_flag("streams", self.streams)
        check_options(self)
        _parse(self.budget)

    @cached_property
    def budgets(self) -> dict[str, Budget]:
        """The budget of each pot. Stages without a budget of their own share the pot ""."""
        return _parse(self.budget)

    def plain(self) -> dict[str, Any]:
        """The options by name, as plain values."""
        return asdict(self)

    def pot(self, stage: str) -> str:
        """The pot that a stage's datasets draw on."""
        return stage if stage in self.budgets else ""

    def is_off(self, stage: str) -> bool:
        """Whether the budget of a stage is 0."""
        return self.budgets[self.pot(stage)].off

    @property
    def for_all(self) -> bool:
        """Whether caches have slots for all indices, because other calls or jobs will read them."""
        return self.name is not None or self.keep_cache

    def request(self, source: Dataset[Any], reader: LoaderSettings, name: str, domain: Domain | None) -> CacheRequest:
        """The request for the cache of a dataset; `name` is used only where caches outlive the job."""
        pot = self.pot(reader.stage)
        return CacheRequest(
            source,
            pot,
            self.budgets[pot],
            freeze_random=self.freeze_random,
            reader=reader,
            name=None if self.name is None else name,
            fingerprint=self.fingerprint,
            strict=self.strict,
            store=self.store,
            prefill=self.prefill,
            dir=self.dir,
            domain=domain,
        )


def nearest(name: Any, names: Iterable[str]) -> str:
    """The name that is most like a mistyped one."""
    [match] = get_close_matches(str(name), list(names), n=1, cutoff=0.0)
    return match


def _parse(budget: Budgets) -> dict[str, Budget]:
    """The budget of each pot. Raises ValueError if one cannot be read, or names no stage."""
    if not isinstance(budget, Mapping):
        return {"": Budget.parse(budget)}
    unknown = set(budget) - set(STAGES)
    if unknown:
        got = ", ".join(map(str, sorted(unknown)))
        raise ValueError(f"budget may name the stages {', '.join(STAGES)}; got {got}")
    given = {stage: Budget.parse(of_stage) for stage, of_stage in budget.items() if of_stage is not None}
    return {**given, "": Budget.parse("auto")}


def known_options(cache: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options in the `cache` node of a Hydra config.

    Raises:
        ValueError: a key is no option.

    Example:
        >>> known_options({"budgt": "50%"})
        Traceback (most recent call last):
        ValueError: cache.budgt is no option. Did you mean cache.budget?
    """
    known = [option.name for option in fields(CacheOptions)]
    for key in cache or {}:
        if key not in known:
            raise ValueError(f"cache.{key} is no option. Did you mean cache.{nearest(key, known)}?")
    return dict(cache or {})
