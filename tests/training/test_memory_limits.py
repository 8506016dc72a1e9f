"""A fit that survives in a cgroup without a cache survives with a cache, too."""

import json
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_stocache.node.grant import Reserve
from lightning_stocache.setup import allocation
from lightning_stocache.training.call_loaders import training_bytes
from tests.cgroups import Outcome, run_limited
from tests.training.tiny import DOORS, Data, Model, behind, make_trainer, source

JOB = Path(__file__).with_name("limited_job.py")
MIB = 2**20
LIMITS = (500, 600, 700, 850, 1000, 1200, 1600, 2400, 4096)
PARAMETER_BYTES = 4 * (192 * 10 + 10)


def fit(limit: int, budget: int | str, num_workers: int, door: str = "callback", fits: bool = False) -> Outcome:
    """Two epochs over a dataset that is larger than the free part of the limit, or that fits into a sixth of it."""
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
    """A fit is killed only if it is killed without a cache, too; -s shows granted bytes and hit rates."""
    done = fit(limit, "auto", num_workers, door, fits)
    if done.killed or done.code:
        assert not lives_without(limit, num_workers), done.error


@pytest.mark.processes
@pytest.mark.parametrize("door", DOORS)
def test_every_door_keeps_back_what_the_training_will_take(tmp_path, monkeypatch, door):
    """Gradients and Adam's state need memory after the caches have opened: seven times the parameters."""
    asked: list[Reserve] = []
    grant = allocation.grant

    def noted(budget: Any, size: int, free: Any, reserve: Reserve, ranks: int) -> Any:
        asked.append(reserve)
        return grant(budget, size, free, reserve, ranks)

    monkeypatch.setattr(allocation, "grant", noted)
    callbacks, data = behind(door, Data(source(tmp_path)), budget="1MiB")
    make_trainer(tmp_path, callbacks).fit(Model(), data)
    assert {reserve.private for reserve in asked} == {7 * PARAMETER_BYTES}


def trainer_of(module: LightningModule, device: str = "cpu", fn: str = "fit") -> Any:
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(strategy=strategy, lightning_module=module, state=SimpleNamespace(fn=fn))


def test_what_a_training_takes_of_this_memory():
    """Only trained parameters count, on the CPU, in a fit; lazy parameters have no size yet."""
    model = Model()
    assert training_bytes(trainer_of(model)) == 7 * PARAMETER_BYTES
    assert training_bytes(trainer_of(model, "meta")) == 0
    assert training_bytes(trainer_of(model, fn="validate")) == 0
    assert training_bytes(None) == 0
    model.layer.weight.requires_grad_(False)
    assert training_bytes(trainer_of(model)) == 7 * 40
    model.layer = torch.nn.LazyLinear(10)
    assert training_bytes(trainer_of(model)) == 0
