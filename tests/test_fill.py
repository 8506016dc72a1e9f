"""`stocache fill`: the caches of a job are filled before it, by processes that may be killed."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import Dataset

from lightning_stocache import StocacheDataModule, StochasticCache
from lightning_stocache.__main__ import main
from lightning_stocache.cache.contents import contents_of
from lightning_stocache.node.named import named_segments
from tests.jobs import ROOT, write_files
from tests.processes import wait_until
from tests.training.tiny import Data, Watcher, make_trainer

pytest.importorskip("xxhash")
pytestmark = pytest.mark.processes

SLOTS, AT_SETUP = 400, 64  # samples that are read at set-up, and by a look, of each set


class Logged(Dataset[Any]):
    """Numbers, and a file that grows by a byte with each read. One of them may be broken."""

    def __init__(self, log: str, length: int = SLOTS, broken: int = -1) -> None:
        self.log, self.length, self.broken = log, length, broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.broken:
            raise ValueError("no such file")
        with open(self.log, "ab") as file:
            file.write(b".")
        return torch.full((250,), float(index))


class Kept(StochasticCache):
    """A cache by another name."""


CONFIGS = {
    "beside_fill.py": f"from {__name__} import Kept, Logged\nfrom tests.training.tiny import Data\n",
    "conf/data/ours.yaml": (
        "defaults: [stocache, _self_]\nbatch_size: 8\ntrain: {_target_: beside_fill.Logged, log: '???'}\n"
        "val: {_target_: beside_fill.Logged, log: '${data.train.log}', length: 40}\n"
    ),
    "conf/data/plain.yaml": "_target_: beside_fill.Data\ntrain: {_target_: beside_fill.Logged, log: '???'}\n",
    "conf/data/loader.yaml": (
        "_target_: torch.utils.data.DataLoader\ndataset: {_target_: beside_fill.Logged, log: '${log}'}\nbatch_size: 8\n"
    ),
    "conf/callbacks/kept.yaml": (
        "other: {_target_: lightning.pytorch.callbacks.Timer, duration: never}\n"
        "mine: {_target_: beside_fill.Kept.from_options, cache: {name: '${cache.name}', dir: '${cache.dir}'}}\n"
    ),
    "conf/callbacks/cached.yaml": (
        "mine: {_target_: lightning_stocache.StochasticCache, name: '${cache.name}', dir: '${cache.dir}'}\n"
    ),
}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The command for a cache in a directory, of a name, and the log of the source's reads."""
    write_files(tmp_path, CONFIGS)
    (tmp_path / "disk").mkdir()
    (tmp_path / "log").write_bytes(b"")
    options = [f"data.train.log={tmp_path}/log", "cache.name=photos", f"cache.dir={tmp_path}/disk"]
    return ["fill", "--config-dir", f"{tmp_path}/conf", *options]


def filled(tmp_path: Path) -> int:
    """The samples of the training set that are stored."""
    found = named_segments(contents_of, str(tmp_path / "disk"))
    return sum(segment.contents.filled for segment in found if segment.name == "photos-train0")


def run(command: list[str], tmp_path: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "lightning_stocache", *command]
    return subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("data", "callbacks", "workers"), [("ours", "", "2"), ("plain", "cached", "0"), ("plain", "stochastic_cache", "0")]
)
def test_what_was_filled_and_killed_is_continued_and_hit(tmp_path, command, data, callbacks, workers):
    """By a StocacheDataModule, or a callback over the user's own: the training that follows loads nothing."""
    command += [f"data={data}", *([f"callbacks={callbacks}"] if callbacks else [])]
    first = run(command, tmp_path)
    wait_until(lambda: filled(tmp_path) > 40 or first.poll() is not None)
    first.kill()
    first.communicate()
    before = filled(tmp_path)
    assert before > 0
    second = run([*command, "--workers", workers], tmp_path)
    out, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    sizes = {"photos-train0": SLOTS} | ({"photos-val0": 40} if data == "ours" else {})
    assert [line.partition(",")[0] for line in out.splitlines()] == [
        f"{name}: {size} of {size} samples" for name, size in sizes.items()
    ]
    assert "photos-train0: 100%" in err
    loaded = (tmp_path / "log").stat().st_size
    assert loaded <= sum(sizes.values()) + 4 * AT_SETUP
    options = {"name": "photos", "dir": str(tmp_path / "disk")}
    train, val = Logged(f"{tmp_path}/log"), Logged(f"{tmp_path}/log", 40)
    dm = StocacheDataModule(train, val, **options) if data == "ours" else Data(train)
    rates = []
    noting = LambdaCallback(
        on_train_epoch_end=lambda trainer, _: rates.append(float(trainer.callback_metrics["stocache/hit_rate"]))
    )
    callbacks = [noting] if data == "ours" else [StochasticCache(**options), noting]
    make_trainer(tmp_path, callbacks, epochs=2, logger=False).fit(Watcher(), dm)
    assert rates == [1, 1]
    assert (tmp_path / "log").stat().st_size - loaded <= 2 * AT_SETUP


@pytest.mark.parametrize("callback", ["cached", "kept"])
def test_a_loader_alone_is_filled_by_the_callback_of_the_config(tmp_path, command, capsys, monkeypatch, callback):
    """There need be no DataModule, and no validation. Callbacks of other classes are not created."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    given = [word for word in command if not word.startswith("data.")]
    main([*given, "data=loader", f"callbacks={callback}", f"+log={tmp_path}/log"])
    logging.disable(logging.NOTSET)
    assert "photos-train0: 400 of 400 samples" in capsys.readouterr().out
    sys.modules.pop("beside_fill", None)


def test_a_sample_that_cannot_be_loaded_is_counted(tmp_path, command, capsys, monkeypatch):
    """All others are stored, and the exit code says that the cache is not whole."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        main([*command, "data=ours", "+data.train.broken=300"])
    logging.disable(logging.NOTSET)
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert "photos-train0: 399 of 400 samples" in out
    assert "1 could not be loaded or stored" in out
    sys.modules.pop("beside_fill", None)


def test_without_a_budget_nothing_is_filled(command, capsys, monkeypatch):
    """A budget of 0 is named as the reason; no warning has said so."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit):
        main([*command, "data=ours", "cache.budget=0"])
    logging.disable(logging.NOTSET)
    assert "budget=0 caches nothing" in capsys.readouterr().err
    sys.modules.pop("beside_fill", None)
