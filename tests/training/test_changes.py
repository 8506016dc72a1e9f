"""What changes while a model trains: loaders and datasets that are made anew, that grow, or whose contents change."""

import copy
import gc
import multiprocessing
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import Subset, default_collate
from torchvision.transforms import v2

from lightning_stocache.training.callbacks import StochasticCache
from tests.sources import CountedSource, CountedStream, Made, TransformedSource
from tests.training.tiny import (
    SAMPLES,
    SLOT,
    Data,
    Model,
    Remembers,
    Watcher,
    announced,
    behind,
    data_hooks,
    logged,
    make_trainer,
    plain_loader,
    read_again,
    said,
    source,
    through,
)

RELOADS = {"reload_dataloaders_every_n_epochs": 1}


@pytest.mark.parametrize(
    ("door", "options"),
    [
        ("cache_datamodule", {"limit_val_batches": 1} | RELOADS),
        ("callback", {"reload_dataloaders_every_n_epochs": 2, "num_sanity_val_steps": 0, "val_check_interval": 2}),
        ("callback", {"overfit_batches": 2}),
    ],
)
def test_hooks_run_when_and_as_often_as_without(tmp_path, door, options):
    """In each call each hook runs at the same steps as without the cache, and gives the same batches."""
    data = {stage: source(tmp_path, stage, 8) for stage in ("train", "val", "test", "predict")}
    loaders = {stage: lambda stage=stage: plain_loader(data[stage], shuffle=stage == "train") for stage in data}

    def run(door: str) -> Any:
        trainer, model, dm, _ = through(door, tmp_path, loaders, epochs=3, **options)
        seed_everything(0, verbose=False)
        trainer.fit(model, datamodule=dm)
        trainer.validate(model, datamodule=dm, verbose=False)
        trainer.test(model, datamodule=dm, verbose=False)
        trainer.predict(model, datamodule=dm)
        return dm.ran, model.batches

    assert run(door) == run("none")


class Unbounded(Made):
    """Has a sample for each index, also in a worker that knows a smaller length."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


@pytest.mark.processes
def test_a_persistent_loader_that_comes_again_is_the_same(tmp_path):
    """It keeps its workers over reloads, and draws no second base seed, also if its dataset grows."""
    data = Unbounded(torch.tensor)
    loader = plain_loader(data, shuffle=True, num_workers=1, persistent_workers=True)
    seen, batches = [], []

    def give() -> Any:
        data.length += 8
        return loader

    noting = LambdaCallback(on_train_epoch_start=lambda trainer, _: seen.append(trainer.train_dataloader))
    for callbacks in ([], [StochasticCache(), noting]):
        model, data.length = Watcher(), 8
        seed_everything(0, verbose=False)
        trainer = make_trainer(tmp_path, callbacks, logger=False, epochs=3, **RELOADS)
        trainer.fit(model, datamodule=data_hooks(train=give))
        batches.append(model.batches)
    assert batches[0] == batches[1]
    assert len(set(map(id, seen))) == 1
    assert seen[0] is not loader


@pytest.mark.processes
def test_a_reloaded_loader_takes_its_workers_with_it(tmp_path):
    """New loaders in every epoch leave no more worker processes than one epoch has."""
    workers = list[int]()
    counting = LambdaCallback(on_train_epoch_end=lambda *_: workers.append(len(multiprocessing.active_children())))
    callbacks, cached = behind("callback", Data(source(tmp_path), num_workers=1, persistent_workers=True), budget="50%")
    make_trainer(tmp_path, [*callbacks, counting], epochs=3, logger=False, **RELOADS).fit(Model(), cached)
    assert workers == [1, 1, 1]
    gc.collect()
    assert not multiprocessing.active_children()


def test_a_loader_made_anew_for_every_epoch_goes_with_it(tmp_path):
    """A call keeps only the last loader of a hook, also if a loader's own collate function refers to it."""
    train, made, alive = source(tmp_path), [], []

    def make() -> Any:
        loader = plain_loader(train)
        loader.collate_fn = MethodType(lambda loader, samples: default_collate(samples), loader)
        made.append(weakref.ref(loader))
        gc.collect()
        alive.append(sum(loader() is not None for loader in made))
        return loader

    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=5, logger=False, **RELOADS)
    trainer.fit(Model(), datamodule=data_hooks(train=make))
    assert len(alive) == 5
    assert max(alive) <= 3


def test_a_dataset_made_anew_for_every_epoch_goes_with_it(tmp_path):
    """The cache goes on with the new object, and keeps none of those before."""
    made, alive = list[Any](), list[int]()

    def make() -> Any:
        data = source(tmp_path)
        made.append(weakref.ref(data))
        gc.collect()
        alive.append(sum(data() is not None for data in made))
        return plain_loader(data)

    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=5, **RELOADS)
    trainer.fit(Model(), datamodule=data_hooks(train=make))
    assert logged(trainer, "stocache/hits")[1:] == [SAMPLES] * 4
    assert max(alive) <= 2


def fit_anew(
    tmp_path: Path, make: Callable[[int], Any], model: Any = Model, epochs: int = 3, ranks: int = 1, **options: Any
) -> Any:
    """The Trainer and the model after a fit in which each epoch has a dataset, by the number of those before it."""
    made: list[Any] = []

    def give() -> Any:
        made.append(make(len(made)))
        return plain_loader(made[-1])

    settings = RELOADS | ({"strategy": "ddp_fork", "devices": ranks} if ranks > 1 else {})
    model, trainer = model(), make_trainer(tmp_path, [StochasticCache(**options)], epochs=epochs, **settings)
    trainer.fit(model, datamodule=data_hooks(train=give))
    return trainer, model


class Labelled(CountedSource):
    """Images with labels that are made anew, and a setting."""

    def __init__(self, labels: Any, gain: int = 1) -> None:
        super().__init__(100)
        self.labels, self.gain = labels, gain

    def expected(self, index: int) -> Any:
        return super().expected(index)[0] * 0 + self.gain, int(self.labels[index])


def relabelled(count: int) -> list[int]:
    """Labels of which one more in a hundred has changed before each epoch."""
    labels = [0] * 100
    for number in range(count):
        labels[number * 31 + 7] = number + 1
    return labels


ANEW: dict[str, Callable[[int], Any]] = {
    "list": lambda count: Labelled(relabelled(count)),
    "array": lambda count: Labelled(torch.tensor(relabelled(count)).numpy()),
    "dict": lambda count: Labelled(dict(enumerate(relabelled(count)))),
    "subset": lambda count: Subset(Labelled(torch.tensor(relabelled(count))), range(100)),
    "setting": lambda count: Labelled([0] * 100, gain=count),
    "longer": lambda count: Subset(Labelled(relabelled(count)), range(80 + 10 * count)),
}


class Seen(Model):
    """Notes the samples of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[Any] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        self.epochs[-1] += zip(images.flatten(1).sum(1).tolist(), labels.tolist(), strict=True)
        return super().training_step((images, labels * 0), batch_idx)


@pytest.mark.parametrize("kind", ANEW)
def test_a_dataset_that_is_made_anew_has_its_own_labels(tmp_path, kind):
    """One changed label in a hundred opens a new cache, wherever the labels lie; a setting does, too."""
    _, model = fit_anew(tmp_path, ANEW[kind], Seen)
    for count, epoch in enumerate(model.epochs):
        dataset = ANEW[kind](count)
        samples = map(dataset.__getitem__, range(len(dataset)))
        assert sorted(epoch) == sorted((int(image.sum()), label) for image, label in samples)


@pytest.mark.epoch_one_reads_all
def test_several_loaders_of_a_stage_go_on_in_their_caches(tmp_path, caplog):
    """Datasets that a hook makes anew with the same state keep their caches, also if the stage has two loaders."""
    folders = [tmp_path / name for name in ("train", "a", "b")]
    for folder in folders:
        folder.mkdir()
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=3, **RELOADS)
    hooks = data_hooks(
        train=lambda: plain_loader(source(folders[0])),
        val=lambda: [plain_loader(source(folder)) for folder in folders[1:]],
    )
    trainer.fit(Model(), datamodule=hooks)
    assert logged(trainer, "stocache/val/misses")[1:] == [0, 0]
    assert "came with a new" not in caplog.text


def longer(images: CountedSource, count: int) -> CountedSource:
    """The same object with four samples more for each epoch before."""
    images.length = SAMPLES + 4 * count
    return images


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(
    ("new", "budget", "misses", "bypasses"),
    [
        (True, "auto", [SAMPLES, 4, 4], [0, 0, 0]),
        (False, "auto", [SAMPLES, 4, 4], [0, 0, 0]),
        (False, (SAMPLES + 6) * SLOT, [SAMPLES, 4, 0], [0, 0, 4]),
    ],
)
def test_a_dataset_goes_on_in_its_cache_while_all_of_it_fits(tmp_path, caplog, new, budget, misses, bypasses):
    """Made anew or grown in place, each sample is loaded once; what does not fit passes through, with one warning."""
    images = source(tmp_path)
    trainer, _ = fit_anew(tmp_path, lambda count: longer(source(tmp_path) if new else images, count), budget=budget)
    assert logged(trainer, "stocache/misses") == misses
    assert logged(trainer, "stocache/hits") == [0, SAMPLES, SAMPLES + 4]
    assert logged(trainer, "stocache/bypasses") == bypasses
    assert logged(trainer, "stocache/fill_fraction") == [1, 1, 1]
    assert trainer.progress_bar_metrics["cache_hit"] == 0.875
    assert len(said(caplog, "the new part of CountedSource passes through uncached")) == (4 in bypasses)
    assert "came with a new" not in caplog.text
    if not new and budget == "auto":  # with each growth, what is stored is compared, as far as 32 samples
        assert logged(trainer, "stocache/coverage") == [1, 1, 1]
        assert images.loads == SAMPLES + 2 * 4 + SAMPLES + (SAMPLES + 4) + announced(caplog) + read_again(caplog)


@pytest.mark.processes
def test_ranks_share_the_cache_of_a_dataset_that_grows(tmp_path):
    """In the last of three epochs what came last is loaded once, by one of two ranks."""
    images = source(tmp_path)
    trainer, _ = fit_anew(tmp_path, lambda count: longer(images, count), ranks=2)
    metrics = [float(trainer.callback_metrics[f"stocache/{name}"]) for name in ("hits", "misses", "bypasses")]
    assert metrics == [SAMPLES + 4, 4, 0]


@pytest.mark.epoch_one_reads_all
def test_datasets_that_are_never_the_same_end_the_caching(tmp_path, caplog):
    """The second new dataset without a hit in between passes through, with one warning that says what to do.

    The last line refers to the warning, and not to budget=0, which the user has not asked for.
    """

    def other(count: int) -> Made:
        return Made(lambda index: torch.tensor(100 * count + index), SAMPLES)

    trainer, _ = fit_anew(tmp_path, other, Watcher, epochs=5)
    assert logged(trainer, "stocache/misses")[:2] == [SAMPLES] * 2
    assert caplog.text.count("not cached any more") == caplog.text.count("RollingCache") == 1
    assert len(said(caplog, "nothing is cached any more")) == 1
    assert not said(caplog, "the cache is off")


def test_a_stream_that_is_made_anew_replaces_the_one_before(tmp_path, caplog):
    """Loaders that are reloaded with a new stream give the memory of the old one back, with one warning."""
    options = {"budget": "64MiB", "streams": True}
    _, model = fit_anew(tmp_path, lambda count: CountedStream(40, lambda n: torch.tensor([n])), Remembers, 4, **options)
    assert model.sorted_epochs == [list(range(40))] * 4
    assert caplog.text.count("came with a new CountedStream") == 1


class Images(TransformedSource):
    """Images of a strength, squared, and then changed by further steps."""

    strength = 0

    def __init__(self, *steps: Any) -> None:
        super().__init__(12)
        self.transform = v2.Compose([torch.square, *steps])

    def expected(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 8, 8), float(index)) + self.strength, index % 10


class Words(Images):
    """Texts of several lengths, which are cached as records, and an image with a random step."""

    def __getitem__(self, index: int) -> Any:
        return {"text": f"{index} " * (index % 5), "image": super().__getitem__(index)[0]}


def grow(shown: Any, users: Images, strength: int = 0, steps: Sequence[Any] = ()) -> None:
    users.length += 4
    users.strength += strength
    users.transform.transforms += steps


def set_to(name: str, value: Any) -> Callable[[Any, Any], None]:
    """Change an attribute of the loader's dataset."""
    return lambda shown, users: setattr(shown, name, value)


FLIP, ERASE = v2.RandomHorizontalFlip(), v2.RandomErasing(1)
NUMBERS = [torch.tensor(float(number)) for number in range(8)]
GROWS: Any = {1: grow, 2: grow}
WORKER, PERSISTENT = {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}
IN_SUBSET = {1: lambda _, users: setattr(users.dataset, "strength", 7), 2: set_to("indices", range(8))}
# A dataset, its loader's options, and what changes before an epoch: of the loader's dataset, or of the user's.
CASES: dict[str, tuple[Any, dict[str, Any], dict[int, Callable[[Any, Any], Any]]]] = {
    "rows grow": (Images(FLIP), WORKER, GROWS),
    "records grow": (Words(FLIP), {}, GROWS),
    "grown, with other contents": (Images(), {}, {1: lambda *both: grow(*both, 5)}),
    "grown, with a random step": (Images(), {}, {1: lambda *both: grow(*both, 0, [ERASE])}),
    "grown before the first sample": (NUMBERS, {}, {1: lambda _, users: users.insert(0, torch.tensor(-1.0))}),
    "grown before the last sample": (NUMBERS, {}, {1: lambda _, users: users.insert(-1, torch.tensor(-1.0))}),
    "persistent workers, which do not see it": (Images(), PERSISTENT, {1: set_to("strength", 5)}),
    # Detectors are trained so: without the strong transform in the last epochs.
    "split transform": (Images(FLIP, ERASE), WORKER, {2: set_to("transform", torch.neg)}),
    "after the cache": (Images(FLIP, ERASE), {}, {2: lambda shown, _: setattr(shown.transform.transforms[1], "p", 0)}),
    "inside of a subset": (Subset(Images(), range(2, 10)), {}, IN_SUBSET),
}
WARNED = {"split transform": ["Images: its `transform`"], "inside of a subset": ["Subset: its `dataset.strength`"]}


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_changes_take_effect_when_they_would_without_a_cache(tmp_path, caplog, name):
    """A changed dataset gives what it gives without a cache; one warning names the change if the reader sees it."""
    dataset, loading, changes = CASES[name]

    def run(door: str, **options: Any) -> Any:
        users, model = copy.deepcopy(dataset), Watcher()
        callbacks, data = behind(door, Data(users, batch_size=5, **loading), **options)

        def change(trainer: Any, _: Any) -> None:
            if trainer.current_epoch + 1 in changes:
                changes[trainer.current_epoch + 1](trainer.train_dataloader.dataset, users)

        torch.manual_seed(3)
        callbacks.append(LambdaCallback(on_train_epoch_end=change))
        trainer = make_trainer(tmp_path, callbacks, epochs=3, **RELOADS if "grow" in name else {})
        trainer.fit(model, datamodule=data)
        return trainer, model.batches

    trainer, batches = run("callback", budget="50%" if "first" in name else "auto")
    assert batches == run("none")[1]
    assert [warning.partition(" has changed")[0] for warning in said(caplog, "has changed")] == WARNED.get(name, [])
    if changes is GROWS:
        assert max(logged(trainer, "stocache/misses")[1:]) <= 4  # set-up may have read some of the new ones


class ArrayOfLabels(Made):
    """Labels in an array, which the user writes to."""

    def __init__(self) -> None:
        super().__init__(torch.tensor, 12)
        self.labels = torch.zeros(12)

    def expected(self, index: int) -> Any:
        return torch.tensor(float(index)), self.labels[index].clone()


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(("reload", "calls"), [(True, 1), (False, 1), (False, 2)])
def test_labels_that_are_written_are_trained_on_from_then_on(tmp_path, caplog, reload, calls):
    """Their epoch passes through, with one warning. With new loaders, or in the next call, a new cache opens."""

    def run(callbacks: list[Any]) -> Any:
        labelled, model, logs = ArrayOfLabels(), Watcher(), []
        write = LambdaCallback(
            on_train_epoch_start=lambda trainer, _: labelled.labels.fill_(min(trainer.current_epoch, 1))
        )
        for _ in range(calls):
            trainer = make_trainer(tmp_path, [*callbacks, write], epochs=4, **RELOADS if reload else {})
            torch.manual_seed(3)
            trainer.fit(model, datamodule=data_hooks(train=lambda: plain_loader(labelled, shuffle=True)))
            logs.append(logged(trainer, "stocache/hits") if callbacks else [])
        return model.batches, logs

    batches, logs = run([StochasticCache(keep_cache=calls > 1)])
    assert batches == run([])[0]
    assert len(said(caplog, "has changed since it was cached")) == calls
    if reload:
        assert logs[0][1:] == [0, 12, 12]
    elif calls == 1:
        assert logs[0][1:] == [0, 0, 0]
