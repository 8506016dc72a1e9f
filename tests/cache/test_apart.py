"""Jobs that share a file and little else: containers, users of one group, and a disk that is made read-only."""

import errno
import faulthandler
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.node.named import clean
from tests.cache.stores import ALL, LAYOUTS, Disk, RollingDisk, append, attach_rolling, filled, resident, served
from tests.jobs import Log, skip_without
from tests.processes import call, enter_container, hanging, names_folder, unused_names, wait_until

pytestmark = pytest.mark.processes

GROUP = OTHER = 12345
"""A group, and a user of it who runs no job."""


@pytest.fixture(params=LAYOUTS)
def layout(request: Any) -> str:
    return str(request.param)


# ---- containers ----


def in_container(function: Callable[..., Any], *args: Any) -> Any:
    enter_container()
    assert os.getpid() == 1
    return function(*args)


def fill_and_claim(disk: Disk) -> Any:
    store = disk.open()
    assert filled(store, ALL[:10]) == ALL[:10]
    assert store.divide([20, 21]) == ([20, 21], [])
    return store


def join(disk: Disk) -> Any:
    """What another job finds, and what is left to it."""
    with closing(disk.open()) as store:
        stored, divided = served(store), store.divide([21, 22])
        store.release(divided[0])
        return stored, divided, filled(store, ALL[8:12])


def fill_the_rest(disk: Disk) -> Any:
    with closing(disk.open()) as store:
        stored = served(store)
        wait_until(lambda: len(filled(store)) + store.filled >= len(ALL))  # who has died is noticed every 10 ms
        return stored, served(store)


def test_containers_with_one_directory_are_jobs_of_one_machine(layout: str, tmp_path: Path) -> None:
    """Each process is number 1 in its container. They claim, read and fill as any two jobs, and when one is killed the
    others have what it had claimed."""
    skip_without(["unshare", "--pid", "--fork", "--mount-proc"])
    disk = Disk(tmp_path, layout)
    with hanging(in_container, fill_and_claim, disk):
        assert call(in_container, join, disk) == (ALL[:10], ([22], [21]), [10, 11])
        assert join(disk) == (ALL[:12], ([22], [21]), [])
        assert [segment.in_use for segment in call(in_container, clean, "store", str(tmp_path))] == []
        assert disk.path.exists()
    assert call(in_container, fill_the_rest, disk) == (ALL[:12], ALL)
    assert disk.served() == ALL


def append_to(handle: Any, first: int, last: int) -> None:
    with closing(attach_rolling(handle)) as store:
        append(store, range(first, last))


@pytest.mark.named
def test_a_writer_in_another_container_appends(layout: str, tmp_path: Path) -> None:
    """The directory and /dev/shm are all that the two containers share. No name stays in /dev/shm afterwards; what a
    killed job leaves is not used by the next one, and can be removed."""
    skip_without(["unshare", "--pid", "--fork", "--mount-proc"])
    disk = RollingDisk(tmp_path, layout)
    with closing(disk.open()) as store:
        append(store, range(5))
        call(in_container, append_to, store.handle, 5, 8)
        assert resident(store) == list(range(8))
    assert os.listdir(names_folder()) == []
    with hanging(disk.open):
        assert clean() == []
    assert len(unused_names()) == 1
    with closing(disk.open()) as store:
        assert resident(store) == list(range(8))
        assert len(clean()) == 1
        append(store, range(8, 10))
    assert os.listdir(names_folder()) == []


# ---- a group ----


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in which all users of a group may make and remove files."""
    if os.getuid() != 0:
        pytest.skip("only root can be two users")
    with tempfile.TemporaryDirectory() as made:  # the other user cannot go to pytest's
        os.chown(made, -1, GROUP)
        os.chmod(made, 0o770)
        yield Path(made)


def as_other(change: Callable[[Path], Any], path: Path) -> None:
    """Have the other user of the group change a file."""
    call(_as_other, change, path)


def _as_other(change: Callable[[Path], Any], path: Path) -> None:
    os.setgroups([])
    os.setegid(GROUP)
    os.seteuid(OTHER)
    try:
        change(path)
    finally:
        os.seteuid(0)  # the answer lies in a folder of root


def open_to_write(path: Path) -> None:
    with pytest.raises(PermissionError):
        path.open("r+b")


def make_own(path: Path) -> None:
    path.unlink()
    path.write_bytes(bytes(10_000))


def make_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "hidden")


def hide(path: Path) -> None:
    path.rename(path.parent / "hidden")


def show(path: Path) -> None:
    path.unlink(missing_ok=True)
    (path.parent / "hidden").rename(path)


def test_another_user_of_the_directory_changes_no_sample(layout: str, folder: Path) -> None:
    """He can hide the file of a job, show it again, and put something else there; he can open none. Jobs that have the
    file go on with it, and others refuse what is not their user's, or make a new one."""
    disk = Disk(folder, layout)
    with closing(disk.open()) as store:
        assert filled(store, ALL[:10]) == ALL[:10]
        as_other(open_to_write, disk.path)
        as_other(hide, disk.path)
        with closing(disk.open()) as second:
            assert filled(second, ALL[5:15]) == ALL[5:15]
            for number, change in enumerate((make_own, make_link), 10):
                as_other(change, disk.path)
                with pytest.raises(PermissionError, match="is not trusted"):
                    disk.open()
                assert filled(store, [number]) == [number]
                assert filled(second, [number + 10]) == [number + 10]
            assert served(second) == [*ALL[5:15], 20, 21]
        as_other(show, disk.path)
        assert served(store) == ALL[:12]
        with closing(disk.open()) as third:
            assert served(third) == ALL[:12]
            assert store.divide([30]) == ([30], [])
            assert third.divide([30, 31]) == ([31], [30])


# ---- read-only ----


def go_on(disk: Any, layout: str) -> list[str]:
    """Fill and read while the filesystem becomes read-only, as it does after an error of the disk."""
    faulthandler.disable()  # a SIGBUS is reported by its number alone
    log = Log(logging.WARNING)
    with closing(Disk(disk.directory, layout).open()) as store:
        assert filled(store, ALL[:10]) == ALL[:10]
        assert store.divide([20, 21]) == ([20, 21], [])
        subprocess.run(["mount", "-o", "remount,abort", disk.directory], check=True)
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
            disk.take_all()
        assert filled(store, [20, *ALL[10:]]) == []
        assert store.divide([30, 31])[0] == [30, 31]
        store.release([30, 31])
        assert served(store) == ALL[:10]
        assert call(served, store) == ALL[:10]
    return list(log.lines)


def test_a_disk_that_becomes_read_only_serves_what_it_has(layout: str, full_disk: Any) -> None:
    """Nothing more is stored, with one warning."""
    [warning] = full_disk(go_on, layout, filesystem="ext4")
    assert "the cache stops" in warning
    assert os.strerror(errno.EROFS) in warning
