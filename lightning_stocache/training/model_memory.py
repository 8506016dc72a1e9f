"""What memory a fit will take for its model, which the caches must leave."""

from __future__ import annotations

from typing import Any

from torch.nn.parameter import UninitializedParameter

__all__ = ["training_bytes"]

# Bytes to come per byte of a parameter that is trained on the CPU: its gradient and Adam's two moments, and all four
# once more, because workers that are started for a later epoch hold the pages that a step then writes to.
_PER_PARAMETER = 7


def training_bytes(trainer: Any) -> int:
    """Memory that a fit will take and does not hold when its caches open: gradients, and what the optimiser keeps.

    On a device they are in its memory, not in this one. Without a trainer nothing is known.
    """
    if trainer is None or trainer.state.fn != "fit" or trainer.strategy.root_device.type != "cpu":
        return 0
    parameters = [parameter for parameter in trainer.lightning_module.parameters() if parameter.requires_grad]
    sizes = [
        0 if isinstance(parameter, UninitializedParameter) else parameter.numel() * parameter.element_size()
        for parameter in parameters
    ]
    return _PER_PARAMETER * sum(sizes)
