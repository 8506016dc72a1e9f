"""The options of the doors: each is described in `help`, and wrong values raise errors."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from lightning_stocache import (
    CachedDataset,
    CacheMonitor,
    FillProgress,
    StocacheDataModule,
    StochasticCache,
    cache_datamodule,
)
from tests.training.tiny import Data, source

DOORS = [CachedDataset, StocacheDataModule, StochasticCache, cache_datamodule]


@pytest.mark.parametrize("door", DOORS)
def test_help_describes_every_argument(door):
    """`help` of a door describes each of its arguments."""
    told = inspect.getdoc(door).partition("Args:\n")[2].partition("\n\n")[0].splitlines()
    described = {line.split(":")[0].strip(): line.partition(": ")[2] for line in told if line[4] != " "}
    assert list(filter(None, described.values())) == list(described.values())
    assert set(described) == set(inspect.signature(door).parameters)


def ours(**options: Any) -> StocacheDataModule:
    return StocacheDataModule([1], **options)


def set_up(train: Any) -> None:
    StocacheDataModule(train).setup("fit")


WHOLE = "must be a whole number of at least 1, got"
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (StochasticCache, {"keep_cache": "process"}, "keep_cache must be true or false, got 'process'"),
    (StochasticCache, {"stage_budgets": {"valid": 0}}, "stage_budgets may name train, val, test, predict; got valid"),
    (StochasticCache, {"streams": "yes"}, "streams must be true or false"),
    (StochasticCache, {"budget": "lots"}, "'lots'"),
    (FillProgress, {"name": ""}, "name must be a string that is not empty, got ''"),
    (FillProgress, {"name": 3}, "name must be a string that is not empty, got 3"),
    (FillProgress, {"every_n_steps": 0}, f"every_n_steps {WHOLE} 0"),
    (FillProgress, {"every_n_steps": True}, f"every_n_steps {WHOLE} True"),
    (FillProgress, {"verbose": "no"}, "verbose must be true or false, got 'no'"),
    (StocacheDataModule, {"batch_size": 4}, "give train, val, test or predict"),
    (set_up, {"train": "train/"}, "train must be a dataset .* got 'train/'"),
    (set_up, {"train": [source("")] * 2}, "train must be one dataset, got 2: join them with torch's ConcatDataset"),
    (lambda: ours().train_dataloader(), {}, r"train loader needs open caches: call setup\('fit'\) first"),
    (cache_datamodule, {"datamodule": []}, "must be a LightningDataModule, got list"),
    (cache_datamodule, {"datamodule": ours()}, "must not be cached yet, got a StocacheDataModule"),
    (cache_datamodule, {"datamodule": cache_datamodule(Data(source("")))}, "must not be cached yet"),
]
REFUSED += [(ours, {"batch_size": size}, f"batch_size {WHOLE} {size!r}") for size in (None, 0, -1, "4", True, 2.0)]
for flag in inspect.signature(CacheMonitor).parameters:
    REFUSED.append((CacheMonitor, {flag: "yes"}, f"{flag} must be true or false, got 'yes'"))
for name in ("eval_transform", "eval_batch_transform"):
    REFUSED.append((ours, {name: "nope"}, f"{name} must be 'same', None or a function, got 'nope'"))


@pytest.mark.parametrize(("door", "options", "words"), REFUSED)
def test_what_is_no_option_is_refused_at_once(door, options, words):
    """Each error names the argument, the rule and the value, or the step to do first, before any training."""
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        door(**options)
