"""The options of the doors are described once, and told at each."""

import inspect

import pytest

from lightning_stocache import CachedDataset, StocacheDataModule, StochasticCache, cache_datamodule

DOORS = [CachedDataset, StocacheDataModule, StochasticCache, cache_datamodule]


@pytest.mark.parametrize("door", DOORS)
def test_help_describes_every_argument(door):
    """`help` of a door has one line at least for each of its arguments, none of them empty."""
    told = inspect.getdoc(door).partition("Args:\n")[2].partition("\n\n")[0].splitlines()
    described = {line.split(":")[0].strip(): line.partition(": ")[2] for line in told if line[4] != " "}
    assert list(filter(None, described.values())) == list(described.values())
    assert set(described) == set(inspect.signature(door).parameters)


@pytest.mark.parametrize("door", DOORS[1:])
def test_what_is_different_in_a_trainer_call_is_added(door):
    """How a budget is written stands at every door, and that the datasets of a call share it."""
    told = " ".join(inspect.getdoc(door).split())
    assert '"60% of free" (memory)' in told
    assert "The datasets of a Trainer call share it" in told


def test_caches_are_kept_or_not():
    """`keep_cache` takes no third value."""
    with pytest.raises(ValueError, match="keep_cache must be true or false, got 'process'"):
        StochasticCache(keep_cache="process")
