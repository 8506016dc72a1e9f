"""Fixtures for the tests of what grows."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_stocache import RollingCache


@pytest.fixture
def opened() -> Iterator[Callable[..., RollingCache]]:
    """Makes rolling caches, which are closed at the end."""
    pools = []

    def make(*args: Any, **options: Any) -> RollingCache:
        pools.append(RollingCache(*args, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
