"""What is private of Lightning's may go away: then something is left out, with one warning, and training goes on."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_stocache import StochasticCache
from lightning_stocache.training import lightning_internals, monitor
from lightning_stocache.training.lightning_internals import data_sources, leaves_samplers_alone
from lightning_stocache.training.sampling import replicas
from tests.training.tiny import Model, make_trainer, plain_loader, source


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """Each warning is said once in a process."""
    importlib.reload(lightning_internals)


@pytest.mark.processes
def test_actions_of_other_names_leave_the_seconds_out(tmp_path, monkeypatch, recwarn):
    """Neither waits of zero, nor a summary that says that training hardly waited."""
    monkeypatch.setattr(monitor, "stall_actions", lambda stall: {"another name": stall.waiting})
    cache = StochasticCache()
    trainer = make_trainer(tmp_path, [cache], epochs=2)
    trainer.fit(Model(), plain_loader(source(tmp_path)))
    assert trainer.callback_metrics["stocache/hit_rate"] == 1
    assert not [name for name in trainer.callback_metrics if "seconds" in name and ("wait" in name or "comp" in name)]
    told = [str(warning.message) for warning in recwarn if "data_wait_seconds" in str(warning.message)]
    assert len(told) == 1


def trainer_of(**connector: Any) -> Any:
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=SimpleNamespace()))
    return SimpleNamespace(
        _accelerator_connector=SimpleNamespace(**connector),
        distributed_sampler_kwargs={"num_replicas": 2, "rank": 1},
        enable_validation=True,
        fit_loop=loop,
        validate_loop=loop,
        test_loop=loop,
        predict_loop=loop,
    )


def test_a_trainer_that_leaves_samplers_alone_is_believed():
    """And one that does not say is taken to be as by default, once with a warning."""
    assert leaves_samplers_alone(trainer_of(use_distributed_sampler=False))
    assert replicas(trainer_of(use_distributed_sampler=False)) == (1, 0)
    assert replicas(trainer_of(use_distributed_sampler=True)) == (2, 1)
    with pytest.warns(UserWarning, match="use_distributed_sampler=False") as told:
        assert replicas(trainer_of()) == replicas(trainer_of()) == (2, 1)
    assert len(told) == 1


def test_without_data_sources_nothing_is_cached():
    """StochasticCache stands in front of nothing, and says so once."""
    with pytest.warns(UserWarning, match="StochasticCache caches nothing") as told:
        assert data_sources(trainer_of(), "fit") == data_sources(trainer_of(), "fit") == {}
    assert len(told) == 1
