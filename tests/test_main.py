"""The command line: what it costs, what it writes, and what it says of input that is no good."""

import subprocess
import sys

import pytest

from lightning_stocache.__main__ import COMMANDS, main

CSV = "epoch,step,stocache/hit_rate,stocache/hits\n0,9,0.5,5\n"


def test_help_lists_the_commands_and_imports_little(tmp_path):
    """--help names every command, and imports neither torch nor Lightning nor Hydra nor NumPy."""
    code = (
        "import sys, lightning_stocache.__main__ as command\n"
        "try:\n    command.main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'torch', 'lightning', 'hydra', 'numpy', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(command.__name__ in done.stdout for command in COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


def test_it_runs_as_a_module(tmp_path):
    """python -m lightning_stocache report writes report.html where it stands, and says so."""
    (tmp_path / "metrics.csv").write_text(CSV)
    command = [sys.executable, "-m", "lightning_stocache", "report", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "report.html\n"
    assert done.stderr == ""
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("arguments", [["report"], ["no_such_command"], [], ["report", "{}/missing"], ["report", "{}"]])
def test_bad_input_is_exit_code_2_and_a_sentence(tmp_path, capsys, arguments):
    """Missing arguments, unknown commands and folders without a run end alike: stderr, code 2, no traceback."""
    with pytest.raises(SystemExit) as end:
        main([argument.format(tmp_path) for argument in arguments])
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    assert err
    assert "Traceback" not in err


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path, capsys):
    """An output in a folder that does not exist is refused by its name."""
    (tmp_path / "metrics.csv").write_text(CSV)
    with pytest.raises(SystemExit) as end:
        main(["report", str(tmp_path), "--output", str(tmp_path / "no" / "report.html")])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_runs_that_are_left_out_are_told(tmp_path, capsys):
    """A run that cannot be read is named on stderr; the page of the others is written."""
    for name, text in (("a", CSV), ("b", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(text)
    main(["report", str(tmp_path), "--output", str(tmp_path / "report.html")])
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'report.html'}\n"
    assert "left out" in err
    assert "is empty" in err
