"""The command line: its imports, its output, and its errors for wrong input."""

import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import warnings
from datetime import datetime
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_stocache import LMDBSource
from lightning_stocache.__main__ import COMMANDS, main
from lightning_stocache.cache.seats import READY
from lightning_stocache.insight import measurement
from lightning_stocache.node.files import Geometry, Manifest
from lightning_stocache.node.named import clean, named_segments, open_named
from tests.jobs import refused, said, write_files
from tests.processes import path_of

pytestmark = pytest.mark.named

CSV = "epoch,step,stocache/hit_rate,stocache/hits\n0,9,0.5,5\n"
PNG = b"\x89PNG\r\n"


@pytest.mark.processes
def test_help_and_version_import_little(tmp_path):
    """They name every command and the distribution's version, without torch, Lightning, Hydra or NumPy."""
    code = (
        "import lightning_stocache.configs, runpy, sys\n"
        "for word in ('--version', '--help'):\n    sys.argv = ['command', word]\n"
        "    try:\n        runpy.run_module('lightning_stocache', run_name='__main__')\n"
        "    except SystemExit as end:\n        assert end.code == 0\n"
        "print(sorted({'torch', 'lightning', 'hydra', 'numpy', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in COMMANDS)
    assert done.stdout.startswith(f"lightning-stocache {version('lightning-stocache')}\n")
    assert done.stdout.splitlines()[-1] == "[]"


class Squares(Dataset[Any]):
    """What configs name: pairs of numbers, one of which may be odd, from a source that may be broken or interrupted."""

    def __init__(self, length: int = 64, broken: bool = False, stops: int = -1, odd: int = -1) -> None:
        self.length, self.broken, self.stops, self.odd = length, broken, stops, odd

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.broken:
            raise ValueError("no such file")
        if index == self.stops:
            signal.raise_signal(signal.SIGINT)
        return torch.full((8,), float(index)), {index} if index == self.odd else index % 2


CONFIGS = {
    "beside_configs.py": f"from {__name__} import Squares\nfrom tests.training.tiny import Watcher\n",
    "conf/data/squares.yaml": (
        "defaults: [stocache, _self_]\nbatch_size: 4\n"
        "train: {_target_: beside_configs.Squares, length: 64, broken: false}\n"
    ),
    "conf/data/sources.yaml": (
        "_target_: lightning_stocache.StocacheDataModule\n"
        "train: {_target_: beside_configs.Squares, length: 20, stops: -1, odd: -1}\n"
        "val: {_target_: beside_configs.Squares, _partial_: true, length: 5}\n"
        "test: {_target_: builtins.int}\n"
    ),
    "conf/data/loader.yaml": (
        "_target_: torch.utils.data.DataLoader\ndataset: {_target_: beside_configs.Squares}\nbatch_size: 4\n"
    ),
    "conf/model/line.yaml": "_target_: beside_configs.Watcher\n",
    "conf/mine.yaml": (
        "hydra: {searchpath: ['pkg://lightning_stocache.configs']}\n"
        "defaults: [data: squares, _self_]\ntrainer: {num_nodes: 2, accelerator: cpu}\n"
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "arguments are required"),
        ("report", "arguments are required"),
        ("report {0}/missing", "missing is no folder"),
        ("report {0}", "holds no run"),
        ("plan --workers=two", "argument --workers: invalid"),
        ("plan --workers=-1", "argument --workers: must be whole numbers from 0 on, got '-1'"),
        ("plan --batch-sizes=0", "argument --batch-sizes: must be whole numbers from 1 on, got '0'"),
        ("plan", "name your data: data=NAME --config-dir FOLDER"),
        ("plan --config-name mine", "--config-dir"),
        ("plan --config-dir {0}/missing data=squares", "--config-dir must be a folder"),
        ("{plan}", "name your data"),
        ("{plan} data=no_such_data", "no_such_data"),
        ("{plan} data=squares data.no_such_knob=1", "plan: Could not override 'data.no_such_knob'"),
        ("{plan} data=squares data.train._target_=no_such_module.Thing", "data.train: "),
        ("{plan} data=squares data.train.broken=true", "no such file"),
        ("{plan} data=squares data.train.length=0", "plan: source must have at least one sample"),
        ("{plan} data=squares model=line +model.broken=1", "unexpected keyword argument 'broken'"),
        ("{pack} --source data.nope", "the config has no `data.nope`"),
        ("{pack} --source data.test", "a dataset, or a LightningDataModule, can be packed, got int"),
        ("{pack} data.train.odd=3", "sample 3 of Squares: sample[1] is a set, which cannot be packed"),
        ("{pack} --encoded", "the files of Squares are not known"),
        ("{pack} data.train.length=0", "source must have at least one sample"),
        ("pack {0}/conf/mine.yaml data=sources --config-dir {0}/conf", "is not overwritten"),
        ("clean x-none", "does not exist"),
        ("list --dir {0}/missing", "is not a directory"),
        ("{fill} data=sources", "only a cache with a name outlives this command: cache.name=photos"),
        ("{fill} data=loader", "the config caches nothing"),
    ],
)
def test_bad_input_is_exit_code_2_and_a_sentence(configs, tmp_path, capsys, arguments, words):
    """On stderr, without a traceback or words of Hydra's; a file that is there stays."""
    plan = f"plan --config-dir {configs} {ON_CPU}"
    pack = f"pack {tmp_path}/x.lmdb data=sources --config-dir {configs}"
    fill = f"fill --config-dir {configs}"
    err = refused(capsys, *arguments.format(tmp_path, plan=plan, pack=pack, fill=fill).split())
    assert words in err
    assert err.count("\n") == 1 or err.startswith("usage: ")
    assert not any(foreign in err for foreign in ("full_key", "Exception", "provider=", "object_type"))
    assert (tmp_path / "conf" / "mine.yaml").read_text() == CONFIGS["conf/mine.yaml"]


def test_a_report_is_written_where_it_is_told(tmp_path, monkeypatch, capsys):
    """Its path is printed; a run that cannot be read is named on stderr."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, {"a/metrics.csv": CSV, "b/metrics.csv": ""})
    for options, written in (([], "report.html"), (["--output", "page.html"], "page.html")):
        main(["report", ".", *options])
        out, err = capsys.readouterr()
        assert out.split() == [written]
        assert "left out" in err
        assert "holds no stocache/ value" in err
        assert (tmp_path / written).read_bytes().startswith(b"<!DOCTYPE html>")


# ---- plan ----


def test_plan_of_data_alone(configs, capsys, monkeypatch):
    """The table is about the loader; nothing else is said. `model_dir` is no model; --config-name selects a config."""
    shutil.rmtree(f"{configs}/model")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a script: pytest's would take what is said
    out = said(capsys, "plan", "--config-dir", configs, "--threads", "3", "data=squares", ON_CPU, "+model_dir=x")
    assert "64 samples of 40 B, batches of 4" in out
    assert "threads=3\n" in out
    assert "no model was given" in out
    assert out.splitlines()[-1].startswith("cache.budget=")
    out = said(capsys, "plan", "--config-dir", configs, "--config-name", "mine")
    assert out.splitlines()[-1].startswith("+cache.budget=")  # such a config has no group of this name
    assert "2 nodes x 1 rank" in out
    assert "no model was given" in out


def test_plan_with_a_model_curves_and_a_picture(configs, tmp_path, capsys):
    """The table has the step, loaders of other sizes have a table, and the picture is written."""
    png, sizes = tmp_path / "plan.png", "model=line --workers 0 --batch-sizes 2,8 data.num_workers=0"
    options = f"data=squares --threads 1 {sizes} --pin-memory --png {png} {ON_CPU} data.train.length=32"
    main(["plan", "--config-dir", configs, *options.split()])
    out, err = capsys.readouterr()
    assert "32 samples of 40 B" in out
    assert {"training", "0%", "25%", "50%", "75%", "100%"} <= {line.partition(" ")[0] for line in out.splitlines()}
    assert [line.split()[0] for line in out.splitlines() if line.count("+-") == 2] == ["2", "4", "4", "8"]
    assert out.splitlines()[-1].startswith("cache.budget=")
    assert err.count("batches from the cache: ") == 12
    assert png.read_bytes().startswith(PNG)


# ---- list and clean ----

CREATED = 1_700_000_000


@pytest.fixture
def named(tmp_path):
    """The caches of a job with a name: of training, which nobody uses, and of validation, in use."""
    name = f"test-main-{tmp_path.name[-20:]}".replace("_", "-")
    for part, dataset in (("-train0", "Photos (3 samples, train)"), ("-val0", "Photos (4 samples, val)")):
        segment, _ = open_named(name + part, 4096, Manifest(Geometry(3, 3), dataset, created=CREATED))
        segment.store(0, memoryview(np.array([READY, READY], np.uint32).tobytes()))
        if part == "-train0":
            segment.close()
    yield name, segment
    segment.close()
    for found in names_of(name):
        clean(found)


def names_of(name: str) -> list[str]:
    """The caches of a job that there are."""
    return [found.name for found in named_segments() if found.name.startswith(name)]


def test_list_tells_each_job_for_people(named, monkeypatch, capsys):
    """A heading per job, and per cache its dataset, how much is filled, its size, since when, and who uses it."""
    name, _ = named
    out = said(capsys, "list")
    assert max(map(len, out.splitlines())) <= 80
    since = f"8 KiB, since {datetime.fromtimestamp(CREATED):%Y-%m-%d %H:%M}"
    filled = "2 of 3 slots filled"
    told = (
        f"{name}: 2 caches (16 KiB) {name}-train0: Photos (3 samples, train), {filled}, {since}, used by nobody "
        f"{name}-val0: Photos (4 samples, val), {filled}, {since}, used by {os.getpid()} ("
    )
    assert told in " ".join(out.split())
    assert "unused: " in out
    assert " ".join(out.split()).endswith("removes unused caches")
    with monkeypatch.context() as patch:
        patch.setattr("lightning_stocache.node.named.memory_directory", lambda: "/no/such/folder")
        assert said(capsys, "list") == "there are no named caches in this machine's memory\n"
    told = said(capsys, "list", f"{name}-val0", "x-none")
    assert (f"{name}-val0" in told, f"{name}-train0" in told) == (True, False)


def test_a_reader_may_stop_before_the_end(monkeypatch):
    """Behind `... | true`, a command ends in silence, also when Python flushes its stdout at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        main(["list"])


def test_clean_takes_the_name_that_the_job_was_given(named, monkeypatch, capsys):
    """It asks, and silence is no yes. All its caches that nobody uses are removed; what is in use or foreign stays."""
    name, segment = named
    notes = path_of(f"{name}-notes.txt")
    notes.write_text("what I must not forget")
    for answer in ("n\n", ""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        with pytest.raises(SystemExit, match="1"):
            main(["clean", name])
        assert "nothing removed; --yes removes without asking" in capsys.readouterr().out
        assert names_of(name) == [f"{name}-train0", f"{name}-val0"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    lines = said(capsys, "clean", name).splitlines()
    assert lines[0].startswith(f"{name}-train0: Photos (3 samples, train)")
    assert [line for line in lines if line.startswith(f"stays, {name}-val0: ")]
    assert lines[-1].endswith("removed 1 cache (8 KiB)")
    assert names_of(name) == [f"{name}-val0"]
    assert "is in use" in refused(capsys, "clean", f"{name}-val0")
    assert "'x-none' does not exist" in refused(capsys, "clean", "x-none", f"{name}-val0")
    assert "does not exist" in refused(capsys, "clean", f"{name}-notes.txt")
    segment.close()
    other, _ = open_named(f"{name}-other", 4096, Manifest(Geometry(3, 3), "Photos (3 samples)"))
    other.close()
    assert "removed 2 caches" in said(capsys, "clean", f"{name}-val0", f"{name}-other", "--yes")
    assert names_of(name) == []
    notes.unlink()


# ---- pack ----


def test_a_source_of_a_config_is_packed(tmp_path, configs, capsys):
    """The training set of a DataModule, or any dataset of the config, or a function that makes one."""
    for chosen, length in (([], 20), (["--source", "data.val"], 5)):
        path = tmp_path / f"{length}.lmdb"
        command = ["pack", str(path), "data=sources", "--config-dir", configs, *chosen]
        assert f"{length} samples, {length} of them now" in said(capsys, *command)
        source = LMDBSource(path)
        assert len(source) == length
        assert source[3][0].tolist() == [3.0] * 8


@pytest.mark.processes
@pytest.mark.usefixtures("interruptible")
def test_a_pack_is_stopped_and_goes_on(tmp_path, configs, capsys):
    """By Ctrl-C, with exit code 130; then the same command, with workers, loads the rest."""
    path = tmp_path / "x.lmdb"
    command = ["pack", str(path), "data=sources", "data.train.length=40", "--config-dir", configs]
    with pytest.raises(SystemExit) as end:
        main([*command, "data.train.stops=30"])
    assert end.value.code == 130
    assert "stopped; the same command continues from here" in capsys.readouterr().err
    main([*command, "--workers", "2"])
    assert "40 samples, 10 of them now" in capsys.readouterr().out
    assert [float(square[0]) for square, _ in LMDBSource(path)] == list(range(40))
