"""How the lines of the package reach a console: with their prefix, and above a progress bar."""

import errno
import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from logging import FileHandler
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from lightning_stocache.console import Console, above_bars, say

LOGGER = logging.getLogger("tests.console")


@contextmanager
def handled(stream: Any) -> Iterator[logging.StreamHandler[Any]]:
    """A handler that was made before the bar was drawn, as Lightning's is when it is imported."""
    handler = logging.StreamHandler(stream)
    LOGGER.addHandler(handler)
    yield handler
    LOGGER.removeHandler(handler)


def test_a_line_stands_above_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not glued to what tqdm has drawn, which is drawn again below. While rich draws, it goes to the stderr that
    rich puts in place; afterwards the handler has its own stream again, and one that is no console's keeps its."""
    with handled(sys.stderr), tqdm(total=2, file=sys.stderr, ncols=60) as bar:
        bar.update()
        with above_bars(LOGGER.name):
            LOGGER.warning("epoch 0")
        said = capsys.readouterr().err
    line, *rest = said.split("\n")
    assert line.split("\r")[-1] == "epoch 0"
    assert "50%" in rest[-1]
    before, richs, file = io.StringIO(), io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", before)
    monkeypatch.setattr(sys, "stderr", richs)
    with handled(before) as handler, handled(file):
        with above_bars(LOGGER.name):
            LOGGER.warning("epoch 0")
        assert handler.stream is before
    assert (before.getvalue(), richs.getvalue(), file.getvalue()) == ("", "epoch 0\n", "epoch 0\n")


@pytest.mark.parametrize(
    "kind", [partial(FileHandler, mode="w", delay=True), partial(RotatingFileHandler, maxBytes=1, backupCount=9)]
)
def test_a_log_file_keeps_its_lines(tmp_path: Path, kind: Callable[[Path], FileHandler]) -> None:
    """A handler that opens its file with the first line, or a new file with each line, loses none."""
    LOGGER.addHandler(handler := kind(tmp_path / "log"))
    for word in ("one", "three", "two"):
        with above_bars(LOGGER.name):
            LOGGER.warning(word)
    LOGGER.removeHandler(handler)
    handler.close()
    assert sorted("".join(file.read_text() for file in tmp_path.iterdir()).split()) == ["one", "three", "two"]


class FullDisk(io.StringIO):
    """A stream that takes nothing."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("stderr", [None, FullDisk()])
def test_a_line_that_cannot_be_printed_stops_nothing(monkeypatch: pytest.MonkeyPatch, stderr: Any) -> None:
    """It is lost, as with every handler of logging."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "stderr", stderr)
    logging.getLogger("lightning_stocache").warning("lost")
    with handled(stderr), above_bars(LOGGER.name):
        LOGGER.warning("lost")


def test_warnings_say_whose_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nobody has set logging up, they have the prefix; where somebody has, they are his to print."""
    ours = logging.getLogger("lightning_stocache")
    assert [type(handler) for handler in ours.handlers] == [Console]
    ours.getChild("setup").warning("heard")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    ours.getChild("setup").warning("unheard")
    assert capsys.readouterr().err == "stocache: unheard\n"


def test_lines_fit_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line has the prefix once, whoever prints it; what is longer is broken and indented, words and paths are not."""
    text = f"{'a sentence ' * 9}\nand /{'a' * 80}/path"
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    say(text)
    logging.getLogger("lightning_stocache.setup").warning(text)
    line = capsys.readouterr().err
    assert line.count("stocache: a sentence") == 2
    assert [len(part) <= 79 or "/path" in part for part in line.splitlines()] == [True] * 8
    assert [part.startswith("    ") for part in line.splitlines()] == [False, True, True, True] * 2
    handler = logging.StreamHandler(stream := io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    say("short")
    assert (stream.getvalue(), capsys.readouterr().err) == ("stocache: short\n", "")


def test_one_logger_decides_what_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The package's own; INFO of its modules is not for people."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    ours = logging.getLogger("lightning_stocache")
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    say("heard")
    monkeypatch.setattr(ours, "level", logging.WARNING)
    say("unheard")
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    assert capsys.readouterr().err == "stocache: heard\n"
