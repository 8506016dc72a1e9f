"""What the examples of photographs and text have in common.

`parser` has their options, `Loads` and `Counted` count the loads of the source in all processes, and `fit` trains with
a line per epoch. A cache needs nothing of this, only the callback in the example itself.
"""

import argparse
import atexit
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import Dataset

__all__ = ["Counted", "Loads", "Speed", "end", "fit", "parser"]


class Loads:
    """A count to which all processes add: a file that grows by a byte for each sample that the source loads.

    Args:
        path: the file. None: a temporary one; ranks that the Trainer starts find it by an environment variable.
    """

    def __init__(self, path: str | None = None) -> None:
        path = path or os.environ.get("EXAMPLE_LOADS")
        if path is None:
            file, path = tempfile.mkstemp()
            os.close(file)
            os.environ["EXAMPLE_LOADS"] = path
            atexit.register(os.unlink, path)
        self.path = path

    def note(self) -> None:
        """Add one."""
        with open(self.path, "ab", buffering=0) as file:
            file.write(b".")

    @property
    def count(self) -> int:
        return os.path.getsize(self.path) if os.path.exists(self.path) else 0


class Counted(Dataset[Any]):
    """A dataset that counts its loads."""

    def __init__(self, source: Any, loads: Loads) -> None:
        self.source, self.loads = source, loads

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        self.loads.note()
        return self.source[index]


class Speed(Callback):
    """Prints after each epoch how many samples the source has loaded, on all ranks, and the samples per second.

    The loads of the first epoch include those of set-up. `samples` is the number per epoch, on all ranks.
    """

    def __init__(self, loads: Loads, samples: int) -> None:
        self.loads, self.samples = loads, samples
        self.rates: list[float] = []
        self._before = loads.count
        self._start = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rates.append(self.samples / (time.perf_counter() - self._start))
        loaded, self._before = self.loads.count - self._before, self.loads.count
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch}: the source loaded {loaded} samples; {self.rates[-1]:,.0f} samples/s")


def parser(doc: str | None, *, samples: int, batch_size: int = 32) -> argparse.ArgumentParser:
    """The options of the examples; the script's docstring is their help."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--samples", type=int, default=samples, help=f"of the dataset ({samples})")
    made.add_argument("--epochs", type=int, default=3, help="(3)")
    made.add_argument("--batch-size", type=int, default=batch_size, help=f"per rank ({batch_size})")
    made.add_argument("--workers", type=int, default=2, help="of the loader (2)")
    made.add_argument("--devices", type=int, default=1, help="ranks (1)")
    made.add_argument("--strategy", default="auto", help="as the Trainer takes it, ddp for instance (auto)")
    made.add_argument("--budget", default="auto", help="of the cache; 0: without (auto)")
    return made


def fit(
    model: LightningModule, data: Any, chosen: argparse.Namespace, loads: Loads, callbacks: Sequence[Callback]
) -> list[float]:
    """Train on a loader or a DataModule. Returns the samples/s of each epoch."""
    torch.set_num_threads(1)  # see train.py
    seed_everything(0, workers=True, verbose=False)
    speed = Speed(loads, chosen.samples)
    trainer = Trainer(
        max_epochs=chosen.epochs,
        devices=chosen.devices,
        strategy=chosen.strategy,
        callbacks=[*callbacks, speed],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, data)
    return speed.rates


def end() -> None:
    """Leave the ranks' group: Lightning keeps it open, and a rank may then abort at exit."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
