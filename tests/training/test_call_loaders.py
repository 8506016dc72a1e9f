"""The loaders of a call: their samplers on several ranks, what ranks agree on, and how stages divide the memory."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_stocache.loading.loader_tree import loaders_in
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.call_loaders import CallLoaders
from lightning_stocache.training.options import CacheOptions
from lightning_stocache.training.sampling import replicas
from tests.logs import Log
from tests.ranks import run_ranks
from tests.sources import Made
from tests.training.tiny import cached_datasets, make_trainer

MIB = 2**20
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
    given: dict[str, Callable[[], Any]] = {
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


def large(index: int) -> torch.Tensor:
    """A sample of one MiB."""
    return torch.zeros(MIB, dtype=torch.uint8)


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
def test_scarce_memory_is_kept_for_train_and_promised_once(monkeypatch):
    """With "auto" a val set that opens first takes at most half of the free memory. Memory that was granted to it,
    filled or not, is not granted again."""
    free = FreeMemory(filesystem=None, available=800 * MIB, cgroup=None, directory=None)
    monkeypatch.setattr(FreeMemory, "measure", lambda *_: free)
    data = {"train": Made(large, 800), "val": Made(large, 400)}
    caches = CallCaches(CacheOptions())
    getters = {stage: lambda stage=stage: DataLoader(data[stage]) for stage in data}  # type: ignore[misc]
    trainer = MagicMock(
        state=SimpleNamespace(fn="fit"), callbacks=[], overfit_batches=0, reload_dataloaders_every_n_epochs=0
    )
    trainer.strategy.root_device.type = "cuda"  # so the model takes no memory of the node
    trainer.limit_val_batches, trainer.distributed_sampler_kwargs = 1.0, None
    trainer.fit_loop.epoch_progress.current.processed = 0
    call_loaders = CallLoaders(caches, getters, trainer)
    slots = [len(cached_datasets(call_loaders(stage))[0].cache or ()) for stage in ("val", "train")]
    caches.close()
    assert 300 < slots[0] <= 400 - 64  # a margin of 64 MiB is left
    assert slots[1] > 380
    assert sum(slots) <= 800 - 64
