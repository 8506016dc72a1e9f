"""A dataset that is changed while it is trained on: the batches are those of the same training without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import v2

from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.datamodule import cache_datamodule
from tests.training.tiny import Model, make_trainer

pytestmark = pytest.mark.processes

LENGTH = 12


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
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.full((3, 8, 8), float(index)) + self.strength
        return image if self.transform is None else self.transform(image), index % 10

    def set_strength(self, strength: int) -> None:
        self.strength = strength


class Recorder(Model):
    """Keeps what it is trained on, and changes the dataset in a hook."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change, self.seen = change, []
        self.users: Any = None

    def on_train_epoch_start(self) -> None:
        dataset: Any = self.trainer.train_dataloader.dataset
        epoch = self.current_epoch
        if self.change == "assigned":
            dataset.strength = epoch
        elif self.change == "by a method":
            dataset.set_strength(epoch)
        elif self.change == "on the user's object":
            self.users.strength = epoch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch[0].clone())
        return super().training_step(batch, batch_idx)


class CloseMosaic(Callback):
    """Swaps the transform of the dataset for the last epochs, as detectors are trained."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            trainer.train_dataloader.dataset.transform = Brightness(0.5)


def trained(folder: Path, dataset: Images, change: str, cached: bool, *callbacks: Callback, **options: Any) -> Any:
    """What a model saw in four epochs."""
    torch.manual_seed(3)
    model = Recorder(change)
    model.users = dataset
    loader = DataLoader(dataset, 5, True, **options)
    callbacks = (*callbacks, StochasticCache()) if cached else callbacks
    trainer = make_trainer(folder, callbacks, epochs=4, logger=False)
    trainer.fit(model, loader)
    return torch.cat(model.seen)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("assigned", {"num_workers": 2, "persistent_workers": True}),
        ("by a method", {}),
        ("on the user's object", {"num_workers": 2}),
    ],
    ids=str,
)
def test_a_curriculum(tmp_path: Path, change: str, options: dict[str, Any]) -> None:
    """Whatever way the module changes its dataset at the start of an epoch, it trains on what it would train on."""
    expected = trained(tmp_path, Images(), change, False, **options)
    assert torch.equal(trained(tmp_path, Images(), change, True, **options), expected)


@pytest.mark.parametrize(("transform", "num_workers"), [("none", 0), ("split", 2)])
def test_a_transform_that_is_swapped(tmp_path: Path, caplog: Any, transform: str, num_workers: int) -> None:
    """In epoch two, split at its random step or not: the new one is used, the old one is not, with one warning."""
    transforms: dict[str, Any] = {
        "none": None,
        "split": v2.Compose([Brightness(2), v2.RandomHorizontalFlip(), v2.RandomErasing(1)]),
    }
    make, options = transforms[transform], {"num_workers": num_workers}
    expected = trained(tmp_path, Images(make), "", False, CloseMosaic(), **options)
    assert torch.equal(trained(tmp_path, Images(make), "", True, CloseMosaic(), **options), expected)
    [warning] = [record.getMessage() for record in caplog.records if "has changed" in record.getMessage()]
    assert warning.startswith("Images: its `transform` has changed")


def test_a_random_step_of_a_split_transform_may_be_switched_off(tmp_path: Path, caplog: Any) -> None:
    """It runs after the cache, so it takes effect and the cache stays."""

    class SwitchOff(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 2:
                trainer.train_dataloader.dataset.transform.transforms[1].p = 0

    def images() -> Images:
        return Images(v2.Compose([Brightness(2), v2.RandomErasing(1)]))

    expected = trained(tmp_path, images(), "", False, SwitchOff())
    assert torch.equal(trained(tmp_path, images(), "", True, SwitchOff()), expected)
    assert "has changed" not in caplog.text


def test_a_datamodule_changes_its_own_dataset(tmp_path: Path) -> None:
    """`cache_datamodule`: the object that the DataModule keeps, and the one inside a Subset of its loader."""

    class Data(LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.images = Images(Brightness(1))
            self.part = Subset(self.images, range(2, 10))

        def train_dataloader(self) -> Any:
            return DataLoader(self.part, 4)

    class Schedule(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.datamodule.images.strength = 7
            elif trainer.current_epoch == 2:
                trainer.train_dataloader.dataset.dataset.transform.factor = 3
                trainer.train_dataloader.dataset.indices = list(range(8))

    seen = []
    for wrap in (lambda data: data, cache_datamodule):
        model = Recorder("")
        make_trainer(tmp_path, [Schedule()], epochs=4, logger=False).fit(model, datamodule=wrap(Data()))
        seen.append(torch.cat(model.seen))
    assert torch.equal(*seen)
