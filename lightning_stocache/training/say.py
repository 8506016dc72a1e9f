"""What callbacks tell people while a Trainer runs: lines on rank zero, through Lightning's logger, above its bar."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_stocache.console import PREFIX, above_bars

__all__ = ["log_every", "say", "warn"]

_LOGGER = "lightning.pytorch.utilities.rank_zero"  # that of rank_zero_info


def say(text: str) -> None:
    """Log a line."""
    with above_bars(_LOGGER):
        rank_zero_info(f"{PREFIX}{text}")


def log_every(trainer: Trainer) -> int:
    """The Trainer's logging cadence in steps; a barebones Trainer has 0, and no loggers."""
    return int(getattr(trainer, "log_every_n_steps", 0)) or 1


def warn(text: str) -> None:
    """Warn."""
    rank_zero_warn(f"{PREFIX}{text}")
