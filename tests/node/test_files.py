"""Files in a folder that everybody may write to: only what is certainly this user's own is opened."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.node.files import open_own
from tests.processes import call

STRANGER = 12345


def make_link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


def make_open_to_all(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


def make_second_name(path: Path) -> None:
    path.touch(0o600)
    os.link(path, path.parent / "second")


def make_foreign(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path.touch(0o666)
    os.chown(path, STRANGER, STRANGER)


STRANGE = [make_link, os.mkfifo, os.mkdir, make_socket, make_open_to_all, make_second_name, make_foreign]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("make", STRANGE)
def test_what_is_strange_is_refused_without_waiting(tmp_path: Path, make: Any, create: bool) -> None:
    """One sentence says the way out; nothing is followed, made, or waited for."""
    make(tmp_path / "file")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(PermissionError, match=r"file is not trusted.*: give another name, or remove it"):
        open_own(str(tmp_path / "file"), create=create)
    assert not (tmp_path / "elsewhere").exists()
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_is_own_is_opened_and_made(tmp_path: Path) -> None:
    """A file that is missing is made for this user alone; then it is the same one."""
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        open_own(str(path))
    made = open_own(str(path), create=True)
    again = open_own(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.fstat(made).st_ino == os.fstat(again).st_ino
    os.close(made), os.close(again)


def test_a_name_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    """What is said of a file holds no codes for a terminal."""
    path = tmp_path / "a\x1b[2J"
    path.mkdir()
    with pytest.raises(PermissionError) as caught:
        open_own(str(path))
    assert str(caught.value).isprintable()


@pytest.mark.processes
def test_a_user_is_told_of_roots_file(tmp_path: Path) -> None:
    """Who may not even open it hears the same sentence."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    path = tmp_path / "file"
    path.touch(0o600)
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(0o755)
        if folder.name.startswith("pytest-of-"):
            break
    assert "is not trusted" in call(as_stranger, str(path))


def as_stranger(path: str) -> str:
    os.setresuid(STRANGER, STRANGER, 0)
    with pytest.raises(PermissionError) as caught:
        open_own(path)
    os.setresuid(0, 0, 0)
    return str(caught.value)
