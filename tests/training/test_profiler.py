"""What the Trainer's profiler hears is heard, and the Trainer gets its profiler back."""

from __future__ import annotations

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from lightning_stocache.training.datamodule import StocacheDataModule
from lightning_stocache.training.profiler import listen, stop_listening
from tests.training.tiny import SAMPLES, Model, make_trainer, source

pytestmark = pytest.mark.processes

WAIT = "[_TrainingEpochLoop].train_dataloader_next"


COMPUTE = "run_training_batch"


class Notes:
    """Contexts that write everything down."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.contexts = {action: _Note(self.heard, action) for action in (WAIT, COMPUTE)}


class _Note:
    def __init__(self, heard: list[tuple[str, str]], action: str) -> None:
        self.heard, self.action = heard, action

    def __enter__(self) -> None:
        self.heard.append(("start", self.action))

    def __exit__(self, *_: object) -> None:
        self.heard.append(("stop", self.action))


class Listener(Callback):
    def __init__(self, *notes: Notes) -> None:
        self.notes = notes

    def on_train_start(self, trainer, pl_module):
        for notes in self.notes:
            listen(trainer, notes.contexts)

    def on_train_end(self, trainer, pl_module):
        for notes in self.notes:
            stop_listening(trainer, notes.contexts)


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_contexts_are_entered_where_the_profiler_hears_of_them(tmp_path, profiler):
    """Every wait and every batch, with any profiler or none; afterwards the Trainer has the one that it had."""
    one, other = Notes(), Notes()
    trainer = make_trainer(tmp_path, [Listener(one, other)], epochs=2, profiler=profiler)
    before = trainer.profiler
    trainer.fit(Model(), StocacheDataModule(source(tmp_path), batch_size=4))
    assert trainer.profiler is before
    assert one.heard == other.heard
    assert {action for _, action in one.heard} == {WAIT, COMPUTE}
    steps = 2 * SAMPLES // 4
    assert one.heard.count(("start", WAIT)) == one.heard.count(("stop", WAIT)) >= steps
    assert one.heard.count(("stop", COMPUTE)) == steps
    if profiler is not None:
        assert len(trainer.profiler.recorded_durations[WAIT]) == one.heard.count(("stop", WAIT))


def test_a_profiler_with_ways_of_its_own_keeps_them(tmp_path):
    """Its own `profile` is used while it is overheard, its attributes are its own, and nothing tears it down early."""
    torn, profiled = [], []

    class Own(SimpleProfiler):
        def profile(self, action_name):
            profiled.append(action_name)
            return super().profile(action_name)

        def teardown(self, stage):
            torn.append(stage)
            super().teardown(stage)

    class Look(Callback):
        def on_train_batch_end(self, trainer, *_):
            assert trainer.profiler.dirpath == tmp_path
            assert torn == []

    notes, profiler = Notes(), Own(dirpath=tmp_path)
    trainer = make_trainer(tmp_path, [Listener(notes), Look()], epochs=1, profiler=profiler)
    trainer.fit(Model(), StocacheDataModule(source(tmp_path), batch_size=4))
    assert profiled.count("run_training_batch") == SAMPLES // 4 == notes.heard.count(("stop", "run_training_batch"))
    assert set(torn) == {"fit"}


def test_a_profiler_that_does_nothing_does_it_as_before():
    """As a context, with the action's name, and as a decorator."""
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    notes = Notes()
    listen(trainer, notes.contexts)
    with trainer.profiler.profile("mine") as name:
        assert name == "mine"
    assert trainer.profiler.profile("mine")(len)([1, 2]) == 2
    with pytest.raises(KeyError), trainer.profiler.profile("mine"):
        raise KeyError
    stop_listening(trainer, notes.contexts)
    assert notes.heard == []
    assert type(trainer.profiler) is PassThroughProfiler


def test_each_listener_is_told_until_it_stops():
    """Of two that hear the same action the first that stops is told no more, the other still is."""
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, profiler="simple")
    users, first, second = trainer.profiler, Notes(), Notes()
    for notes in (first, second):
        listen(trainer, notes.contexts)
    with trainer.profiler.profile(COMPUTE) as name:
        assert name == COMPUTE
    stop_listening(trainer, first.contexts)
    trainer.profiler.start(WAIT)
    trainer.profiler.stop(WAIT)
    stop_listening(trainer, second.contexts)
    both = [("start", COMPUTE), ("stop", COMPUTE)]
    assert (first.heard, second.heard) == (both, [*both, ("start", WAIT), ("stop", WAIT)])
    assert trainer.profiler is users
    assert [len(users.recorded_durations[action]) for action in (COMPUTE, WAIT)] == [1, 1]
