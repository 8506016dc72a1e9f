"""In a cgroup, a fit that lives without a cache lives with one."""

import json
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule

from lightning_stocache import StocacheDataModule, StochasticCache, cache_datamodule
from lightning_stocache.node.grant import Reserve
from lightning_stocache.setup import allocation
from lightning_stocache.training.call_loaders import training_bytes
from tests.cgroups import Outcome, run_limited
from tests.training.tiny import Model, make_trainer, plain_loader, source

JOB = Path(__file__).with_name("limited_job.py")
MIB = 2**20
LIMITS = (500, 600, 700, 850, 1000, 1200, 1600, 2400, 4096)
PARAMETER_BYTES = 4 * (192 * 10 + 10)


def fit(limit: int, budget: int | str, num_workers: int, door: str = "callback", fits: bool = False) -> Outcome:
    """Two epochs over a dataset that is larger than what the limit leaves, or that fits into a sixth of it."""
    samples = limit if fits else max((limit - 400) * 7, 500)  # of 147 KiB
    told = {"door": door, "budget": budget, "num_workers": num_workers, "samples": samples}
    done = run_limited([sys.executable, str(JOB), json.dumps(told)], limit * MIB, timeout=1500)
    words = done.out.strip().splitlines()[-1:]
    print(f"\n{limit} MiB {told}: {'killed' if done.killed else 'lives'}, peak {done.peak // MIB} MiB", *words)
    return done


@cache
def lives_without(limit: int, num_workers: int) -> bool:
    done = fit(limit, 0, num_workers)
    return not done.killed and done.code == 0


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fits", [False, True], ids=["larger", "fits"])
@pytest.mark.parametrize("door", ["callback", "datamodule"])
@pytest.mark.parametrize("num_workers", [0, 2, 4])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_cache_gets_no_training_killed(limit: int, num_workers: int, door: str, fits: bool) -> None:
    """Killed only where the same training is killed without a cache; -s shows what was granted and hit."""
    done = fit(limit, "auto", num_workers, door, fits)
    if done.killed or done.code:
        assert not lives_without(limit, num_workers), done.error


@pytest.mark.processes
@pytest.mark.parametrize("door", ["callback", "datamodule", "hooks"])
def test_every_door_keeps_back_what_the_training_will_take(tmp_path, monkeypatch, door):
    """Gradients and Adam's state come after the caches have opened: seven times the parameters."""
    asked: list[Reserve] = []
    grant = allocation.grant

    def noted(budget: Any, size: int, free: Any, reserve: Reserve, ranks: int) -> Any:
        asked.append(reserve)
        return grant(budget, size, free, reserve, ranks)

    monkeypatch.setattr(allocation, "grant", noted)
    dataset, callbacks, data = source(tmp_path), list[Callback](), {}
    if door == "callback":
        callbacks, data = [StochasticCache("1MiB")], {"train_dataloaders": plain_loader(dataset)}
    elif door == "datamodule":
        data = {"datamodule": StocacheDataModule(train=dataset, batch_size=4, budget="1MiB")}
    else:
        data = {"datamodule": cache_datamodule(LightningDataModule.from_datasets(dataset), "1MiB")}
    make_trainer(tmp_path, callbacks).fit(Model(), **data)
    assert [reserve.private for reserve in asked] == [7 * PARAMETER_BYTES]


def trainer_of(module: LightningModule, device: str = "cpu", fn: str = "fit") -> Any:
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(strategy=strategy, lightning_module=module, state=SimpleNamespace(fn=fn))


def test_what_a_training_takes_of_this_memory():
    """Only for parameters that are trained, on the CPU, in a fit; lazy ones have no size yet."""
    model = Model()
    assert training_bytes(trainer_of(model)) == 7 * PARAMETER_BYTES
    assert training_bytes(trainer_of(model, "meta")) == 0
    assert training_bytes(trainer_of(model, fn="validate")) == 0
    assert training_bytes(None) == 0
    model.layer.weight.requires_grad_(False)
    assert training_bytes(trainer_of(model)) == 7 * 40
    model.layer = torch.nn.LazyLinear(10)
    assert training_bytes(trainer_of(model)) == 0
