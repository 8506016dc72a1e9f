"""The counts of an epoch are those of the batches that the trainer has started on, whatever ran ahead of it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset

from lightning_stocache import CachedDataset, CachedLoader, CacheMonitor, StochasticCache
from lightning_stocache.training import monitor
from tests.sources import Made
from tests.training.tiny import Model, Watcher, logged, make_trainer, plain_loader, rows_of, said

pytestmark = pytest.mark.processes

WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
SERVED = ("hits", "misses", "bypasses")


class Seen(Watcher):
    """Counts the samples that it is given in each epoch of each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.train_epochs, self.val_epochs = list[int](), list[int]()

    def on_train_epoch_start(self) -> None:
        self.train_epochs.append(0)

    def on_validation_epoch_start(self) -> None:
        self.val_epochs.append(0)

    def note(self, stage: str, batch: Any) -> torch.Tensor:
        epochs = self.train_epochs if stage == "train" else self.val_epochs
        epochs[-1] += _samples_in(batch)
        return self.weight.sum()


def _samples_in(batch: Any) -> int:
    """The samples of a batch, or of several batches side by side, of which some may be None."""
    if isinstance(batch, torch.Tensor):
        return len(batch)
    batch = batch.values() if isinstance(batch, dict) else batch
    return sum(map(_samples_in, filter(lambda part: part is not None, batch)))


def numbers(samples: int, seconds: float = 0.0) -> Made:
    """A source of numbers, each of which takes some time."""

    def load(index: int) -> torch.Tensor:
        time.sleep(seconds)
        return torch.full((4,), float(index))

    return Made(load, samples)


def served(trainer: Any, stage: str = "") -> list[float]:
    """The samples that were counted in each epoch."""
    columns = [logged(trainer, f"stocache/{stage}{name}") for name in SERVED]
    return list(map(sum, zip(*columns, strict=True)))


class Unsized(BatchSampler):
    """Batches without a length."""

    __len__ = None  # type: ignore[assignment]


class Endless(Unsized):
    """Batches without an end."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from super().__iter__()


def of_two(mode: str) -> Callable[..., Any]:
    """Two loaders of unlike lengths over one dataset."""

    def make(dataset: Any, **options: Any) -> CombinedLoader:
        parts = (dataset, Subset(dataset, range(20)))
        return CombinedLoader([plain_loader(part, shuffle=True, **options) for part in parts], mode)

    return make


def shuffled(dataset: Any, **options: Any) -> DataLoader[Any]:
    return plain_loader(dataset, shuffle=True, **options)


def unsized(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_sampler=Unsized(RandomSampler(dataset), 4, False), **options)


def endless(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_sampler=Endless(RandomSampler(dataset), 4, False), **options)


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "a sanity check": (shuffled, {"num_sanity_val_steps": 2}),
    "a number of batches": (shuffled, {"limit_train_batches": 3, "limit_val_batches": 2}),
    "a share of the batches": (shuffled, {"limit_train_batches": 0.4, "limit_val_batches": 0.5}),
    "validation within the epoch": (shuffled, {"val_check_interval": 0.3}),
    "overfitting": (shuffled, {"overfit_batches": 2}),
    "accumulation": (shuffled, {"accumulate_grad_batches": 4, "val_check_interval": 3}),
    "no end": (endless, {"limit_train_batches": 5}),
    "no length": (unsized, {"max_steps": 13}),  # in the second epoch a batch is only fetched
    "two loaders, the shorter": (of_two("min_size"), {}),
    "two loaders, the longer": (of_two("max_size"), {}),
    "two loaders, again and again": (of_two("max_size_cycle"), {"limit_train_batches": 12}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", WORKERS, ids=["0", "2", "persistent"])
def test_an_epoch_counts_what_the_model_was_given(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """With one dataset for training and validation, and workers that are ahead of both."""
    make, limits = CASES[name]
    data, model = numbers(40, 0.001), Seen()
    trainer = make_trainer(tmp_path, [StochasticCache("50%", verbose=False)], epochs=3, **limits)
    val = [plain_loader(part, **options) for part in (data, Subset(data, range(10)))]
    trainer.fit(model, make(data, **options), val)
    assert served(trainer) == model.train_epochs
    sanity = bool(trainer.num_sanity_val_steps and not trainer.overfit_batches) or name == "overfitting"
    assert served(trainer, "val/") == model.val_epochs[1 if sanity else 0 :]


@pytest.mark.parametrize("options", WORKERS, ids=["0", "2", "persistent"])
@pytest.mark.parametrize(
    ("form", "budget"), [("rows", "auto"), ("records", "50%"), ("transform", 0), ("transform", "auto")]
)
def test_a_loader_of_the_users_is_counted_too(tmp_path: Path, budget: Any, options: dict[str, Any], form: str) -> None:
    """By itself, with what was read by hand before the fit in no epoch, and nothing carried into a second fit."""

    def load(index: int) -> torch.Tensor:
        return torch.full((4 + (index % 3 if form == "records" else 0),), float(index))

    source, collate = Made(load, 40), {"collate_fn": torch.nn.utils.rnn.pad_sequence} if form == "records" else {}
    dataset = CachedDataset(source, budget, transform=torch.neg if form == "transform" else None)
    loader = CachedLoader(dataset, 4, shuffle=True, **options, **collate)
    for _ in zip(range(3), loader, strict=False):
        pass
    for _ in range(2):
        model = Watcher()
        trainer = make_trainer(tmp_path, [CacheMonitor(verbose=False)], epochs=2, limit_train_batches=7)
        trainer.fit(model, loader)
        assert served(trainer) == [28, 28]
        assert (sum(logged(trainer, "stocache/hits")) > 0) == (budget != 0)
    loader.close()
    dataset.close()


class Reading(Seen):
    """Reads the training loader by itself, after each epoch and in each validation, as a nearest neighbour does."""

    def read(self) -> None:
        for _ in self.trainer.train_dataloader or ():  # there is none in the sanity check
            pass

    on_train_epoch_end = on_validation_epoch_end = read


class TakesTwo(Seen):
    """Takes two batches in each step."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        for _ in range(2):
            batch, _, _ = next(dataloader_iter)
            self.note("train", batch)
        return self.weight.sum()


@pytest.mark.parametrize("options", WORKERS[:2], ids=["0", "2"])
@pytest.mark.parametrize("model", [Reading, TakesTwo])
def test_what_a_model_takes_beside_its_steps_is_in_no_epoch(tmp_path: Path, model: Any, options: Any) -> None:
    """Nor in the waiting of one."""
    data, seen = numbers(40, 0.001), model()
    trainer = make_trainer(tmp_path, [StochasticCache("50%")], epochs=3, val_check_interval=5)
    trainer.fit(seen, shuffled(data, **options), plain_loader(data, **options))
    assert served(trainer) == [40] * 3
    waits, epochs = (logged(trainer, f"stocache/{name}_seconds") for name in ("data_wait", "epoch"))
    assert all(0 < wait <= epoch for wait, epoch in zip(waits, epochs, strict=True))


@pytest.mark.parametrize("options", WORKERS[:2], ids=["0", "2"])
def test_one_loader_in_two_places_is_counted_once(tmp_path: Path, options: dict[str, Any]) -> None:
    """For training and validation, or twice side by side."""
    dataset = CachedDataset(numbers(40))
    loader = CachedLoader(dataset, 4, shuffle=True, **options)
    model = Seen()
    trainer = make_trainer(tmp_path, [CacheMonitor()], epochs=2, val_check_interval=4, limit_val_batches=3)
    trainer.fit(model, loader, loader)
    assert served(trainer) == model.train_epochs == [40, 40]
    assert served(trainer, "val/") == model.val_epochs[1:]
    trainer = make_trainer(tmp_path, [CacheMonitor()], epochs=2)
    trainer.fit(Seen(), {"one": loader, "two": loader})
    assert served(trainer) == [80, 80]
    loader.close()
    dataset.close()


def test_a_second_fit_counts_its_own_batches_alone(tmp_path: Path) -> None:
    """Lightning begins a loader twice then, and without a length fetches a batch each time."""
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=2)
    trainer.fit(Seen(), DataLoader(numbers(42), batch_sampler=Unsized(RandomSampler(range(42)), 4, False)))
    trainer.fit_loop.max_epochs = 4
    trainer.fit(Seen(), DataLoader(numbers(42), batch_sampler=Unsized(RandomSampler(range(42)), 4, False)))
    assert served(trainer) == [42] * 4


@pytest.mark.parametrize("options", WORKERS, ids=["0", "2", "persistent"])
def test_the_rest_of_an_epoch_counts_after_a_resume(tmp_path: Path, options: dict[str, Any]) -> None:
    """A checkpoint in its middle, saved while workers were ahead."""
    data = numbers(40, 0.001)
    cache = StochasticCache(keep_cache=True)  # else a fit of three steps would open none
    first = make_trainer(tmp_path, [cache], epochs=2, max_steps=3)
    first.fit(Watcher(), shuffled(data, **options))
    cache.close()
    first.save_checkpoint(tmp_path / "cut.ckpt")
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=2)
    trainer.fit(Watcher(), shuffled(data, **options), ckpt_path=tmp_path / "cut.ckpt")
    assert served(first) == [12]
    assert served(trainer) == [28, 40]


@pytest.mark.parametrize("options", WORKERS, ids=["0", "2", "persistent"])
def test_each_validation_counts_its_own(tmp_path: Path, options: dict[str, Any]) -> None:
    """Several calls with a kept cache, of which the first is cut short."""
    loader, cache = plain_loader(numbers(40, 0.001), **options), StochasticCache(keep_cache=True)
    trainers = [make_trainer(tmp_path, [cache], limit_val_batches=limit) for limit in (3, 1.0, 1.0)]
    for trainer in trainers:
        trainer.validate(Watcher(), loader, verbose=False)
    assert [served(trainer, "val/") for trainer in trainers] == [[12], [40], [40]]
    assert logged(trainers[-1], "stocache/val/hits") == [40]
    cache.close()


@pytest.mark.parametrize("fails", [ArithmeticError, KeyboardInterrupt])
def test_an_epoch_that_was_broken_off_is_in_no_later_one(tmp_path: Path, fails: type[BaseException]) -> None:
    """The next fit of the same Trainer counts from zero, over the same loader of the user's."""

    class Failing(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5 and trainer.current_epoch == 1 and not getattr(trainer, "has_failed", False):
                trainer.has_failed = True
                raise fails

    dataset = CachedDataset(numbers(40))
    loader = CachedLoader(dataset, 4, shuffle=True, num_workers=2)
    trainer = make_trainer(tmp_path, [CacheMonitor(), Failing()], epochs=2)
    with pytest.raises((fails, SystemExit)):
        trainer.fit(Watcher(), loader)
    trainer = make_trainer(tmp_path / "second", [CacheMonitor()], epochs=2)
    trainer.fit(Watcher(), loader)
    assert served(trainer) == [40, 40]
    loader.close()
    dataset.close()


class TwoOptimizers(Watcher):
    """Steps itself, with two optimizers in each batch, and logs a loss by Lightning."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.weight.sum())
            optimizer.step()
        self.log("loss", self.weight.sum())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class Logging(Watcher):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("loss", self.weight.sum())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("model", "options"),
    [(TwoOptimizers, {}), (Logging, {}), (Logging, {"accumulate_grad_batches": 2}), (TwoOptimizers, {"max_steps": 14})],
)
def test_live_values_have_lightnings_steps(tmp_path: Path, model: Any, options: dict[str, Any]) -> None:
    """One row for each step in which Lightning logs its own values."""
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=2, log_every_n_steps=3, **options)
    trainer.fit(model(), shuffled(numbers(40)))
    rows = rows_of(trainer.logger)
    steps = [[row["step"] for row in rows if key in row] for key in ("loss", "stocache/live/hit_rate")]
    assert steps[0] == steps[1] != []
    assert max(Counter(steps[1]).values()) == 1


# ---- the clock ----


class Clock:
    """Seconds that pass only where a test says so, and how often the device was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.moments = 0
        monkeypatch.setattr(monitor, "moment", self.moment)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "perf_counter_ns", lambda: round(self.now * 1e9))

    def moment(self, device: torch.device) -> float:
        assert device.type == "cpu"
        self.moments += 1
        return self.now

    def passing(self, seconds: float) -> Callable[..., None]:
        def hook(*_: Any, **__: Any) -> None:
            self.now += seconds

        return hook


class Hooks(Callback):
    """Some hooks of a callback."""

    def __init__(self, **hooks: Callable[..., None]) -> None:
        vars(self).update(hooks)


def test_an_epoch_lasts_from_its_workers_to_its_last_step(tmp_path, monkeypatch):
    """The first like the later ones; validation, its workers and what follows the last step are in none."""
    clock = Clock(monkeypatch)

    class Slow(SequentialSampler):
        """Begins slowly, as workers do."""

        seconds = 0.5

        def __iter__(self) -> Iterator[int]:
            clock.now += self.seconds
            return super().__iter__()

    data = numbers(40)
    samplers = Slow(data), Slow(data)
    samplers[1].seconds = 64
    hooks = Hooks(
        on_train_batch_start=clock.passing(1),
        on_validation_batch_start=clock.passing(100),
        on_train_epoch_end=clock.passing(1000),
    )
    trainer = make_trainer(tmp_path, [StochasticCache(), hooks], epochs=3, val_check_interval=5, log_every_n_steps=1000)
    trainer.fit(Watcher(), *(plain_loader(data, sampler=sampler) for sampler in samplers))
    assert logged(trainer, "stocache/epoch_seconds") == pytest.approx([10.5] * 3)
    assert logged(trainer, "stocache/data_wait_seconds") == pytest.approx([0.5] * 3)
    assert logged(trainer, "stocache/compute_seconds") == pytest.approx([10] * 3)
    assert logged(trainer, "stocache/samples_per_second") == pytest.approx([40 / 10.5] * 3)
    assert clock.moments <= 3 * (2 + 2 * 2)  # an epoch, and two validations: each begins and ends once


def test_a_device_is_waited_for_only_between_epochs(tmp_path, monkeypatch, caplog):
    """Its work counts in the epoch that has asked for it, although the host has gone on."""
    clock, queued = Clock(monkeypatch), [0.0]
    monkeypatch.setattr(
        monitor,
        "moment",
        lambda device: (setattr(clock, "now", clock.now + queued.pop()), queued.append(0.0), clock.now)[-1],
    )

    def ask(*_: Any) -> None:
        queued[0] += 4.0

    hooks = Hooks(on_train_batch_start=ask, on_train_epoch_end=ask)  # the latter for no epoch
    trainer = make_trainer(tmp_path, [StochasticCache(), hooks], epochs=3)
    trainer.fit(Watcher(), shuffled(numbers(40)))
    assert logged(trainer, "stocache/epoch_seconds") == pytest.approx([40] * 3)
    assert [line.partition(" filled, ")[2].partition(" (")[0] for line in said(caplog, "stocache: epoch ")] == [
        "40.0 s"
    ] * 3


def test_one_dataset_in_two_stages_has_the_seconds_of_training_alone(tmp_path):
    """Waiting is never negative, nor longer than its epoch, if hooks replace the loaders in each epoch."""
    data = numbers(40, 0.002)

    class Replacing(Model):
        training_step = Watcher.training_step
        validation_step = Watcher.validation_step
        note = Watcher.note
        configure_optimizers = Watcher.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.batches = torch.nn.Parameter(torch.zeros(1)), []

        def train_dataloader(self) -> Any:
            return shuffled(data, num_workers=2)

        def val_dataloader(self) -> Any:
            return plain_loader(data, num_workers=2)

    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Replacing())
    waits, epochs = (logged(trainer, f"stocache/{name}_seconds") for name in ("data_wait", "epoch"))
    assert len(waits) == 3
    assert all(0 < wait <= epoch for wait, epoch in zip(waits, epochs, strict=True))
    assert all(seconds >= 0 for seconds in logged(trainer, "stocache/compute_seconds"))
    assert served(trainer) == [40] * 3
