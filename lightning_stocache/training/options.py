"""The options of the caches that every door of Lightning takes.

`CacheOptions` describes them. A door's docstring has one line for them, which `with_options` replaces by the
descriptions, for `help` and for LightningCLI's `--help`. The signatures repeat them: with `**options: Unpack[...]`
LightningCLI's `--print_config` would show neither the options nor their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, cast

from torch.utils.data import Dataset

from lightning_stocache.cache.placement import Domain
from lightning_stocache.node.budget import Budget
from lightning_stocache.setup.request import (
    CacheRequest,
    Form,
    LoaderSettings,
    check_flag,
)

__all__ = ["STAGES", "CacheOptions", "Source", "with_options"]

Door = TypeVar("Door")

if TYPE_CHECKING:
    Source: TypeAlias = Dataset[Any] | Callable[[], Dataset[Any]]
else:
    # With Dataset[Any], jsonargparse makes a bare Dataset of --data.train=my.Photos. This alias is not in the
    # module of StocacheDataModule, because jsonargparse reads the TYPE_CHECKING block of that module.
    Source = Dataset | Callable[[], Dataset]

STAGES = ("train", "val", "test", "predict")

_OF_REQUEST = ("freeze_random", "fingerprint", "strict", "store", "prefill", "dir")


@dataclass(frozen=True)
class CacheOptions:
    """The checked options of all doors: those of `CachedDataset` that make sense with a Trainer, and some more.

    Args:
        budget: memory per node: "8GiB", "500MB", "60%" (of the datasets' cached size), "60% of free" (memory), "auto"
            (enough for all samples), bytes, or 0 (off). The datasets of a Trainer call share it by their size. Samples
            that do not fit are loaded every time.
        stage_budgets: separate budgets for some stages, for instance {"val": "1GiB"} or {"test": 0}.
        freeze_random: cache a random source as it is, with its first draw frozen.
        keep_cache: keep the caches when the Trainer call ends, for the next call with the same door and datasets, until
            `close` of the door or `datamodule.caches.close()`. Their slots are for all samples, drawn now or later.
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
    """

    budget: int | float | str = "auto"
    stage_budgets: Mapping[str, int | float | str | None] | None = None
    freeze_random: bool = False
    keep_cache: bool = False
    name: str | None = None
    fingerprint: str = ""
    strict: bool = False
    store: Form = "decoded"
    prefill: bool = False
    dir: str | None = None
    streams: bool = False
    budgets: dict[str, Budget] = field(init=False)
    """The budget of each pot. Stages without a separate budget share the pot ""."""

    def __post_init__(self) -> None:
        if not isinstance(self.stage_budgets, Mapping | None):
            raise TypeError(f"stage_budgets must be a mapping from stages to budgets, got {self.stage_budgets!r}")
        given = {stage: budget for stage, budget in (self.stage_budgets or {}).items() if budget is not None}
        if unknown := set(given) - set(STAGES):
            raise ValueError(f"stage_budgets may name {', '.join(STAGES)}; got {', '.join(map(str, sorted(unknown)))}")
        check_flag("keep_cache", self.keep_cache)
        check_flag("streams", self.streams)
        budgets = {stage: Budget.parse(budget) for stage, budget in given.items()}
        object.__setattr__(self, "budgets", budgets | {"": Budget.parse(self.budget)})
        self.request(cast(Any, None), LoaderSettings(1, 0), self.name or "", None)  # checks the other options

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Self:
        """The options among all arguments of a door."""
        names = [option.name for option in fields(cls) if option.init]
        return cls(**{name: arguments[name] for name in names})

    def plain(self) -> dict[str, Any]:
        """The given options by name, as plain values."""
        given = {option.name: getattr(self, option.name) for option in fields(self) if option.init}
        return given | {"stage_budgets": None if self.stage_budgets is None else dict(self.stage_budgets)}

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
            reader=reader,
            name=None if self.name is None else name,
            domain=domain,
            **{option: getattr(self, option) for option in _OF_REQUEST},
        )


def with_options(door: Door) -> Door:
    """Put the descriptions of all options into the docstring of a door, in place of its line for `options`."""
    described = cleandoc(CacheOptions.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    line = "    options: those of `CacheOptions`, each an argument."
    door.__doc__ = cleandoc(door.__doc__ or "").replace(line, described)
    return door
