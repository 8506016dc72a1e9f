"""No random transform of any library is frozen by the cache, however rarely it changes a sample."""

from contextlib import closing
from typing import Any

import pytest

from lightning_stocache import CachedDataset
from lightning_stocache.setup import find
from tests.interop.fingerprint import fingerprint
from tests.interop.setups import LIBRARIES, make_setup

pytestmark = pytest.mark.processes

# Of six libraries together a thousand. Set-up reads in a process of its own, as it does in the table's trainings, too.
THOUSAND = pytest.param(170, True, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])


def read_twice(dataset: Any) -> list[Any]:
    """All samples of two epochs."""
    return [fingerprint(dataset[index]) for _ in range(2) for index in range(len(dataset))]


@pytest.mark.parametrize(("count", "apart"), [(10, False), THOUSAND])
@pytest.mark.parametrize("library", LIBRARIES)
def test_draws_are_those_of_the_source(library, count, apart, monkeypatch):
    """Two epochs through the cache hold the draws of two epochs without, over many set-ups of a library."""
    if not apart:
        monkeypatch.setattr(find, "start_method", lambda chosen: None)
    for seed in range(count):
        expected = read_twice(make_setup(library, seed))
        with closing(CachedDataset(make_setup(library, seed))) as dataset:
            assert read_twice(dataset) == expected, seed
