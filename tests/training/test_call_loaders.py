"""What a call knows of the Trainer and of the other ranks when it caches loaders."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_stocache.loading.loader_tree import loaders_in
from lightning_stocache.training import lightning_internals
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.call_loaders import CallLoaders
from lightning_stocache.training.options import CacheOptions
from lightning_stocache.training.sampling import replicas
from tests.logs import Log
from tests.ranks import run_ranks
from tests.training.tiny import cached_datasets, make_trainer

NUMBERS = [torch.tensor(number) for number in range(12)]


def test_a_trainer_that_leaves_samplers_alone_divides_nothing(tmp_path):
    """With use_distributed_sampler=False each rank has its own loader; the package's own sampler still deals."""
    for leaves_alone, own in ((False, 4), (True, 1)):
        trainer = make_trainer(
            tmp_path, devices=2, num_nodes=2, strategy="ddp", use_distributed_sampler=not leaves_alone
        )
        assert replicas(trainer) == (own, 0)
        assert replicas(trainer, always=True) == (4, 0)


@pytest.mark.processes  # set-up reads samples in a process of its own
def test_lightning_shuffles_what_it_deals_out_for_training():
    """Lightning gives a training loader a DistributedSampler that shuffles, whatever its order was; so does a door."""
    arguments = {"num_replicas": 2, "rank": 0}
    trainer = SimpleNamespace(distributed_sampler_kwargs=arguments, overfit_batches=0, state=SimpleNamespace(fn=None))
    trainer.lightning_module, trainer.callbacks = None, []
    caches = CallCaches(CacheOptions(budget="1MiB"))
    loaders = {"train": lambda: DataLoader(NUMBERS, batch_size=3)}
    try:
        assert CallLoaders(caches, loaders, trainer)("train").sampler.shuffle is True
    finally:
        caches.close()


def different(rank: int) -> tuple[list[list[bool]], list[str]]:
    """Which loaders are cached on this rank if the ranks have different loaders, and the log lines of this rank."""
    log, caches = Log(), CallCaches(CacheOptions())
    given: dict[str, Any] = {
        "train": lambda: [DataLoader(NUMBERS), DataLoader(NUMBERS[: 5 + rank]), DataLoader(NUMBERS[: 2 - 2 * rank])],
        "val": lambda: [DataLoader(NUMBERS)] * (1 + rank),
    }
    call_loaders = CallLoaders(caches, given)
    try:
        return [
            [bool(cached_datasets(loader)) for loader in loaders_in(call_loaders(stage))] for stage in given
        ], log.lines
    finally:
        caches.close()


@pytest.mark.processes
def test_ranks_agree_on_each_loader():
    """On all ranks a loader passes through if its length differs between ranks, if it is empty on one rank, or if a
    rank lacks it. The other loaders are cached, and only rank 0 warns."""
    (first, said), (second, silence) = run_ranks(different, 2)
    assert first == [[True, False, False], [False]]
    assert second == [[True, False, False], [False, False]]
    warnings = [line for line in said if "passes through" in line]
    assert [line.split(" loader")[0] for line in warnings] == ["train", "train", "val"]
    assert "[5, 6]" in warnings[0]
    assert "it is empty" in warnings[1]
    assert not [line for line in silence if "passes through" in line]


def test_without_private_names_of_lightning_a_feature_is_off(caplog):
    """Without the setting of samplers the default is assumed, and without data sources StochasticCache caches nothing,
    each with one warning."""
    importlib.reload(lightning_internals)  # each warning comes once in a process
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=SimpleNamespace()))
    loops = {f"{name}_loop": loop for name in ("fit", "validate", "test", "predict")}
    known: dict[str, Any] = {"distributed_sampler_kwargs": {"num_replicas": 2, "rank": 1}, "enable_validation": True}

    def trainer_of(**connector: Any) -> Any:
        return SimpleNamespace(_accelerator_connector=SimpleNamespace(**connector), **known, **loops)

    assert lightning_internals.leaves_samplers_alone(trainer_of(use_distributed_sampler=False))
    assert replicas(trainer_of(use_distributed_sampler=False)) == (1, 0)
    assert replicas(trainer_of(use_distributed_sampler=True)) == (2, 1)
    assert replicas(trainer_of()) == replicas(trainer_of()) == (2, 1)
    assert caplog.text.count("use_distributed_sampler=False") == 1
    assert lightning_internals.data_sources(trainer_of(), "fit") == {}
    assert lightning_internals.data_sources(trainer_of(), "fit") == {}
    assert caplog.text.count("StochasticCache caches nothing") == 1
