"""StocacheDataModule: its loaders, its sets and its transforms."""

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, SequentialSampler, WeightedRandomSampler

from lightning_stocache import StocacheDataModule
from tests.training.tiny import SAMPLES, Model, cached_datasets, make_trainer, source

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def ready(*sets: Any, **options: Any) -> Iterator[StocacheDataModule]:
    """A StocacheDataModule that is set up for `fit`."""
    dm = StocacheDataModule(*sets, **options)
    dm.setup("fit")
    yield dm
    dm.teardown("fit")


def test_factories_are_called_once_after_prepare(tmp_path):
    """A function that makes a set is called in `setup`, after `prepare`, once for all calls of the Trainer."""
    order: list[str] = []

    def make(name: str) -> object:
        order.append(name)
        return source(tmp_path, name, 8)

    dm = StocacheDataModule(
        train=partial(make, "train"), val=[partial(make, "val")], batch_size=4, prepare=lambda: order.append("prepare")
    )
    assert order == []
    trainer = make_trainer(tmp_path, logger=False)
    trainer.fit(Model(), dm)
    trainer.validate(Model(), dm, verbose=False)
    assert order == ["prepare", "train", "val", "prepare"]


def double(sample):
    return sample[0] * 2, sample[1]


@pytest.mark.parametrize(("option", "factor"), [({}, 2), ({"eval_transform": None}, 1)])
def test_transforms_run_after_the_cache(tmp_path, option, factor):
    """`transform` gets the source's samples in every epoch. Val has `eval_transform`, by default the same. One object
    as train and val has one cache, from the budget of train, and the transform of each stage."""
    both = source(tmp_path)
    image = both.expected(3)[0]
    with ready(both, both, stage_budgets={"val": 0}, transform=double, **option) as dm:
        [train], [val] = cached_datasets(dm.train_dataloader()), cached_datasets(dm.val_dataloader())
        assert train.cache is val.cache is not None
        for _ in range(2):
            assert torch.equal(train[3][0], image * 2)
            assert torch.equal(val[3][0], image * factor)
    assert train.cache is None


class Noting(torch.nn.Module):
    """A batch transform that notes the shapes of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, batch):
        self.shapes.append(tuple(batch[0].shape))
        return batch


def test_batch_transforms_run_on_whole_batches(tmp_path):
    """Validation has `eval_batch_transform`, also in the sanity check."""
    training, evaluation = Noting(), Noting()
    transforms = {"batch_transform": training, "eval_batch_transform": evaluation}
    dm = StocacheDataModule(source(tmp_path), source(tmp_path, "val", 8), batch_size=4, **transforms)
    make_trainer(tmp_path, num_sanity_val_steps=1, logger=False).fit(Model(), dm)
    assert training.shapes == [(4, 3, 8, 8)] * 6
    assert evaluation.shapes == [(4, 3, 8, 8)] * 3


def test_loader_options_reach_the_loaders(tmp_path):
    """`loader` overrides the DataLoader's arguments. Only the training loader gets `shuffle`, `drop_last` and
    samplers."""
    data = source(tmp_path, "train", 10)
    for shuffle in (True, False):
        with ready(data, data, batch_size=4, loader={"drop_last": True, "shuffle": shuffle}) as dm:
            assert (sorted(dm.train_dataloader().sampler) != list(dm.train_dataloader().sampler)) == shuffle
            assert [len(dm.train_dataloader()), len(dm.val_dataloader()[0])] == [2, 3]
    sampler = WeightedRandomSampler([1.0] * 10, 7)
    with ready(data, data, batch_size=4, loader={"sampler": sampler}) as dm:
        assert dm.train_dataloader().sampler is sampler
        assert isinstance(dm.val_dataloader()[0].sampler, SequentialSampler)
    batches = BatchSampler(SequentialSampler(range(10)), 3, False)
    with ready(data, data, batch_size=4, loader={"batch_sampler": batches}) as dm:
        assert [len(labels) for _, labels in dm.train_dataloader()] == [3, 3, 3, 1]
        assert [len(labels) for _, labels in dm.val_dataloader()[0]] == [4, 4, 2]


@pytest.mark.epoch_one_reads_all
def test_setup_twice_opens_once(tmp_path):
    """A second `setup`, before or by the Trainer, keeps the cache and reads no sample."""
    train = source(tmp_path)
    dm = StocacheDataModule(train, batch_size=4)
    dm.setup("fit")
    reads, [dataset] = train.loads, cached_datasets(dm.train_dataloader())
    dm.setup("fit")
    make_trainer(tmp_path, logger=False).fit(Model(), dm)
    assert train.loads == reads + SAMPLES
    assert dataset.cache is None


def test_a_stage_without_a_set_is_undefined(tmp_path):
    """Without a val set Lightning sees no val loader, and without a test set it raises its own error."""
    dm = StocacheDataModule(source(tmp_path), batch_size=4)
    trainer = make_trainer(tmp_path, logger=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Total length")
        trainer.fit(Model(), dm)
    assert trainer.val_dataloaders is None
    with pytest.raises(MisconfigurationException, match="test_dataloader"):
        trainer.test(Model(), dm)
