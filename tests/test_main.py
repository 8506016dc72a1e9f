"""The command line: its imports, its output, and its errors for wrong input."""

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from tqdm import tqdm

from lightning_stocache import LMDBSource
from lightning_stocache.__main__ import COMMANDS, main
from lightning_stocache.cache.layout import READY
from lightning_stocache.insight import measurement
from lightning_stocache.node.files import Geometry, Manifest
from lightning_stocache.node.named import clean, named_segments, open_named
from tests.commands import refused, said, write_files
from tests.names import path_of
from tests.processes import Child, call, wait_until
from tests.training.tiny import Watcher

pytestmark = pytest.mark.named
tqdm.get_lock()  # made once per process, and not what a test leaves behind

CSV = "epoch,step,stocache/hit_rate,stocache/hits\n0,9,0.5,5\n"
PNG = b"\x89PNG\r\n"


@pytest.mark.processes
def test_help_lists_the_commands_and_imports_little(tmp_path):
    """`python -m lightning_stocache --help` names every command, and imports neither torch nor Lightning nor Hydra."""
    code = (
        "import runpy, sys\nsys.argv = ['command', '--help']\n"
        "try:\n    runpy.run_module('lightning_stocache', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'torch', 'lightning', 'hydra', 'numpy', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(command.__name__.rstrip("_") in done.stdout for command in COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_told(capsys):
    """--version and `__version__` are the version of the distribution."""
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"lightning-stocache {version('lightning-stocache')}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("report", "arguments are required"),
        ("no_such_command", "invalid choice"),
        ("", "arguments are required"),
        ("report {}/missing", "missing is no folder"),
        ("report {}", "holds no run"),
        ("report --png {}", "arguments are required"),
        ("plan --workers=two", "argument --workers: invalid"),
    ],
)
def test_bad_input_is_exit_code_2_and_a_sentence(tmp_path, capsys, arguments, words):
    """Missing and wrong arguments, unknown commands and folders without a run: stderr, code 2, no traceback."""
    assert words in refused(capsys, *arguments.format(tmp_path).split())


@pytest.mark.parametrize(
    ("chosen", "written"),
    [
        ("", ["report.html"]),
        ("--output page.html --png", ["page.html", "page.png"]),
        ("--png mine.png", ["report.html", "mine.png"]),
    ],
)
def test_a_report_is_written_where_it_is_told(tmp_path, monkeypatch, capsys, chosen, written):
    """A page in the working directory, and with --png a picture beside it or at a path; their paths are printed."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.csv").write_text(CSV)
    assert said(capsys, "report", ".", *chosen.split()).split() == written
    for name in written:
        start = PNG if name.endswith(".png") else b"<!DOCTYPE html>"
        assert (tmp_path / name).read_bytes().startswith(start)


def test_runs_that_are_left_out_are_told(tmp_path, capsys):
    """A run that cannot be read is named on stderr; the page of the others is written."""
    write_files(tmp_path, {"a/metrics.csv": CSV, "b/metrics.csv": ""})
    main(["report", str(tmp_path), "--output", str(tmp_path / "report.html")])
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'report.html'}\n"
    assert "left out" in err
    assert "holds no stocache/ value" in err


# ---- plan ----


class Squares(Dataset[Any]):
    """What configs name: pairs of numbers, one of which may be odd, from a source that may be broken or slow."""

    def __init__(self, length: int = 64, broken: bool = False, seconds: float = 0.0, odd: int = -1) -> None:
        self.length, self.broken, self.seconds, self.odd = length, broken, seconds, odd

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.broken:
            raise ValueError("no such file")
        time.sleep(self.seconds)
        return torch.full((8,), float(index)), {index} if index == self.odd else index % 2


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


def a_number() -> int:
    return 3


class Broken(Watcher):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise RuntimeError("no such layer")


CONFIGS = {
    "beside_configs.py": f"from {__name__} import Broken, Endless, Squares, Watcher, a_number\n",
    "conf/data/squares.yaml": (
        "defaults: [stocache, _self_]\nbatch_size: 4\n"
        "train: {_target_: beside_configs.Squares, length: 64, broken: false}\n"
    ),
    "conf/data/sources.yaml": (
        "_target_: lightning_stocache.StocacheDataModule\n"
        "train: {_target_: beside_configs.Squares, length: 20, seconds: 0.0, odd: -1}\n"
        "val: {_target_: beside_configs.Squares, _partial_: true, length: 5}\n"
        "test: {_target_: beside_configs.a_number}\n"
    ),
    "conf/data/endless.yaml": "defaults: [stocache, _self_]\ntrain: {_target_: beside_configs.Endless}\n",
    "conf/model/none.yaml": "nothing: 0\n",  # the primary config asks for one
    "conf/model/line.yaml": "_target_: beside_configs.Watcher\n",
    "conf/model/broken.yaml": "_target_: beside_configs.Broken\n",
    "conf/mine.yaml": (
        "hydra: {searchpath: ['pkg://lightning_stocache.configs']}\n"
        "defaults: [data: squares, _self_]\n"
        "trainer: {num_nodes: 2, accelerator: cpu}\n"
    ),
}
ON_CPU = "++trainer.accelerator=cpu"


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """A folder of configs with a module of their data and model beside it. What a command changes is put back."""
    threads = torch.get_num_threads()
    write_files(tmp_path, CONFIGS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Not three seconds for each measurement.
    monkeypatch.setattr(measurement, "measure", partial(measurement.measure, seconds=0.01))
    monkeypatch.setattr(measurement, "measure_curves", partial(measurement.measure_curves, seconds=0.2, limit=1e9))
    with warnings.catch_warnings():
        yield str(tmp_path / "conf")
    sys.modules.pop("beside_configs", None)
    logging.disable(logging.NOTSET)
    ours = logging.getLogger("lightning_stocache")
    ours.handlers = [handler for handler in ours.handlers if type(handler) is not logging.NullHandler]
    torch.set_num_threads(threads)


def test_plan_of_data_alone(configs, capsys, monkeypatch):
    """Without a model the table is about the loader, and the last line is for the config; nothing else is said. A key
    that begins as `model` does is no model."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a script: pytest's would take what is said
    out = said(capsys, "plan", "--config-dir", configs, "--threads", "3", "data=squares", ON_CPU, "+model_dir=x")
    assert "64 samples of 40 B, batches of 4" in out
    assert "threads=3\n" in out
    assert "no model was given" in out
    assert out.splitlines()[-1].startswith("cache.budget=")


def test_plan_with_a_model_curves_and_a_picture(configs, tmp_path, capsys):
    """Overrides may stand between options. The table has the step, loaders of other sizes have a table, and the picture
    is written."""
    png = tmp_path / "plan.png"
    sizes = "model=line --workers 0 --batch-sizes 2,8 data.num_workers=0"
    options = f"data=squares --threads 1 {sizes} --png {png} {ON_CPU} data.train.length=32"
    main(["plan", "--config-dir", configs, *options.split()])
    out, err = capsys.readouterr()
    assert "32 samples of 40 B" in out
    assert {"step", "0%", "25%", "50%", "75%", "100%"} <= {line.partition(" ")[0] for line in out.splitlines()}
    assert [line.split()[0] for line in out.splitlines() if line.count("+-") == 2] == ["2", "4", "8"]
    assert out.splitlines()[-1].startswith("cache.budget=")
    assert err.count("batches from the cache: ") == 9
    assert png.read_bytes().startswith(PNG)


def test_plan_with_a_primary_config_of_the_users(configs, capsys):
    """--config-name selects the user's primary config: its choices, its trainer, its two nodes."""
    out = said(capsys, "plan", "--config-dir", configs, "--config-name", "mine")
    assert "2 nodes x 1 rank" in out
    assert "no model was given" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--config-dir {} data=squares data.train.broken=true", "no such file"),
        ("--config-dir {} data=squares data.train.length=0", "at least one sample"),
        ("--config-dir {} data=endless", "map-style"),
        ("--config-dir {} data=squares model=broken", "no such layer"),
        ("--config-dir {} data=squares data.train._target_=no_such_module.Thing", "data.train: "),
        ("--config-dir {} data=no_such_data", "no_such_data"),
        ("--config-dir {}/missing data=squares", "--config-dir must be a folder"),
        ("--config-dir {} --config-name no_such_config", "no_such_config"),
        ("--config-name mine", "--config-dir"),
        ("--config-dir {} data=squares data.no_such_knob=1", "plan: Could not override 'data.no_such_knob'"),
        ("--config-dir {}", "train"),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_sentence(configs, capsys, arguments, words):
    """Data or a model that raises, data without samples or indices, and missing configs: one line, exit code 2."""
    err = refused(capsys, "plan", *arguments.format(configs).split(), ON_CPU)
    assert words in err
    assert err.count("\n") == 1
    assert not any(foreign in err for foreign in ("full_key", "Exception", "provider=", "object_type"))


# ---- list and clean ----

CREATED = 1_700_000_000


@pytest.fixture
def named(tmp_path):
    """The caches of a job with a name: of training, which nobody uses, and of validation, in use."""
    name = f"test-main-{tmp_path.name[-20:]}".replace("_", "-")
    for part, dataset in (("-train0", "Photos (3 samples, train)"), ("-val0", "Photos (4 samples, val)")):
        segment, _ = open_named(name + part, 4096, Manifest(Geometry(3, 3), dataset, created=CREATED))
        segment.store(0, memoryview(bytes([READY, READY])))
        if part == "-train0":
            segment.close()
    yield name
    segment.close()
    for found in names_of(name):
        clean(found)


def names_of(name: str) -> list[str]:
    """The caches of a job that there are."""
    return [found.name for found in named_segments() if found.name.startswith(name)]


def test_list_tells_each_job_for_people(named, capsys):
    """A heading per job, and per cache its dataset, how much is filled, its size, since when, and who uses it."""
    out = said(capsys, "list")
    assert max(map(len, out.splitlines())) <= 80
    since = f"8 KiB, since {datetime.fromtimestamp(CREATED):%Y-%m-%d %H:%M}"
    filled = "2 of 3 slots filled"
    told = (
        f"{named}: 2 caches (16 KiB) {named}-train0: Photos (3 samples, train), {filled}, {since}, used by nobody "
        f"{named}-val0: Photos (4 samples, val), {filled}, {since}, used by {os.getpid()} ("
    )
    assert told in " ".join(out.split())
    assert "unused: " in out
    assert " ".join(out.split()).endswith("removes unused caches")


def test_list_says_that_there_are_none(monkeypatch, capsys):
    """An empty machine is a sentence."""
    monkeypatch.setattr("lightning_stocache.node.named.memory_directory", lambda: "/no/such/folder")
    assert said(capsys, "list") == "there are no named caches in this machine's memory\n"


def test_clean_takes_the_name_that_the_job_was_given(named, capsys):
    """All its caches that nobody uses are shown and removed together; the one in use stays, and is said to."""
    lines = said(capsys, "clean", named, "--yes").splitlines()
    assert lines[0].startswith(f"{named}-train0: Photos (3 samples, train)")
    assert [line for line in lines if line.startswith(f"stays, {named}-val0: ")]
    assert lines[-1] == "removed 1 cache (8 KiB)"
    assert names_of(named) == [f"{named}-val0"]


def test_clean_refuses_in_a_sentence(named, capsys):
    """What is in use, what does not exist, and what is no segment stay; code 2."""
    notes = path_of(f"{named}-notes.txt")
    notes.write_text("what I must not forget")
    assert "is in use" in refused(capsys, "clean", f"{named}-val0")
    for name in (f"{named}-none", "../x", f"{named}-notes.txt"):
        assert "does not exist" in refused(capsys, "clean", name)
    notes.unlink()


@pytest.mark.parametrize("answer", ["n\n", "", "y\n"])
def test_clean_asks(named, capsys, monkeypatch, answer):
    """Nothing is removed without a yes. A script that says nothing has not said yes."""
    left = answer != "y\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert left == ("nothing removed; --yes removes without asking" in said(capsys, "clean", named))
    assert (f"{named}-train0" in names_of(named)) is left


# ---- pack ----


@pytest.mark.parametrize(("chosen", "length"), [("", 20), ("--source data.train", 20), ("--source data.val", 5)])
def test_a_source_of_a_config_is_packed(tmp_path, configs, capsys, chosen, length):
    """The training set of a DataModule, or any dataset of the config, or a function that makes one."""
    path = tmp_path / "x.lmdb"
    command = ["pack", str(path), "data=sources", "--config-dir", configs, *chosen.split()]
    assert f"{length} samples, {length} of them now" in said(capsys, *command)
    source = LMDBSource(path)
    assert len(source) == length
    assert source[3][0].tolist() == [3.0] * 8
    assert f"{length} samples, 0 of them now" in said(capsys, *command)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--source data.nope", "the config has no `data.nope`"),
        ("--source data.test", "a dataset, or a LightningDataModule, can be packed, got int"),
        ("data.train.odd=3", "sample 3 of Squares: sample[1] is a set, which cannot be packed"),
        ("--encoded", "the files of Squares are not known"),
        ("data.train.length=0", "source must have at least one sample"),
        ("data.nope=3", "nope"),
        ("", "is not overwritten"),
    ],
)
def test_what_cannot_be_packed_is_exit_code_2_and_a_sentence(tmp_path, configs, capsys, arguments, words):
    """No traceback; a file that is there stays."""
    path = tmp_path / "x.lmdb"
    if not arguments:
        path.write_text("precious" * 1000)
    assert words in refused(capsys, "pack", str(path), "data=sources", "--config-dir", configs, *arguments.split())
    assert arguments or path.read_text() == "precious" * 1000


def packing(arguments: list[str], printed: Path) -> Any:
    """The exit code of the command in this process; what it prints is in the file."""
    with open(printed, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            main(["pack", *arguments])
        except SystemExit as end:
            return end.code
    return 0


@pytest.mark.processes
@pytest.mark.usefixtures("interruptible")
def test_a_pack_is_stopped_and_goes_on(tmp_path, configs):
    """By Ctrl-C, with exit code 130; then the same command, with workers, loads the rest."""
    path, printed = tmp_path / "x.lmdb", tmp_path / "printed"
    arguments = [str(path), "data=sources", "data.train.length=40", "--config-dir", configs]
    child = Child(packing, [*arguments, "data.train.seconds=0.2"], printed)
    wait_until(lambda: path.exists() and path.stat().st_size > 8192)
    os.kill(child.process.pid or 0, signal.SIGINT)
    assert child.result() == 130, printed.read_text()
    assert "stopped; the same command continues from here" in printed.read_text()
    assert call(packing, [*arguments, "--workers", "2"], printed) == 0
    assert "40 samples, " in printed.read_text()
    assert "40 samples, 40 of them now" not in printed.read_text()
    assert [float(square[0]) for square, _ in LMDBSource(path)] == list(range(40))
