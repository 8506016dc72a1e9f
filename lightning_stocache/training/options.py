"""What a user may give to the doors of Lightning: options of the caches, and the data of a stage.

Each option is described once: in `CachedDataset` what it has, too, and in `CacheOptions` the others, and what is
different in a Trainer call. A door's docstring points here by one line, in place of which `with_options` puts all of
them, for `help` and for LightningCLI's `--help`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import cleandoc
from textwrap import fill
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, cast

from torch.utils.data import Dataset, IterableDataset

from lightning_stocache.cache.placement import Domain
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.node.budget import Budget
from lightning_stocache.sampling.locality_sampler import Mode
from lightning_stocache.setup.option import check_choice, check_flag
from lightning_stocache.setup.request import (
    CacheRequest,
    Form,
    LoaderSettings,
)

__all__ = ["STAGES", "CacheOptions", "Source", "Stream", "is_plain", "made", "with_options"]

Door = TypeVar("Door")


if TYPE_CHECKING:
    Source: TypeAlias = Dataset[Any] | Callable[[], Dataset[Any]]
else:
    # Of a class with a parameter, jsonargparse makes the class itself: LightningCLI's --data.train=my.Photos would be a
    # bare Dataset.
    Source = Dataset | Callable[[], Dataset]

STAGES = ("train", "val", "test", "predict")


@dataclass(frozen=True)
class CacheOptions:
    """The options, checked: those of `CachedDataset` that are for users of a Trainer, and some more.

    Args:
        budget: The datasets of a Trainer call share it by their size.
        stage_budgets: a budget of its own for some stages, for instance {"val": "1GiB"} or {"test": 0}; None is none.
        keep_cache: keep the caches when the Trainer call ends, for the next call with the same door and datasets, until
            they are closed: by `close` of the door, or `datamodule.caches.close()`. Where there is no memory for all of
            a dataset, its cache is for what is drawn now, and goes when a later call draws something else.
        sampling: how what a training loader's sampler gives is dealt to several nodes: "locality" (samples go to nodes
            that have them), "global" or "sticky"; see `LocalitySampler`.
        streams: keep iterable-style datasets, too, as `CachedStream` does: epoch one is the stream, later ones come
            from memory, those of training shuffled. Without it they pass by. `name`, `store` and `prefill` are not for
            them.
        name: That of the n-th dataset of a stage is `<name>-<stage><n>`.

    Raises:
        ValueError: an option that is none of these, or (`among`) a key `cache.<option>` of a Hydra app is none.
    """

    budget: int | float | str = "auto"
    stage_budgets: Mapping[str, int | float | str | None] | None = None
    allow_random: bool = False
    keep_cache: bool = False
    sampling: Mode = "locality"
    name: str | None = None
    fingerprint: str = ""
    strict: bool = False
    store: Form = "decoded"
    prefill: bool = False
    dir: str | None = None
    streams: bool = False
    budgets: dict[str, Budget] = field(init=False)
    """The budget of every pot; stages without one of their own share the pot ""."""

    def __post_init__(self) -> None:
        given = {stage: budget for stage, budget in (self.stage_budgets or {}).items() if budget is not None}
        if unknown := set(given) - set(STAGES):
            raise ValueError(f"stage_budgets may name {', '.join(STAGES)}; got {', '.join(map(str, sorted(unknown)))}")
        check_choice("sampling", self.sampling, Mode)
        check_flag("keep_cache", self.keep_cache)
        check_flag("streams", self.streams)
        budgets = {stage: Budget.parse(budget) for stage, budget in given.items()}
        object.__setattr__(self, "budgets", budgets | {"": Budget.parse(self.budget)})
        self.request(cast(Any, None), LoaderSettings(1, 0), self.name or "", None)  # it refuses what else is wrong

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Self:
        """The options that are among the arguments of a door, which may have others."""
        _check_overrides({option.name for option in fields(cls) if option.init})
        return cls(**{option.name: arguments[option.name] for option in fields(cls) if option.init})

    def plain(self) -> dict[str, Any]:
        """The options as they were given, as plain values by name."""
        given = {option.name: getattr(self, option.name) for option in fields(self) if option.init}
        return given | {"stage_budgets": None if self.stage_budgets is None else dict(self.stage_budgets)}

    def is_for_all(self, stage: str) -> bool:
        """Whether a stage's cache is for the whole of its datasets, whatever is drawn of them now."""
        budget = self.budgets[self.pot(stage)]
        part = budget.unit == "% of dataset" and budget.amount < 100
        return self.name is not None or (self.keep_cache and part)

    def pot(self, stage: str) -> str:
        """The pot that a stage's datasets draw on."""
        return stage if stage in self.budgets else ""

    def request(self, source: Dataset[Any], reader: LoaderSettings, name: str, domain: Domain | None) -> CacheRequest:
        """What is asked for a dataset that a loader of a stage reads; `name`: of its cache, where that is to stay."""
        pot = self.pot(reader.stage)
        return CacheRequest(
            source,
            pot,
            self.budgets[pot],
            allow_random=self.allow_random,
            reader=reader,
            name=None if self.name is None else name,
            fingerprint=self.fingerprint,
            strict=self.strict,
            store=self.store,
            prefill=self.prefill,
            dir=self.dir,
            domain=domain,
            whole_if_room=self.keep_cache,
        )

    def is_off(self, stage: str) -> bool:
        """Whether the budget of a stage is 0."""
        return self.budgets[self.pot(stage)].off


def _check_overrides(known: Collection[str]) -> None:
    """Refuse a key of `cache` on the command line of a Hydra app that is no option: nothing would read it.

    Raises:
        ValueError: it names the key, and the option that was probably meant.
    """
    hydra: Any = sys.modules.get("hydra.core.hydra_config")  # never imported: then this is no job of Hydra's
    if hydra is None or not hydra.HydraConfig.initialized():
        return
    keys = (override.lstrip("+~").partition("=")[0].split(".") for override in hydra.HydraConfig.get().overrides.task)
    for option in (key[1] for key in keys if key[0] == "cache" and len(key) > 1):
        if option not in known:
            meant = "".join(f"; did you mean cache.{name}?" for name in get_close_matches(option, known, n=1, cutoff=0))
            raise ValueError(f"cache.{option} is no option of the cache{meant}")


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, a boolean, None, or a list or dict of such: what a checkpoint may hold.

    Example:
        >>> is_plain({"a": [1, "b", None]}), is_plain(len)
        (True, False)
    """
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def with_options(door: Door) -> Door:
    """Put the descriptions of all options into the docstring of a door, in place of its line `options: ...`."""
    described, more = _arguments(CachedDataset), _arguments(CacheOptions)
    names = [option.name for option in fields(CacheOptions) if option.init]
    texts = (" ".join(filter(None, (f"{name}:", described.get(name), more.get(name)))) for name in names)
    lines = "\n".join(fill(text, 116, initial_indent="    ", subsequent_indent=" " * 8) for text in texts)
    door.__doc__ = re.sub("^    options: .*$", lambda _: lines, cleandoc(door.__doc__ or ""), flags=re.MULTILINE)
    return door


def _arguments(described: Any) -> dict[str, str]:
    """What a docstring says under `Args:`, by name."""
    section = cleandoc(described.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


class Stream(IterableDataset[Any]):
    """An iterable-style dataset with a transform per sample."""

    def __init__(self, source: IterableDataset[Any], transform: Callable[[Any], Any]) -> None:
        self.source, self.transform = source, transform

    def __iter__(self) -> Iterator[Any]:
        return map(self.transform, self.source)


def made(sources: Source | Sequence[Source], *, several: bool) -> list[Dataset[Any]]:
    """The datasets themselves; functions are called.

    Args:
        sources: what was given. A list of samples is a dataset, not a list of datasets.
        several: whether a list of datasets is allowed here.

    Example:
        >>> samples = [(0.5, 1), (0.25, 0)]
        >>> (
        ...     made(samples, several=True) == [samples],
        ...     made([lambda: samples, lambda: samples], several=True) == [samples] * 2,
        ... )
        (True, True)
    """
    if not (isinstance(sources, list | tuple) and sources and all(map(_is_source, sources))):
        return [_make(sources)]
    if not several:
        raise TypeError(f"train must be one dataset, got {len(sources)}: join them with torch's ConcatDataset")
    return list(map(_make, sources))


def _is_source(value: Any) -> bool:
    return isinstance(value, Dataset) or callable(value)


def _make(source: Any) -> Dataset[Any]:
    dataset: Dataset[Any] = source() if callable(source) and not hasattr(source, "__getitem__") else source
    return dataset
