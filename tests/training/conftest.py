"""Fixtures for the tests of the training room."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_stocache.node.segment import Segment
from tests.training.tiny import DOORS


@pytest.fixture(autouse=True)
def the_package_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    """Record INFO messages: the lines of epochs, and how many samples set-up has read."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.INFO, logger="lightning_stocache")
    caplog.set_level(logging.DEBUG, logger="lightning_stocache.loading.changes")  # which says what is read again


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Any:
    """Each of Lightning's doors. A test that names doors itself has those."""
    return request.param


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Segment]]:
    """The segments that this process creates, in their order."""
    made: list[Segment] = []
    create = Segment.create.__func__  # type: ignore[attr-defined]

    def noting(cls: type[Segment], *args: Any, **options: Any) -> Segment:
        made.append(create(cls, *args, **options))
        return made[-1]

    monkeypatch.setattr(Segment, "create", classmethod(noting))
    yield made
    made.clear()
