"""What a run of an application says of itself: the loss of each step, and each read of a training sample.

A script of an application imports this, makes tiny data in the current folder and trains. `test_apps.py` runs it in the
environment of its application.
"""

import functools
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from traceback import walk_stack
from typing import Any

import numpy as np
import torch

READS = Path("reads.jsonl").absolute()
LOSSES = Path("losses.jsonl").absolute()


def count(kind: type, length: int, method: str = "__getitem__") -> None:
    """Note each read of a dataset of this class and length, by which sets of one class are told apart.

    A key may be a list of indices: each counts.
    """
    plain = getattr(kind, method)

    @functools.wraps(plain)
    def counted(self: Any, index: Any) -> Any:
        if len(self) == length:
            for each in index if isinstance(index, list | np.ndarray) else [index]:
                _add(READS, {"index": int(each), "setup": _is_in_setup()})
        return plain(self, index)

    setattr(kind, method, counted)


def note(losses: Any) -> None:
    """Note the losses of one step."""
    _add(LOSSES, losses)


def note_losses() -> None:
    """Note the losses of each training step, under both names of Lightning."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        strategy = import_module(f"{package}.strategies").Strategy
        strategy.training_step = _noted(strategy.training_step)


def _noted(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def training_step(*args: Any, **options: Any) -> Any:
        result = plain(*args, **options)
        losses = result if isinstance(result, dict) else {"loss": result}
        note({name: value.item() for name, value in losses.items() if _is_number(value)})
        return result

    return training_step


def _is_in_setup() -> bool:
    return any("lightning_stocache/setup/" in frame.f_code.co_filename for frame, _ in walk_stack(None))


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _add(path: Path, value: Any) -> None:
    """One line more, in one write to the file's end, so that processes lose none of each other's."""
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(value).encode() + b"\n")
