"""A store on a disk serves what was stored, or nothing: whatever happened to the file in between."""

import errno
import faulthandler
import logging
import mmap
import os
import random
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from lightning_stocache.cache import store as store_module
from lightning_stocache.cache.head import ENTRY, ON_DISK
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.seats import Seats
from lightning_stocache.cache.store import NO_SLOT, Store
from lightning_stocache.node import segment as segment_module
from lightning_stocache.node.disk import DiskError, check_directory
from lightning_stocache.node.files import HEADER_BYTES
from lightning_stocache.node.named import open_named
from lightning_stocache.node.segment import Segment
from tests.cache.stores import (
    ALL,
    GRANTED,
    LAYOUTS,
    LENGTH,
    PAGE,
    Disk,
    break_one_block,
    codec_of,
    encoded,
    filled,
    flip,
    number_of,
    power_cut,
    refuse_stores,
    sample,
    served,
)
from tests.jobs import Log
from tests.odds import stop
from tests.processes import call


@pytest.fixture(params=LAYOUTS)
def disk(request: Any, tmp_path: Path) -> Disk:
    """A directory in which one job after the other opens the same store."""
    return Disk(tmp_path, request.param)


def test_nothing_is_read_before_it_was_found_sound(disk: Disk) -> None:
    """A sample is found only after a lookup with `verify`, which `clear` forgets; a copy is open until it is closed."""
    disk.fill()
    store = disk.open()
    assert (store.filled, store.full, store.get(3)) == (LENGTH, False, None)
    assert (store.lookup(np.arange(LENGTH)) == NO_SLOT).all()
    assert (store.lookup(np.array([3, 3, LENGTH + 7]), verify=True) != NO_SLOT).tolist() == [True, True, False]
    assert number_of(store.get(3)) == 3
    assert store.get(4) is None
    assert filled(store, [4]) == [], "it is there, and stays"
    assert served(store) == ALL
    assert store.full
    store.clear()
    assert served(store) == []
    assert filled(store, [5]) == [5]
    copy = Store.attach(store.handle)
    store.close(), store.close()
    assert served(copy) == [5]
    copy.close()
    assert disk.served() == [5]


def test_a_slot_that_was_claimed_while_it_was_verified_stays_claimed(disk: Disk, monkeypatch: Any) -> None:
    """Another thread has claimed it, and may write. It is verified again when it is free."""
    disk.fill()
    in_turn, claimed = Segment.in_turn, list[int]()
    with closing(disk.open()) as store, ThreadPoolExecutor(1) as other:
        slot = store.arc.slot(7)
        seats = Seats(store.segment, store.layout.states, store.layout.lives, store.layout.changes)

        def claim(segment: Segment, work: Any, *args: object) -> Any:
            if not claimed:
                claimed.append(slot)
                assert other.submit(seats.take, [slot]).result() == [slot]
            return in_turn(segment, work, *args)

        monkeypatch.setattr(Segment, "in_turn", claim)
        assert served(store) == [index for index in ALL if index != 7]
        assert other.submit(seats.is_mine, slot).result()
        other.submit(seats.release, [slot]).result()
        assert served(store) == ALL


def rights(path: Path) -> set[str]:
    """How this process has mapped a file."""
    lines, inode = Path("/proc/self/maps").read_text().splitlines(), str(path.stat().st_ino)
    return {line.split()[1] for line in lines if line.split()[4] == inode}


def fill_and_look(store: Any, index: int, path: Path) -> tuple[list[int], set[str]]:
    return filled(store, [index]), rights(path)


@pytest.mark.processes
def test_a_disk_is_mapped_read_only(tmp_path: Path) -> None:
    """In every process that reads or stores; a write through the mapping is a SIGBUS where a disk has no room."""
    disk = Disk(tmp_path, "rows")
    with closing(disk.open()) as store:
        for index, method in enumerate(("fork", "spawn")):
            assert call(fill_and_look, store, index, disk.path, method=method) == ([index], {"r--s"})
        assert fill_and_look(store, 9, disk.path) == ([9], {"r--s"})
        assert not any(column.flags.writeable for column in store.layout.columns.values())
        assert served(store) == [0, 1, 9]


def test_a_copy_of_a_file_in_use_is_a_cache(disk: Disk, tmp_path: Path) -> None:
    """What a process knew or had claimed when the file was copied means nothing to who opens the copy."""
    copy = Disk(tmp_path / "copy", disk.layout)
    copy.directory.mkdir(0o700)
    disk.fill(ALL[:9])
    with closing(disk.open()) as store:
        assert served(store) == ALL[:9]
        assert store.divide([20, 21]) == ([20, 21], [])
        shutil.copy(disk.path, copy.path)
        store.release([20, 21])
    with closing(copy.open()) as store:
        assert (store.lookup(np.array(ALL)) == NO_SLOT).all()
        assert served(store) == ALL[:9]
        assert store.divide([20, 21]) == ([20, 21], [])
        store.release([20, 21])
        assert filled(store, ALL) == ALL[9:]
    assert copy.served() == ALL


def test_opening_costs_the_same_for_every_number_of_slots(tmp_path: Path, monkeypatch: Any) -> None:
    """Rows are opened, filled and found in a file of a billion slots, with a few reads and writes."""
    spec, most, moved = SampleSpec.infer(np.zeros(8, dtype=np.int64)), 10**9, [0]
    for name in ("pread", "pwrite"):
        plain = getattr(os, name)

        def counted(*args: Any, plain: Any = plain) -> Any:
            done = plain(*args)
            moved[0] += done if isinstance(done, int) else len(done)
            return done

        monkeypatch.setattr(os, name, counted)

    def opened() -> Store:
        size, manifest = Store.plan(spec, Arc(most, most), on_disk=True)
        segment, manifest = open_named("many", size, manifest, str(tmp_path), partial(Store.mend, spec))
        return cast(Store, Store.open(segment, spec, manifest.geometry, most))

    with closing(opened()) as store:
        assert store.some_stored(3) == []
        assert store.fill(most - 5, np.arange(8))
    with closing(opened()) as store:
        assert store.some_stored(3) == [most - 5]
        assert store.ready_slot(most - 5) == NO_SLOT
        assert store.ready_slot(most - 5, verify=True) != NO_SLOT
        assert store.get(most - 5).tolist() == list(range(8))
    assert moved[0] < 2**24


@pytest.mark.parametrize("page", [4096, 65536])
@pytest.mark.parametrize("punch", [True, False])
def test_where_pages_are_large_or_holes_unknown(disk: Disk, monkeypatch: Any, page: int, punch: bool) -> None:
    """The file is the same for every size of pages; where no hole can be punched, zeroes are written."""
    disk.fill(ALL[:9])
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "PAGESIZE", page)
        if not punch:
            patch.setattr(segment_module, "punch", lambda *_: False)
        with closing(disk.open()) as store:
            assert (store.lookup(np.array(ALL)) == NO_SLOT).all()
            assert served(store) == ALL[:9]
            assert filled(store, ALL) == ALL[9:]
            assert (HEADER_BYTES + store.layout.scratch_bytes) % page == 0, "no page has scratch and entries"
    assert disk.served() == ALL


def test_a_file_that_is_cut_off_in_use_is_left_alone(disk: Disk) -> None:
    """The store serves and stores nothing, and the file keeps its length. Its mapping would raise SIGBUS."""
    disk.fill()
    with closing(disk.open()) as store:
        assert served(store) == ALL
        os.truncate(disk.path, HEADER_BYTES + PAGE)
        assert served(store) == []
        assert (store.filled, store.full) == (0, False)
        assert not any(store.put([3], [encoded(store, 3)]))
        assert disk.path.stat().st_size == HEADER_BYTES + PAGE


def test_a_flipped_bit_costs_its_sample_alone(disk: Disk) -> None:
    """A flipped bit costs its own sample, which can be stored again."""
    disk.fill()
    content = disk.path.read_bytes()
    with closing(disk.open()) as store:
        store.lookup(np.array(ALL), verify=True)
        parts = {index: max(store.layout.fetch(store.arc.slot(index)), key=len) for index in (0, 7, LENGTH - 1)}
    for index, part in parts.items():
        damaged = bytearray(content)
        damaged[content.index(part) + len(part) // 2] ^= 4
        disk.path.write_bytes(damaged)
        assert disk.served() == [other for other in ALL if other != index]
        disk.fill([index])
        assert disk.served() == ALL


@pytest.mark.parametrize("rounds", [2, pytest.param(5000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_damaged_files_serve_no_wrong_sample(disk: Disk, rounds: int) -> None:
    """Bits flip anywhere behind the header, columns and checksums included, or the file is cut off anywhere."""
    disk.fill()
    content = disk.path.read_bytes()
    lost = 0
    for seed in range(rounds):
        generator = random.Random(seed)
        flipped = bytearray(content)
        flip(flipped, generator, count=generator.choice((1, 10, 300)))
        for damaged in (flipped, content[: generator.randrange(HEADER_BYTES, len(content))]):
            disk.path.write_bytes(damaged)
            lost += LENGTH - len(disk.served())
            disk.fill()
            disk.served()
    assert lost


@pytest.mark.parametrize("rounds", [5, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_a_power_cut_serves_no_wrong_sample(disk: Disk, rounds: int) -> None:
    """After a power cut any pages that were written since the last sync may be lost. Synced samples are served."""
    disk.fill(ALL[:20])
    before = disk.path.read_bytes()
    disk.fill(ALL[20:])
    after = disk.path.read_bytes()
    assert before != after
    lost = 0
    for seed in range(rounds):
        disk.path.write_bytes(power_cut(before, after, random.Random(seed)))
        found = disk.served()
        assert set(ALL[:20]) <= set(found), "what was synced is there"
        lost += LENGTH - len(found)
        disk.fill()
        assert disk.served() == ALL
    assert lost


def test_records_after_a_power_cut_are_not_overwritten(tmp_path: Path) -> None:
    """The free offset may be older than the columns that lead to records: new records lie behind all of them."""
    disk = Disk(tmp_path, "records")
    disk.fill(ALL[:4])
    before = disk.path.read_bytes()
    disk.fill(ALL[4:30])
    image = bytearray(disk.path.read_bytes())
    with closing(disk.open()) as store:
        numbers = slice(HEADER_BYTES, HEADER_BYTES + store.layout.scratch_bytes)
    assert image[numbers] != before[numbers]
    image[numbers] = before[numbers]
    disk.path.write_bytes(image)
    with closing(disk.open()) as store:
        store.lookup(np.array(ALL), verify=True)
        assert filled(store, ALL[30:]) == ALL[30:]
        assert served(store) == ALL
    assert disk.served() == ALL


def test_what_the_disk_refuses_is_not_stored(disk: Disk, monkeypatch: Any, caplog: Any) -> None:
    """A refused write is one warning. Earlier samples are served. When others have made room, samples are stored."""
    disk.fill(ALL[:10])
    now, free = [time.monotonic()], [2**40]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Segment, "free_bytes", property(lambda segment: free[0]))
    with closing(disk.open()) as store:
        with monkeypatch.context() as patch:
            refuse_stores(patch, errno.EROFS)
            assert filled(store, ALL[10:]) == []
        free[0], now[0] = 0, now[0] + 60
        assert filled(store, ALL[10:]) == []
        assert len([entry for entry in caplog.records if "the cache stops" in entry.message]) == 1
        assert os.strerror(errno.EROFS) in caplog.text
        assert served(store) == ALL[:10]
        free[0], now[0] = 2**40, now[0] + 60
        assert filled(store, ALL[10:]) == ALL[10:]
    assert disk.served() == ALL


def test_who_has_no_room_for_a_word_reads_all_the_same(disk: Disk, monkeypatch: Any) -> None:
    """A process that can write nothing serves what was stored. When there is room, it stores the rest."""
    disk.fill(ALL[:10])
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with monkeypatch.context() as patch:
        refuse_stores(patch)
        store = disk.open()
        assert served(store) == ALL[:10]
        assert filled(store, ALL) == []
    now[0] += 60
    assert filled(store, ALL) == ALL[10:]
    assert served(store) == ALL
    store.close()
    assert disk.served() == ALL


def fill_until_full(disk: Any, layout: str) -> Any:
    """What is served from a disk that becomes full after ten samples, later, and after others have made room."""
    faulthandler.disable()  # a SIGBUS is reported by its number alone
    store, log = Disk(disk.directory, layout).open(), Log(logging.WARNING)
    filled(store, ALL[:10])
    disk.take_all()
    stored = [*ALL[:10], *filled(store, ALL[10:])]
    assert served(store) == stored
    store.close()
    store = Disk(disk.directory, layout).open()  # who has no room for a claim reads all the same
    assert served(store) == stored
    store.close()
    disk.make_room()
    store = Disk(disk.directory, layout).open()
    assert served(store) == stored
    filled(store)
    return len(stored), served(store), log.lines


@pytest.mark.processes
@pytest.mark.parametrize(("filesystem", "mib"), [("tmpfs", 96), ("ext4", 96), ("btrfs", 256)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_has_no_room_on_the_disk_is_not_stored(layout: str, filesystem: str, mib: int, full_disk: Any) -> None:
    """A full disk is one warning; what was stored is served, to the next job, too, which stores the rest where it has
    room. A filesystem that copies on write (btrfs) has none for any write then."""
    count, served_later, [warning] = full_disk(fill_until_full, layout, filesystem=filesystem, mib=mib)
    assert 10 <= count < LENGTH
    assert served_later == ALL
    assert "the cache stops" in warning


def test_a_block_that_cannot_be_read_is_loaded_again(disk: Disk, monkeypatch: Any, caplog: Any) -> None:
    """An error of the disk is no error of the training; its slot is empty, and the disk is left alone for a while."""
    disk.fill()
    with closing(disk.open()) as store:
        break_one_block(monkeypatch)
        with caplog.at_level(logging.WARNING):
            assert store.ready_slot(5, verify=True) == NO_SLOT
            assert store.ready_slot(6, verify=True) == NO_SLOT
        assert "is not read for" in caplog.text
        assert store.get(6) is None
    assert disk.served() == [index for index in ALL if index != 5]


def test_only_a_directory_on_a_disk_of_this_machine_is_taken(tmp_path: Path, monkeypatch: Any) -> None:
    """A missing directory is made for this user alone, if its parent exists. The error for a network filesystem, on
    which a mapping does not show what other machines write, or without xxhash, tells the cause and the way out."""
    path = check_directory(str(tmp_path / "caches"))
    assert (os.stat(path).st_mode & 0o777, os.listdir(path)) == (0o700, [])
    for bad, words in (
        (tmp_path / "no" / "such", "No such file"),
        (shutil.copy(__file__, tmp_path / "file"), "Not a directory"),
        ("/proc/1", ""),
    ):
        with pytest.raises(DiskError, match=f"cannot hold a cache: {words}.*omit dir="):
            check_directory(str(bad))
    for kind in ("nfs4", "fuse.dfuse", "wekafs"):
        line = f"22 21 0:39 / /some\\040disk rw shared:9 - {kind} server:/ rw\n"
        told = {"mountinfo": "21 1 0:99999 / / rw - ext4 none rw\n" + line}
        monkeypatch.setattr(
            Path, "read_text", lambda path, told=told, **_: told.get(path.name, "pos: 0\nmnt_id:\t22\n")
        )
        with pytest.raises(DiskError, match=rf"its filesystem \({kind}\) may not show"):
            check_directory(path)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "")  # unknown
    check_directory(path)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match=r"lightning-stocache\[disk\]"):
        Store.create(SampleSpec.infer(1), Arc(4, 4), directory=path)


def test_another_index_or_file_is_no_proof(tmp_path: Path) -> None:
    """The bytes of one sample under another index, or in another file, are not what was stored there."""
    disk = Disk(tmp_path, "rows")
    words = [sample("rows", index)[0] for index in (0, 1)]
    with closing(disk.open()) as store:
        assert all(store.fill(index, (words[index], 7)) for index in (0, 1))
        begin = HEADER_BYTES + store.layout.offset_in("sum", 0)
        entries = [begin + store.arc.slot(index) * ENTRY.itemsize for index in (0, 1)]
    content = disk.path.read_bytes()
    rows = [content.index(bytes(each.numpy())) for each in words]
    swapped, stranger = bytearray(content), bytearray(content)
    for (one, other), nbytes in ((rows, words[0].nbytes), (entries, ENTRY.itemsize)):
        swapped[one : one + nbytes], swapped[other : other + nbytes] = (
            content[other : other + nbytes],
            content[one : one + nbytes],
        )
    stranger[8:24] = bytes(16)  # the token
    for image, found in ((content, [True, True]), (swapped, [False, False]), (stranger, [False, False])):
        disk.path.write_bytes(image)
        with closing(disk.open()) as store:
            assert (store.lookup(np.array([0, 1]), verify=True) != NO_SLOT).tolist() == found


def load(disk: Disk) -> Any:
    store = disk.open()
    assert store.divide([3, 4]) == ([3, 4], [])
    stop()
    return store


@pytest.mark.processes
def test_what_another_process_loads_is_waited_for_but_not_for_ever(
    tmp_path: Path, monkeypatch: Any, caplog: Any, stopped: Any
) -> None:
    """A stopped process is waited for once. When it has ended, its samples are free."""
    monkeypatch.setattr(store_module, "PATIENCE", 0.2)
    disk = Disk(tmp_path, "rows")
    loading = stopped(load, disk)
    with caplog.at_level(logging.WARNING), closing(disk.open()) as store:
        assert store.divide([2, 3, 4, 5]) == ([2, 5], [3, 4])
        store.release([2, 5])
        assert [store.wait(3), store.wait(4)] == [False, False]
    loading.kill()
    assert len(caplog.records) == 1, "who has waited in vain does not wait again"
    with closing(disk.open()) as store:
        assert store.divide([3, 4]) == ([3, 4], [])
        store.release([3, 4])


def test_the_end_of_the_records_is_found_among_millions_of_slots(tmp_path: Path) -> None:
    """Behind the last sound record, in whatever part of the slots it is: no record is overwritten."""
    count = 3 << 20
    arc, codec = Arc(count, count), codec_of("records")
    size, manifest = Store.plan(codec, arc, granted=count * ON_DISK.slot_bytes + GRANTED, on_disk=True)

    def opened() -> Any:
        segment, found = open_named("many", size, manifest, str(tmp_path), partial(Store.mend, codec))
        return Store.open(segment, codec, found.geometry, count)

    indices = [5, 2 << 20, 1 << 20, 6]
    with closing(opened()) as store:
        ends = []
        for index in indices:
            assert store.fill(index, sample("records", index))
            ends.append(store.layout.free)
    with closing(opened()) as store:
        assert store.layout.free == ends[3]
        store.segment.store(ends[3] - 8, memoryview(bytes(8)))
    with closing(opened()) as store:
        assert store.layout.free == ends[2], "the last record is damaged"
        assert store.fill(7, sample("records", 7))
        places = store.lookup(np.array([*indices, 7]), verify=True)
        assert list(map(number_of, store.read(places[places != NO_SLOT]))) == [*indices[:3], 7]
