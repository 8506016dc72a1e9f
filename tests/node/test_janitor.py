"""What lies in memory under a name is listed and cleaned with distrust: only this user's own segments are touched."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_stocache.cache.layout import contents_of
from lightning_stocache.node.header import HEADER_BYTES, Geometry, Manifest
from lightning_stocache.node.named import clean, clean_locks, is_foreign, named_segments, open_named, segments_of_others
from tests.names import folder, path_of
from tests.processes import Child

pytestmark = pytest.mark.named

STRANGER = 12345


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{os.getpid()}-{random.getrandbits(32)}"
    yield name
    for path in Path(folder()).glob(f"lsc-*-{name}*"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def make(name: str) -> None:
    open_named(name, 4096, Manifest(Geometry(10, 10), "numbers"))[0].close()


def listed(name: str) -> list[str]:
    return [found.name for found in named_segments() if found.name.startswith(name)]


def test_what_is_no_segment_is_never_removed(name: str) -> None:
    """Notes, a link to a segment, a pipe and a folder under names of caches are not listed, and stay."""
    make(name)
    path_of(name + "-notes.txt").touch(0o600)
    path_of(name + "-notes.txt").write_text("what I must not forget")
    path_of(name + "-link").symlink_to(path_of(name))
    os.mkfifo(path_of(name + "-pipe"))
    path_of(name + "-folder").mkdir()
    assert listed(name) == [name]
    assert [is_foreign(name + end) for end in ("-notes.txt", "-link", "-pipe", "-folder", "", "-none")] == (
        [True] * 4 + [False] * 2
    )
    for end in ("-notes.txt", "-link", "-pipe", "-folder"):
        assert clean(name + end) == []
        assert os.path.lexists(path_of(name + end))


def test_a_damaged_segment_is_listed_and_removed(name: str) -> None:
    """It takes memory like any other, and the list says what is wrong with it."""
    make(name)
    with path_of(name).open("r+b") as file:
        file.seek(64)
        file.write(b"\xff" * 100)
    [found] = [found for found in named_segments(contents_of) if found.name == name]
    assert found.contents.manifest is None
    assert found.contents.damage.startswith("is damaged")
    assert [gone.name for gone in clean(name)] == [name]
    assert not path_of(name).exists()


@pytest.mark.processes
def test_lock_files_without_a_segment_are_removed(name: str) -> None:
    """If they are empty, this user's own, and nobody has them locked; with their segment they stay."""
    make(name + "-used")
    for end in ("-left", "-full", "-locked", "-open"):
        path_of(name + end + ".locks").touch(0o600)
    path_of(name + "-full.locks").write_text("no lock file")
    path_of(name + "-open.locks").chmod(0o666)
    child = Child(keep_locked, str(path_of(name + "-locked.locks")), str(path_of(name + "-locked.locks.ready")))
    while not path_of(name + "-locked.locks.ready").exists():
        time.sleep(0.01)
    clean_locks()
    child.kill()
    left = {end for end in ("-left", "-full", "-locked", "-open", "-used") if path_of(name + end + ".locks").exists()}
    assert left == {"-full", "-locked", "-open", "-used"}


def keep_locked(path: str, ready: str) -> None:
    fcntl.lockf(os.open(path, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 7)
    Path(ready).touch(0o600)
    time.sleep(300)


def test_a_segment_goes_although_its_lock_file_is_not_ours(name: str, tmp_path: Path) -> None:
    """The folder or the link that somebody put in its place is left as it is."""
    locks = path_of(name + ".locks")
    for put in (locks.mkdir, lambda: locks.symlink_to(tmp_path)):
        make(name)
        locks.unlink()
        put()
        assert [gone.name for gone in clean(name)] == [name]
        assert not path_of(name).exists()
        assert os.path.lexists(locks)
        locks.unlink() if locks.is_symlink() else locks.rmdir()


def test_names_that_nobody_could_have_given_are_left_alone(name: str) -> None:
    """A segment whose name holds codes for a terminal was not made here."""
    make(name)
    path_of(name).rename(path_of(name + "\x1b[2J"))
    assert listed(name) == []
    assert path_of(name + "\x1b[2J").exists()


def test_of_other_users_only_owner_and_size_are_told(name: str) -> None:
    """Whatever their headers say: they are not opened."""
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    make(name)
    size = path_of(name).stat().st_blocks * 512
    before = segments_of_others().get(STRANGER, (0, 0))
    os.chown(path_of(name), STRANGER, STRANGER)
    assert segments_of_others()[STRANGER] == (before[0] + 1, before[1] + size)
    assert size == HEADER_BYTES
    assert listed(name) == []
