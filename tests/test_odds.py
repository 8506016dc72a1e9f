"""The odds are what they say, and end with their test: nothing of a crowd is left where one of it fails."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.odds import Disk
from tests.processes import ChildError, is_alive, wait_until


def fail_last(number: int, folder: Path) -> None:
    """Wait for ever, but for the last process, which fails when all have begun."""
    (folder / str(os.getpid())).touch()
    if number < 31:
        time.sleep(1000)
    wait_until(lambda: len(list(folder.iterdir())) == 32)
    raise ValueError("the last one")


@pytest.mark.processes
def test_the_first_error_of_a_crowd_ends_it(tmp_path: Path, crowd: Any) -> None:
    """It is raised with its traceback, while others are still at work, which are killed."""
    with pytest.raises(ChildError, match=r"(?s)in fail_last.*ValueError: the last one"):
        crowd(fail_last, tmp_path)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 32
    wait_until(lambda: not any(map(is_alive, pids)))


def write(path: Path) -> int:
    """Write 1 MiB, to the disk itself. Returns the number of the error, or 0."""
    try:
        with open(path, "wb") as file:
            file.write(bytes(2**20))
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno or -1
    return 0


def write_before_and_after(disk: Disk) -> list[int]:
    results = [write(disk.directory / "before")]
    disk.take_all()
    results.append(write(disk.directory / "full"))
    disk.make_room()
    return [*results, write(disk.directory / "after")]


@pytest.mark.processes
@pytest.mark.parametrize("filesystem", ["tmpfs", "ext4", "btrfs"])
def test_a_full_disk_is_full_until_others_make_room(filesystem: str, full_disk: Any) -> None:
    """Whether or not the filesystem writes over a file in place. The least that btrfs takes is 109 MiB."""
    assert full_disk(write_before_and_after, filesystem=filesystem, mib=128) == [0, errno.ENOSPC, 0]
