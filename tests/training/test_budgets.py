"""How the loaders of a call divide the memory, and what is left of it for the training."""

import json
import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Reserve
from lightning_stocache.setup import allocation
from lightning_stocache.training.call_loaders import training_bytes
from tests.cgroups import Outcome, run_limited
from tests.sources import Made
from tests.training.tiny import (
    DOORS,
    SAMPLES,
    SLOT,
    Data,
    Looking,
    Model,
    behind,
    fit,
    make_trainer,
    plain_loader,
    said,
    source,
)

MIB = 2**20

# ---- stages ----


@pytest.mark.processes
@pytest.mark.parametrize(
    ("door", "options", "sanity", "slots"),
    [
        ("callback", {"budget": 48 * SLOT}, 2, [24, 8]),
        ("cache_datamodule", {"budget": 16 * SLOT}, 2, [8, 8]),
        ("callback", {"budget": 8 * SLOT}, 2, [4, 4]),
        ("cache_datamodule", {"budget": 26 * SLOT}, 0, [24, 2]),
        ("loaders", {"budget": 16 * SLOT}, 0, [12, 4]),
        ("loaders", {"budget": 16 * SLOT}, 2, [12, 4]),
        ("ours", {"budget": 16 * SLOT}, 2, [12, 4]),
        ("ours", {"budget": "50%", "stage_budgets": {"val": 0}}, 0, [12, 0]),
    ],
)
def test_stages_divide_the_budget(tmp_path, door, options, sanity, slots):
    """Of hooks, val takes at most half before train, and train the rest; without a sanity check train goes first.
    Loaders that are given to `fit`, and the sets of StocacheDataModule, divide a budget in bytes by their sizes. A
    stage with a separate budget uses that."""
    train, val, looking = source(tmp_path), source(tmp_path, "val", 8), Looking()
    callbacks, dm = behind("callback" if door == "loaders" else door, Data(train, val), **options)
    given = (plain_loader(train), plain_loader(val)) if door == "loaders" else (dm,)
    trainer = make_trainer(tmp_path, [*callbacks, looking], num_sanity_val_steps=sanity, logger=False)
    trainer.fit(Model(), *given)
    assert [*looking.slots["train"], *looking.slots["val"]] == slots


@pytest.mark.processes
def test_where_nothing_is_left_for_val_a_warning_says_how_to_keep_it(tmp_path, caplog):
    """If train has taken the budget, a later val set passes through, counted, with one warning for all reloads."""
    train, val = source(tmp_path), source(tmp_path, "val", 8)
    loaders = {"train": lambda: plain_loader(train), "val": lambda: plain_loader(val)}
    options = {"num_sanity_val_steps": 0, "epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    budget = {"budget": SAMPLES * SLOT}
    _, _, looking = fit("callback", tmp_path, loaders, cache=budget, **options)
    assert looking.slots == {"train": [SAMPLES], "val": [0]}
    [warning] = said(caplog, "passes through uncached")
    assert re.search(r"val loader: CountedSource .*stage_budgets={'val': ...}", warning)
    budget["stage_budgets"] = {"val": 8 * SLOT}
    _, _, looking = fit("cache_datamodule", tmp_path, loaders, cache=budget, **options)
    assert looking.slots == {"train": [SAMPLES], "val": [8]}


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
def test_scarce_memory_is_kept_for_train_and_promised_once(tmp_path, monkeypatch):
    """With "auto" a val set that opens first takes at most half of the free memory. Memory that was granted to it,
    filled or not, is not granted again."""
    free = FreeMemory(filesystem=None, available=800 * MIB, cgroup=None, directory=None)
    monkeypatch.setattr(FreeMemory, "measure", lambda *_: free)
    train, val = (Made(lambda _: torch.zeros(MIB, dtype=torch.uint8), length) for length in (800, 400))
    loaders = {"train": lambda: plain_loader(train, batch_size=1), "val": lambda: plain_loader(val, batch_size=1)}
    sanity_check = {"num_sanity_val_steps": 1, "limit_train_batches": 1, "check_val_every_n_epoch": 2}
    _, _, looking = fit("callback", tmp_path, loaders, **sanity_check)
    [train_slots], [val_slots] = looking.slots["train"], looking.slots["val"]
    assert 300 < val_slots <= 400 - 64  # a margin of 64 MiB is left
    assert train_slots > 380
    assert train_slots + val_slots <= 800 - 64


# ---- the training itself ----

JOB = Path(__file__).with_name("limited_job.py")
LIMITS = (500, 600, 700, 850, 1000, 1200, 1600, 2400, 4096)
PARAMETER_BYTES = 4 * (192 * 10 + 10)


def fit_within(limit: int, budget: int | str, num_workers: int, door: str = "callback", fits: bool = False) -> Outcome:
    """Two epochs over a dataset that is larger than the free part of the limit, or that fits into a sixth of it."""
    samples = limit if fits else max((limit - 400) * 7, 500)  # of 147 KiB
    told = {"door": door, "budget": budget, "num_workers": num_workers, "samples": samples}
    done = run_limited([sys.executable, str(JOB), json.dumps(told)], limit * MIB, timeout=1500)
    words = done.out.strip().splitlines()[-1:]
    print(f"\n{limit} MiB {told}: {'killed' if done.killed else 'lives'}, peak {done.peak // MIB} MiB", *words)
    return done


@cache
def lives_without(limit: int, num_workers: int) -> bool:
    done = fit_within(limit, 0, num_workers)
    return not done.killed and done.code == 0


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fits", [False, True], ids=["larger", "fits"])
@pytest.mark.parametrize("door", ["callback", "datamodule"])
@pytest.mark.parametrize("num_workers", [0, 2, 4])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_cache_gets_no_training_killed(limit: int, num_workers: int, door: str, fits: bool) -> None:
    """A fit in a cgroup is killed only if it is killed without a cache, too; -s shows bytes and hit rates."""
    done = fit_within(limit, "auto", num_workers, door, fits)
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
    make_trainer(tmp_path, callbacks, limit_train_batches=1, logger=False).fit(Model(), data)
    assert {reserve.private for reserve in asked} == {7 * PARAMETER_BYTES}


def test_what_a_training_takes_of_this_memory():
    """Only trained parameters count, on the CPU, in a fit; lazy parameters have no size yet."""

    def taken(device: str = "cpu", fn: str = "fit") -> int:
        strategy = SimpleNamespace(root_device=torch.device(device))
        return training_bytes(SimpleNamespace(strategy=strategy, lightning_module=model, state=SimpleNamespace(fn=fn)))

    model = Model()
    assert taken() == 7 * PARAMETER_BYTES
    assert taken("meta") == taken(fn="validate") == training_bytes(None) == 0
    model.layer.weight.requires_grad_(False)
    assert taken() == 7 * 40
    model.layer = torch.nn.LazyLinear(10)
    assert taken() == 0
