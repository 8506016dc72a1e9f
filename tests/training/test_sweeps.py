"""A Hydra sweep under ddp is refused in every door, for any app."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from lightning_stocache.training.obstacles import check_sweep


class _SubprocessScriptLauncher:
    """Of the name by which Lightning's is known."""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the process into a job of Hydra's, of a mode."""

    def put(mode: str | None) -> None:
        config = None if mode is None else OmegaConf.create({"hydra": {"mode": RunMode[mode]}})
        monkeypatch.setattr(HydraConfig.instance(), "cfg", config)

    return put


def trainer(launcher: Any, devices: int) -> Any:
    return SimpleNamespace(strategy=SimpleNamespace(launcher=launcher), num_devices=devices)


def test_a_sweep_of_ranks_that_sweep_is_refused(job: Any) -> None:
    """The error says why, and what to use instead."""
    job("MULTIRUN")
    with pytest.raises(ValueError, match=r"a sweep \(-m\) on 2 devices(.|\n)*ddp_spawn"):
        check_sweep(trainer(_SubprocessScriptLauncher(), 2))


@pytest.mark.parametrize(
    ("mode", "launcher", "devices"),
    [
        (None, _SubprocessScriptLauncher(), 2),
        ("RUN", _SubprocessScriptLauncher(), 2),
        ("MULTIRUN", None, 2),
        ("MULTIRUN", _SubprocessScriptLauncher(), 1),
    ],
)
def test_all_else_goes_on(job: Any, mode: str | None, launcher: Any, devices: int) -> None:
    """Outside of Hydra, a single job, ranks that are started anew, one device; and without a Trainer."""
    job(mode)
    check_sweep(trainer(launcher, devices))
    check_sweep(None)
