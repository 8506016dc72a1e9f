"""What holds for every test of the training room."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def the_package_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    """Its log says, for instance, how many samples were read at set-up."""
    caplog.set_level(logging.INFO, logger="lightning_stocache")
