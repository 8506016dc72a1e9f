"""A store on a disk serves what was stored, or nothing: whatever happened to the file in between."""

import errno
import logging
import os
import random
import shutil
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stocache.cache.checksums import SUM_BYTES
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import NO_PLACE, Store
from lightning_stocache.node import disk as disk_module
from lightning_stocache.node.disk import DiskError, check_directory
from lightning_stocache.node.files import FORMAT, HEADER_BYTES, ManifestError
from lightning_stocache.node.segment import Segment
from tests.cache.disks import LENGTH, PAGE, Disk, flip, power_cut
from tests.cache.equality import same

LAYOUTS = ("rows", "records")
ALL = list(range(LENGTH))


@pytest.fixture(params=LAYOUTS)
def disk(request: Any, tmp_path: Path) -> Disk:
    """A directory in which one job after the other opens the same store."""
    return Disk(tmp_path, request.param)


def test_nothing_is_read_before_it_was_found_sound(disk: Disk) -> None:
    """A stored sample is found only after a lookup with `verify`."""
    disk.fill()
    store = disk.open()
    assert (store.filled, store.full, store.get(3)) == (LENGTH, False, None)
    assert (store.lookup(np.arange(LENGTH)) == NO_PLACE).all()
    assert (store.lookup(np.array([3, 3, LENGTH + 7]), verify=True) != NO_PLACE).tolist() == [True, True, False]
    assert same(store.get(3), disk.sample(3))
    assert store.get(4) is None
    assert disk.served(store) == ALL
    assert store.full
    store.close()


def test_a_cleared_store_serves_nothing_and_closing_it_again_changes_nothing(disk: Disk) -> None:
    """What was verified is forgotten. A copy in this process is open until it is closed itself."""
    disk.fill()
    store = disk.open()
    assert disk.served(store) == ALL
    store.clear()
    assert disk.served(store) == []
    assert store.fill(5, disk.sample(5))
    assert disk.served(store) == [5]
    copy = Store.attach(store.handle)
    store.close(), store.close()
    assert disk.served(copy) == [5]
    copy.close()
    assert disk.served() == [5]


def test_a_flipped_bit_costs_its_sample_alone(disk: Disk) -> None:
    """A flipped bit costs its own sample, which can be stored again."""
    disk.fill()
    content = disk.bytes()
    store = disk.open()
    store.lookup(np.array(ALL), verify=True)
    places = {index: store.layout.fetch(store.arc.slot(index)) for index in (0, 7, LENGTH - 1)}
    store.close()
    for index, parts in places.items():
        part = max(parts, key=len)
        at = content.index(part)
        damaged = bytearray(content)
        damaged[at + len(part) // 2] ^= 4
        disk.write(damaged)
        assert disk.served() == [other for other in ALL if other != index]
        disk.fill([index])
        assert disk.served() == ALL


@pytest.mark.parametrize("rounds", [2, pytest.param(5000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_damaged_files_serve_no_wrong_sample(disk: Disk, rounds: int) -> None:
    """Bits flip anywhere behind the header, columns and checksums included, or the file is cut off anywhere."""
    disk.fill()
    content = disk.bytes()
    lost = 0
    for seed in range(rounds):
        generator = random.Random(seed)
        flipped = bytearray(content)
        flip(flipped, generator, count=generator.choice((1, 10, 300)))
        for damaged in (flipped, content[: generator.randrange(HEADER_BYTES, len(content))]):
            disk.write(damaged)
            lost += LENGTH - len(disk.served())
            disk.fill()
            disk.served()
    assert lost


def test_a_file_that_was_cut_off_or_has_another_version_is_refused(disk: Disk) -> None:
    """The error says the way out."""
    disk.fill([1])
    content = disk.bytes()
    for length in (0, 10, HEADER_BYTES - 1):
        disk.write(content[:length])
        with pytest.raises(ManifestError, match="remove it"):
            disk.open()
    at = content.index(FORMAT.to_bytes(4, "little"), 8 + 16)  # behind the magic number and the token
    content[at : at + 4] = (FORMAT - 1).to_bytes(4, "little")
    disk.write(content)
    with pytest.raises(ManifestError, match=rf"format {FORMAT - 1}, this one has {FORMAT}.*remove it"):
        disk.open()


def test_a_file_that_is_cut_off_in_use_is_left_alone(disk: Disk) -> None:
    """The store serves and stores nothing, and the file keeps its length. Its mapping would raise SIGBUS."""
    disk.fill()
    store = disk.open()
    assert disk.served(store) == ALL
    os.truncate(disk.path, HEADER_BYTES + PAGE)
    assert disk.served(store) == []
    assert (store.filled, store.full) == (0, False)
    assert not any(store.put([3], [disk.codec.contents(disk.codec.encode(disk.sample(3)))]))
    assert disk.path.stat().st_size == HEADER_BYTES + PAGE
    store.close()


@pytest.mark.parametrize("rounds", [30, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_a_power_cut_serves_no_wrong_sample(disk: Disk, rounds: int) -> None:
    """After a power cut any pages that were written since the last sync may be lost. Synced samples are served."""
    disk.fill(ALL[:20])
    before = disk.bytes()
    disk.fill(ALL[20:])
    after = disk.bytes()
    assert before != after
    lost = 0
    for seed in range(rounds):
        disk.write(power_cut(before, after, random.Random(seed)))
        served = disk.served()
        assert set(ALL[:20]) <= set(served), "what was synced is there"
        lost += LENGTH - len(served)
        disk.fill()
        assert disk.served() == ALL
    assert lost


def test_records_after_a_power_cut_are_not_overwritten(tmp_path: Path) -> None:
    """The free offset may be older than the columns that lead to records: new records lie behind all of them."""
    disk = Disk(tmp_path, "records")
    disk.fill(ALL[:4])
    before = disk.bytes()
    disk.fill(ALL[4:30])
    after = disk.bytes()
    image = bytearray(after)
    with closing(disk.open()) as store:
        end = HEADER_BYTES + store.layout.begin
        numbers = slice(end - store.layout.words.nbytes, end)
    image[numbers] = before[numbers]
    assert image != after
    disk.write(image)
    store = disk.open()
    store.lookup(np.array(ALL), verify=True)
    for index in ALL[30:]:
        store.fill(index, disk.sample(index))
    assert disk.served(store) == ALL
    store.close()
    assert disk.served() == ALL


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_what_the_disk_refuses_is_not_stored(disk: Disk, error: int, monkeypatch: Any, caplog: Any) -> None:
    """A refused write is one warning. Earlier samples are served."""
    disk.fill(ALL[:10])
    store = disk.open()
    real = Segment.store

    def refuse(segment: Segment, offset: int, *parts: memoryview) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Segment, "store", refuse)
    with caplog.at_level(logging.WARNING):
        for index in ALL[10:]:
            store.fill(index, disk.sample(index))
        assert len([entry for entry in caplog.records if "the cache stops" in entry.message]) == 1
    assert os.strerror(error) in caplog.text
    monkeypatch.setattr(Segment, "store", real)
    assert disk.served(store) == ALL[:10]
    store.close()


def test_a_disk_that_others_have_filled_is_tried_again(disk: Disk, monkeypatch: Any, caplog: Any) -> None:
    """Without room nothing is stored. When others have made room, samples are stored again."""
    store, now, free = disk.open(), [time.monotonic()], [0]
    monkeypatch.setattr(Segment, "free_bytes", property(lambda segment: free[0]))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert not any(store.fill(index, disk.sample(index)) for index in ALL)
    assert "the disk (0 B free" in caplog.text
    free[0], now[0] = 2**40, now[0] + 60
    assert all(store.fill(index, disk.sample(index)) for index in ALL)
    store.close()
    assert disk.served() == ALL


def test_a_block_that_cannot_be_read_is_loaded_again(disk: Disk, monkeypatch: Any, caplog: Any) -> None:
    """An error of the disk is no error of the training; its slot is empty, and the disk is left alone for a while."""
    disk.fill()
    store = disk.open()
    real, failed = Segment.fetch, []

    def broken(segment: Segment, offset: int, length: int) -> bytes:
        if not failed:
            failed.append(offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(segment, offset, length)

    monkeypatch.setattr(Segment, "fetch", broken)
    with caplog.at_level(logging.WARNING):
        assert store.place(5, verify=True) == NO_PLACE
        assert store.place(6, verify=True) == NO_PLACE
    assert failed
    assert "left alone" in caplog.text
    assert store.get(6) is None
    store.close()
    assert disk.served() == [index for index in ALL if index != 5]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path / "no" / "such", "cannot hold a cache: No such file"),
        (lambda path: shutil.copy(__file__, path / "file"), "cannot hold a cache: Not a directory"),
        (lambda path: Path("/proc/1"), "cannot hold a cache: "),
    ],
)
def test_a_directory_that_can_hold_none_is_refused(tmp_path: Path, make: Any, words: str) -> None:
    """The error tells the cause and the way out."""
    with pytest.raises(DiskError, match=words) as refused:
        check_directory(str(make(tmp_path)))
    assert "leave dir= away" in str(refused.value)


def test_a_disk_of_another_machine_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """A network filesystem is refused, because a mapping does not show what other machines write."""
    monkeypatch.setattr(disk_module, "filesystem_of", lambda path: "nfs4")
    with pytest.raises(DiskError, match=r"lies on another machine \(nfs4\)"):
        check_directory(str(tmp_path))


def test_the_filesystem_is_found_by_its_device(tmp_path: Path, monkeypatch: Any) -> None:
    """The device of a directory leads to its filesystem. A device that is not listed is unknown."""
    device = os.stat(tmp_path).st_dev
    line = f"22 21 {os.major(device)}:{os.minor(device)} / /some\\040disk rw shared:9 - nfs4 server:/ rw\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "21 1 0:99999 / / rw - ext4 none rw\n" + line)
    assert disk_module.filesystem_of(str(tmp_path)) == "nfs4"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "")
    assert disk_module.filesystem_of(str(tmp_path)) == ""


def test_a_directory_is_made_for_this_user_alone(tmp_path: Path) -> None:
    """A missing directory is made with mode 0700 if its parent exists."""
    path = check_directory(str(tmp_path / "caches"))
    assert os.stat(path).st_mode & 0o777 == 0o700
    assert os.listdir(path) == []


def test_another_index_or_file_is_no_proof(tmp_path: Path) -> None:
    """The bytes of one sample under another index, or in another file, are not what was stored there."""
    disk = Disk(tmp_path, "rows")
    store = disk.open()
    pixels = [disk.sample(index)[0] for index in (0, 1)]
    assert all(store.fill(index, (pixels[index], 7)) for index in (0, 1))
    content = disk.bytes()
    begin = HEADER_BYTES + store.layout.offset_in("sum", 0)
    store.close()
    swapped = bytearray(content)
    for places in (
        [(start := content.index(bytes(each.numpy())), start + 700) for each in pixels],
        [(start := begin + store.arc.slot(index) * SUM_BYTES, start + SUM_BYTES) for index in (0, 1)],
    ):
        (one, one_end), (other, other_end) = places
        swapped[one:one_end], swapped[other:other_end] = content[other:other_end], content[one:one_end]
    disk.write(swapped)
    assert disk.served() == []
    disk.write(content)
    store = disk.open()
    assert (store.lookup(np.array([0, 1]), verify=True) != NO_PLACE).all()
    assert same(store.get(0), (pixels[0], 7))
    store.close()
    stranger = bytearray(content)
    stranger[8:24] = bytes(16)  # the token
    disk.write(stranger)
    assert disk.served() == []


def test_without_checksums_there_is_no_cache_on_a_disk(tmp_path: Path, monkeypatch: Any) -> None:
    """Without xxhash, the error says what to install."""
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match=r"lightning-stocache\[disk\]"):
        Store.create(SampleSpec.infer(1), Arc(4, 4), directory=str(tmp_path))
