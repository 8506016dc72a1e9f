"""Walking a Trainer's loaders and making them anew around another dataset."""

import collections
import contextlib
import multiprocessing
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods as replaced
from lightning.fabric.utilities.data import _update_dataloader
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_stocache import CachedDataset, CachedLoader
from lightning_stocache.loading.loader_tree import loaders_in
from lightning_stocache.training.loaders import rewrap, settings_of, with_dataset
from tests.training.tiny import Looking, Watcher, make_trainer

NUMBERS: Any = [torch.tensor(i) for i in range(12)]
TENS: Any = [torch.tensor(10 * i) for i in range(12)]


def read(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def tens(loader: DataLoader[Any]) -> DataLoader[Any]:
    return with_dataset(loader, TENS)


class Pair(collections.namedtuple("Pair", "one other")):
    """A namedtuple of loaders."""


def test_nesting_and_types_are_kept():
    """The result has the nesting and the types of the argument, with every loader replaced."""
    pair = Pair(DataLoader(NUMBERS, 4), [DataLoader(NUMBERS, 6)])
    combined = CombinedLoader({"one": DataLoader(NUMBERS, 4), "other": DataLoader(NUMBERS, 6)}, "max_size")
    given = collections.OrderedDict(pair=pair, combined=(combined,))
    renewed = rewrap(given, tens)
    assert (type(renewed), type(renewed["pair"]), type(renewed["combined"])) == (collections.OrderedDict, Pair, tuple)
    assert [len(loader) for loader in loaders_in(renewed)] == [3, 2, 3, 2]
    assert all(loader.dataset is TENS for loader in loaders_in(renewed))
    assert all(loader.dataset is NUMBERS for loader in loaders_in(given))
    assert len(list(renewed["combined"][0])) == 3  # "max_size": the shortest, the default, would be two


@pytest.mark.parametrize(
    "make",
    [
        lambda data: DataLoader(data, batch_sampler=BatchSampler(range(7), 3, drop_last=False)),
        lambda data: DataLoader(data, batch_sampler=[[0, 1], [5]]),
        lambda data: DataLoader(data, batch_size=None, sampler=[2, 7], collate_fn=lambda sample: sample[None]),
        lambda data: DataLoader(data, 5, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(3)),
        pytest.param(
            lambda data: DataLoader(data, 4, num_workers=1, prefetch_factor=3, multiprocessing_context="fork"),
            marks=pytest.mark.processes,
        ),
    ],
    ids=["BatchSampler", "batches", "unbatched", "generator", "workers"],
)
def test_the_new_loader_reads_what_the_old_one_would(make):
    """A copy of a loader reads the same batches in the same order, with all of the loader's arguments."""
    assert read(tens(make(NUMBERS))) == read(make(TENS))


def test_no_constructor_runs():
    """A subclass is copied without its constructor, which may draw or keep no argument. An attribute that is a method
    of the loader becomes a method of the copy."""

    class Drawing(DataLoader[Any]):
        def __init__(self) -> None:
            self.scale = int(torch.randint(2, 9, ()))
            super().__init__(TENS, batch_size=5, collate_fn=self.collate)

        def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(samples) * self.scale

    old = Drawing()
    expected, state = read(old), torch.get_rng_state()
    new = with_dataset(old, NUMBERS)
    assert torch.equal(torch.get_rng_state(), state)
    assert [[10 * number for number in batch] for batch in read(new)] == expected
    new.scale = 1  # type: ignore[attr-defined]
    assert read(new)[0] == [0, 1, 2, 3, 4]
    assert read(old) == expected


def test_what_was_changed_on_a_loader_is_kept():
    """The copy has all attributes that a user has added or changed, also on the batch sampler; the loader keeps its
    own."""
    old: Any = DataLoader(NUMBERS, 4)
    old.name, old.batch_sampler.batch_size, old.worker_init_fn = "mine", 6, print
    new: Any = tens(old)
    assert (new.name, new.worker_init_fn, len(new)) == ("mine", print, 2)
    assert read(new)[0] == [0, 10, 20, 30, 40, 50]
    new.name = "new"
    assert (old.name, old.dataset) == ("mine", NUMBERS)


class Tagged(DataLoader[Any]):
    """A loader with an argument of its own, as a user would write it."""

    def __init__(self, dataset: Any, tag: str, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.tag = tag


@pytest.mark.parametrize("given", ["in a hook", "before"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(TENS, batch_size=5, shuffle=False, drop_last=True),
        lambda: DataLoader(TENS, 5, None, None, None, 0, torch.stack, False, True),
        lambda: Tagged(TENS, "blue", batch_size=5, drop_last=True),
    ],
    ids=["by keyword", "by position", "subclass"],
)
def test_lightning_makes_the_copy_anew_around_the_same_dataset(make, given):
    """A copy that Lightning re-creates with another sampler, as for DDP, reads the cached dataset, with the user's
    arguments."""
    with replaced(DataLoader, "dataset") if given == "in a hook" else contextlib.nullcontext():
        dataset = CachedDataset(TENS, defer=True)
        new = with_dataset(make(), dataset)
    again = _update_dataloader(new, SequentialSampler(range(11)))
    assert again.dataset is dataset
    assert read(again) == [[0, 10, 20, 30, 40], [50, 60, 70, 80, 90]]
    assert type(again) is type(new)


def test_settings_know_batches_and_how_workers_start():
    """The batch size comes from the batch sampler if the loader has none. The start method is known if there are
    workers."""
    assert settings_of(DataLoader(NUMBERS, batch_sampler=BatchSampler(range(7), 3, False))).batch_size == 3
    assert settings_of(DataLoader(NUMBERS, batch_size=None)).batch_size == 1
    assert settings_of(DataLoader(NUMBERS, num_workers=2, multiprocessing_context="spawn")).start_method == "spawn"
    assert settings_of(DataLoader(NUMBERS, num_workers=2)).start_method is None


@pytest.mark.processes
def test_a_trainer_takes_a_cached_loader_as_it_is(tmp_path):
    """On one device nothing is made anew, and when the fit is over its persistent workers have ended. A Trainer that
    overfits makes the loader anew, without shuffling, with all of its other options."""
    workers = {"num_workers": 2, "persistent_workers": True}
    with contextlib.closing(CachedDataset(TENS, "50%")) as dataset:
        loader = CachedLoader(dataset, 4, shuffle=True, gather="main", generator=torch.Generator(), **workers)
        looking, model = Looking(), Watcher()
        make_trainer(tmp_path, [looking], epochs=2, logger=False).fit(model, loader)
        assert looking.loaders["train"] is loader
        assert len(model.batches) == 6
        assert multiprocessing.active_children() == []
        make_trainer(tmp_path, [looking], logger=False, overfit_batches=2).fit(Watcher(), loader)
        made = looking.loaders["train"]
        assert (type(made), type(made.sampler), made.dataset) == (CachedLoader, SequentialSampler, dataset)
        assert (made.gather, made.generator) == ("main", loader.generator)
        loader.close()
