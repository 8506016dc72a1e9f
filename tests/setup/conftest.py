"""What the tests of the set-up room share."""

import os
import random
from collections.abc import Iterator

import pytest

from lightning_stocache.node.named import clean, named_segments


@pytest.fixture
def name() -> Iterator[str]:
    """A name for caches; what lies under it, or under longer ones, is removed after the test."""
    name = f"test-{os.getpid()}-{random.getrandbits(32)}"
    yield name
    for segment in named_segments():
        if segment.name.startswith(name):
            clean(segment.name)
