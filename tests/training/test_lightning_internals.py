"""If a private name of Lightning is missing, a feature is off, with one warning, and training continues."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_stocache.training import lightning_internals
from lightning_stocache.training.lightning_internals import data_sources, leaves_samplers_alone
from lightning_stocache.training.sampling import replicas


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """Reload the module, because each warning comes once in a process."""
    importlib.reload(lightning_internals)


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


def test_a_trainer_that_leaves_samplers_alone_is_believed(caplog):
    """Without the setting the default is assumed, with one warning."""
    assert leaves_samplers_alone(trainer_of(use_distributed_sampler=False))
    assert replicas(trainer_of(use_distributed_sampler=False)) == (1, 0)
    assert replicas(trainer_of(use_distributed_sampler=True)) == (2, 1)
    assert replicas(trainer_of()) == replicas(trainer_of()) == (2, 1)
    assert caplog.text.count("use_distributed_sampler=False") == 1


def test_without_data_sources_nothing_is_cached(caplog):
    """StochasticCache caches nothing, and warns once."""
    assert data_sources(trainer_of(), "fit") == data_sources(trainer_of(), "fit") == {}
    assert caplog.text.count("StochasticCache caches nothing") == 1
