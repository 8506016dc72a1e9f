"""What callbacks tell people while a Trainer runs: lines on rank zero, through Lightning's logger, above its bar."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_stocache.console import PREFIX, above_bars

__all__ = ["say", "warn"]

_LOGGER = "lightning.pytorch.utilities.rank_zero"  # that of rank_zero_info


def say(text: str) -> None:
    """Log a line."""
    with above_bars(_LOGGER):
        rank_zero_info(f"{PREFIX}{text}")


def warn(text: str) -> None:
    """Warn."""
    rank_zero_warn(f"{PREFIX}{text}")
