"""`python -m lightning_stocache pack`: a source of a Hydra config into an LMDB, and what it says of bad input."""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  sets an environment variable when it is first imported
import pytest
from tqdm import tqdm

from lightning_stocache import LMDBSource
from lightning_stocache.__main__ import main
from tests.commands import refused, write_files
from tests.processes import Child, call, wait_until

pytest.importorskip("lmdb")
tqdm.get_lock()  # made once per process, and not what a test leaves behind

DATA = """
import time
import torch
from torch.utils.data import Dataset


class Squares(Dataset):
    def __init__(self, length=20, seconds=0.0, odd=-1):
        self.length, self.seconds, self.odd = length, seconds, odd

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((8,), float(index)), {index} if index == self.odd else index


def a_number():
    return 3
"""
CONFIGS = {
    "squares_for_pack.py": DATA,
    "conf/data/squares.yaml": (
        "_target_: lightning_stocache.StocacheDataModule\nbatch_size: 4\n"
        "train: {_target_: squares_for_pack.Squares, length: 20, seconds: 0.0, odd: -1}\n"
        "val: {_target_: squares_for_pack.Squares, _partial_: true, length: 5}\n"
        "test: {_target_: squares_for_pack.a_number}\n"
    ),
    "conf/model/none.yaml": "nothing: 0\n",  # the primary config asks for one
}


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(tmp_path, CONFIGS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "conf"


def pack(*arguments: Any) -> None:
    main(["pack", *map(str, arguments)])


@pytest.mark.parametrize(
    ("chosen", "length"), [([], 20), (["--source", "data.train"], 20), (["--source", "data.val"], 5)]
)
def test_a_source_of_a_config_is_packed(
    tmp_path: Path, configs: Path, capsys: pytest.CaptureFixture[str], chosen: list[str], length: int
) -> None:
    """The training set of a DataModule, or any dataset of the config, or a function that makes one."""
    path = tmp_path / "x.lmdb"
    pack(path, "data=squares", "--config-dir", configs, *chosen)
    assert f"{length} samples, {length} of them now" in capsys.readouterr().out
    source = LMDBSource(path)
    assert len(source) == length
    assert source[3][0].tolist() == [3.0] * 8
    pack(path, "data=squares", "--config-dir", configs, *chosen)
    assert f"{length} samples, 0 of them now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--source", "data.nope"], "the config has no `data.nope`"),
        (["--source", "data.test"], "a dataset, or a LightningDataModule, can be packed, got int"),
        (["data.train.odd=3"], "sample 3 of Squares: sample[1] is a set, which cannot be packed"),
        (["--encoded"], "the files of Squares are not known"),
        (["data.train.length=0"], "source must have at least one sample"),
        (["data.nope=3"], "nope"),
        ([], "is not overwritten"),
    ],
)
def test_bad_input_is_exit_code_2_and_a_sentence(
    tmp_path: Path, configs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """No traceback; a file that is there stays."""
    path = tmp_path / "x.lmdb"
    if words == "is not overwritten":
        path.write_text("precious" * 1000)
    assert words in refused(capsys, "pack", str(path), "data=squares", "--config-dir", str(configs), *arguments)
    assert words != "is not overwritten" or path.read_text() == "precious" * 1000


def packing(arguments: list[str], said: Path) -> Any:
    """The exit code of the command in this process; what it prints is in the file."""
    with open(said, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            pack(*arguments)
        except SystemExit as end:
            return end.code
    return 0


@pytest.mark.processes
@pytest.mark.usefixtures("interruptible")
def test_it_is_stopped_and_goes_on(tmp_path: Path, configs: Path) -> None:
    """By Ctrl-C, with exit code 130; then the same command, with workers, loads the rest."""
    path, said = tmp_path / "x.lmdb", tmp_path / "said"
    arguments = [str(path), "data=squares", "data.train.length=40", "--config-dir", str(configs)]
    child = Child(packing, [*arguments, "data.train.seconds=0.2"], said)
    wait_until(lambda: path.exists() and path.stat().st_size > 8192)
    os.kill(child.process.pid or 0, signal.SIGINT)
    assert child.result() == 130, said.read_text()
    assert "stopped; the same command continues from here" in said.read_text()
    assert call(packing, [*arguments, "--workers", "2"], said) == 0
    assert "40 samples, " in said.read_text()
    assert "40 samples, 40 of them now" not in said.read_text()
    assert [sample[1] for sample in LMDBSource(path)] == list(range(40))
