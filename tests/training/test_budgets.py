"""How the loaders of a call divide the memory, and what is left of it for the training."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Reserve
from lightning_stocache.setup import allocation
from tests.cgroups import run_limited
from tests.sources import Made
from tests.training.tiny import (
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
    _, _, looking = fit("callback", tmp_path, loaders, cache={"budget": SAMPLES * SLOT}, **options)
    assert looking.slots == {"train": [SAMPLES], "val": [0]}
    [warning] = said(caplog, "passes through uncached")
    assert re.search(r"val loader: CountedSource .*stage_budgets={'val': ...}", warning)


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


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fits", [False, True], ids=["larger", "fits"])
@pytest.mark.parametrize("door", ["callback", "datamodule"])
@pytest.mark.parametrize("num_workers", [0, 2, 4])
@pytest.mark.parametrize("limit", [500, 600, 700, 850, 1000, 1200, 1600, 2400, 4096])
def test_a_cache_gets_no_training_killed(limit, num_workers, door, fits):
    """A fit in a cgroup, over a dataset that fits into a sixth of its limit, or is larger than what is free there, is
    killed only if it is killed without a cache, too; -s shows bytes and hit rates."""

    def lives(budget: int | str) -> bool:
        samples = limit if fits else max((limit - 400) * 7, 500)  # of 147 KiB
        job = {"door": door, "budget": budget, "num_workers": num_workers, "samples": samples}
        command = [sys.executable, str(Path(__file__).with_name("limited_job.py")), json.dumps(job)]
        done = run_limited(command, limit * MIB, timeout=1500)
        print(f"\n{limit} MiB {job}: peak {done.peak // MIB} MiB", *done.out.strip().splitlines()[-1:], done.error)
        return not done.killed and done.code == 0

    assert lives("auto") or not lives(0)


@pytest.mark.processes
def test_every_door_keeps_back_what_the_training_will_take(tmp_path, monkeypatch, door):
    """In a fit gradients and Adam's state need memory after the caches have opened: seven times the parameters that
    are trained. Lazy parameters have no size yet."""
    asked: list[Reserve] = []
    grant = allocation.grant

    def noted(budget: Any, size: int, free: Any, reserve: Reserve, ranks: int) -> Any:
        asked.append(reserve)
        return grant(budget, size, free, reserve, ranks)

    monkeypatch.setattr(allocation, "grant", noted)
    model = Model()
    model.layer.weight.requires_grad_(False)
    model.lazy = torch.nn.LazyLinear(10)
    callbacks, data = behind(door, Data(source(tmp_path)), budget="1MiB")
    make_trainer(tmp_path, callbacks, limit_train_batches=1, logger=False).fit(model, data)
    assert {reserve.private for reserve in asked} == {7 * 4 * 10}
