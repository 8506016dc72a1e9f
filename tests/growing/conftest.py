"""Fixtures for the tests of what grows."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from lightning_stocache import RollingCache


@pytest.fixture
def opened() -> Iterator[Callable[..., RollingCache]]:
    """Makes rolling caches, which are closed at the end."""
    with ExitStack() as pools:
        yield lambda *args, **options: pools.enter_context(closing(RollingCache(*args, **options)))
