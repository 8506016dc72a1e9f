"""No random transform of any library is frozen by the cache, however rarely it changes a sample."""

from typing import Any

import pytest

from lightning_stocache import CachedDataset
from tests.interop.fingerprint import fingerprint
from tests.interop.setups import LIBRARIES, make_setup

pytestmark = pytest.mark.processes


def read_twice(dataset: Any) -> list[Any]:
    """All samples of two epochs."""
    return [fingerprint(dataset[index]) for _ in range(2) for index in range(len(dataset))]


def differs(library: str, seed: int) -> bool:
    """Whether what comes through the cache in two epochs is anything else than what the source gives."""
    expected = read_twice(make_setup(library, seed))
    dataset = CachedDataset(make_setup(library, seed))
    try:
        return read_twice(dataset) != expected
    finally:
        dataset.close()


def setups_that_differ(library: str, count: int) -> list[int]:
    return [seed for seed in range(count) if differs(library, seed)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_draws_are_those_of_the_source(library):
    """Two epochs through the cache hold the draws of two epochs without, over ten set-ups of a library."""
    assert setups_that_differ(library, 10) == []


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("library", LIBRARIES)
def test_draws_are_those_of_the_source_in_a_thousand_setups(library):
    """The same over 170 set-ups of each of six libraries."""
    assert setups_that_differ(library, 170) == []
