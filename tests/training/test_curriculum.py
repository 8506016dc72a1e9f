"""A dataset that changes while a model trains on it: the batches are those of the same training without a cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import Dataset, Subset
from torchvision.transforms import v2

from tests.training.tiny import Data, Watcher, behind, make_trainer, said

pytestmark = pytest.mark.processes


class Brightness:
    """A transform without a draw."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image * self.factor


class Images(Dataset[Any]):
    """Images of a strength, transformed."""

    def __init__(self, transform: Any = None) -> None:
        self.strength, self.transform = 0, transform

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.full((3, 8, 8), float(index)) + self.strength
        return image if self.transform is None else self.transform(image), index % 10


class Schedule(Callback):
    """Changes the dataset of the Trainer's loader, or the user's own object, at the start of an epoch."""

    def __init__(self, change: Callable[[Any, Any, int], None], users: Any) -> None:
        self.change, self.users = change, users

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.change(trainer.train_dataloader.dataset, self.users, trainer.current_epoch)


def swap(shown: Any, users: Any, epoch: int) -> None:
    """Detectors are trained so: without the strong transform in the last epochs."""
    if epoch == 2:
        shown.transform = Brightness(0.5)


def switch_off(shown: Any, users: Any, epoch: int) -> None:
    if epoch == 2:
        shown.transform.transforms[1].p = 0


def change_all(shown: Any, users: Any, epoch: int) -> None:
    if epoch == 1:
        users.dataset.strength = 7
    elif epoch == 2:
        shown.dataset.transform.factor = 3
        shown.indices = list(range(8))


def split() -> Images:
    return Images(v2.Compose([Brightness(2), v2.RandomHorizontalFlip(), v2.RandomErasing(1)]))


CASES: dict[str, tuple[str, Callable[[], Any], dict[str, Any], Callable[[Any, Any, int], None], bool]] = {
    "assigned": (
        *("callback", Images, {"num_workers": 2, "persistent_workers": True}),
        *(lambda shown, users, epoch: setattr(shown, "strength", epoch), False),  # which the workers do not see
    ),
    "split transform": ("callback", split, {"num_workers": 2}, swap, True),
    "step after the cache": (
        *("callback", lambda: Images(v2.Compose([Brightness(2), v2.RandomErasing(1)])), {}, switch_off, False),
    ),
    "inside of a subset": (
        *("cache_datamodule", lambda: Subset(Images(Brightness(1)), range(2, 10)), {}, change_all, True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_changes_take_effect_when_they_would_without_a_cache(tmp_path: Path, caplog: Any, case: str) -> None:
    """In four epochs a model sees what it would see without a cache. One warning names what has changed, if
    the process that reads samples sees the change, and the changed step does not run after the cache."""
    door, make, options, change, warns = CASES[case]
    seen = []
    for behind_it in ("none", door):
        users, model = make(), Watcher()
        callbacks, data = behind(behind_it, Data(users, batch_size=5, **options))
        torch.manual_seed(3)
        trainer = make_trainer(tmp_path, [*callbacks, Schedule(change, users)], epochs=4, logger=False)
        trainer.fit(model, datamodule=data)
        seen.append(model.batches)
    assert seen[0] == seen[1]
    warnings = said(caplog, "has changed")
    assert len(warnings) == warns
    assert "transform" not in case or warnings[0].startswith("Images: its `transform` has changed")
