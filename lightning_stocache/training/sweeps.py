"""A Hydra sweep whose ranks would each sweep by themselves is refused."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["check_sweep"]


def check_sweep(trainer: Any) -> None:
    """Refuse a sweep (`-m`) under a strategy that starts its ranks by the program's own command line, as `ddp` does.

    It starts them once and for all jobs, `-m` and all: they go through the sweep beside rank zero, and where one rank's
    job fails, the ranks train different jobs together, on caches of different jobs.

    Args:
        trainer: the Trainer of the job; None outside of one.

    Raises:
        ValueError: this is such a sweep.
    """
    hydra: Any = sys.modules.get("hydra.core.hydra_config")  # never imported: then this is no job of Hydra's
    if trainer is None or hydra is None or not hydra.HydraConfig.initialized():
        return
    starts_itself = type(trainer.strategy.launcher).__name__ == "_SubprocessScriptLauncher"
    if trainer.num_devices > 1 and starts_itself and hydra.HydraConfig.get().mode.name == "MULTIRUN":
        raise ValueError(
            f"a sweep (-m) on {trainer.num_devices} devices needs a strategy that starts its ranks anew for every job, "
            "but trainer.strategy starts them once, by this command line.\nUse trainer.strategy=ddp_spawn, or run the "
            "program once per job, without -m"
        )
