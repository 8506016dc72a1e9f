"""pack: what comes out is the source, each index is read once, and what stops it loses nothing."""

import fcntl
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder
from torchvision.io import read_image
from torchvision.transforms import v2

from lightning_stocache import LMDBSource
from lightning_stocache.source import pack as packing
from lightning_stocache.source.lmdb_source import MANIFEST_KEY, LMDBError
from lightning_stocache.source.pack import PackError, pack
from lightning_stocache.source.samples import bits
from tests.odds import Disk
from tests.processes import Child, wait_until
from tests.sources import Allowance, CountedFiles, CountedSource, Made, lmdb_values, write_lmdb, write_photos

pytest.importorskip("lmdb")

LENGTH = 60


def source(reads: Path | str = "", before: Callable[[int], object] = lambda index: None, size: int = 500) -> Made:
    """Samples of many sizes, whose reads are noted in a file; `before` is called with the index of each."""

    def make(index: int) -> Any:
        before(index)
        chance = random.Random(index)
        return {"x": torch.full((chance.randrange(size),), float(index)), "name": "x" * index}, index

    return Made(make, LENGTH, reads)


def raising(at: int, error: Exception, index: int) -> None:
    """For `before`: an error of one index."""
    if index == at:
        raise error


def reads_of(path: Path) -> Counter[int]:
    return Counter(CountedSource(LENGTH, log_path=path).loaded)


def samples_of(dataset: Any) -> list[Any]:
    return [bits(dataset[index]) for index in range(len(dataset))]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_source_comes_out_and_each_index_is_read_once(tmp_path: Path, workers: int) -> None:
    """With workers and without; a second call writes nothing, and reads four, to compare them. Nothing is drawn."""
    path, reads, state = tmp_path / "x.lmdb", tmp_path / "reads", torch.get_rng_state()
    assert pack(source(reads), path, workers=workers) == LENGTH
    assert samples_of(LMDBSource(path)) == samples_of(source())
    assert reads_of(reads) == Counter(range(LENGTH))
    assert pack(source(reads), path, workers=workers) == 0
    assert reads_of(reads) == Counter(range(LENGTH)) + Counter((0, 19, 39, 59))
    assert sorted(tmp_path.iterdir()) == [reads, path]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("workers", "at"), [(0, 1), (2, LENGTH - 1)])
def test_an_error_of_the_source_loses_nothing(tmp_path: Path, workers: int, at: int) -> None:
    """It is told with the index; what came before is kept, and four of that are read again."""
    path = tmp_path / "x.lmdb"
    with pytest.raises(PackError, match=f"sample {at} of Made: ValueError: no such file"):
        pack(source(before=partial(raising, at, ValueError("no such file"))), path, workers=workers)
    with pytest.raises(LMDBError, match=f"has {at} of the {LENGTH} samples"):
        LMDBSource(path)
    assert pack(source(tmp_path / "again"), path, workers=workers) == LENGTH - at
    assert samples_of(LMDBSource(path)) == samples_of(source())
    compared = {number * (at - 1) // 3 for number in range(4)}
    assert reads_of(tmp_path / "again") == Counter([*compared, *range(at, LENGTH)])


@pytest.mark.processes
def test_a_pack_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed again and again after a commit, it ends as one that was never stopped, and reads hardly any again."""
    path, chance, found = tmp_path / "x.lmdb", random.Random(2), [0]
    allowance = Allowance(tmp_path / "allowed", 6)  # for each of two workers, so that no run comes to its end

    def within_allowance() -> None:
        packing.BATCH_SECONDS = 0.005
        pack(source(before=allowance), path, workers=2)

    while len(set(found)) < 4:
        before = _version(path)
        child = Child(within_allowance)
        wait_until(lambda: child.process.exitcode is not None or _version(path) != before)  # noqa: B023
        assert child.process.exitcode is None, "it has ended"
        time.sleep(chance.uniform(0.0, 0.02))
        child.kill()
        wait_until(lambda: _is_free(path))
        found.append(max(len(lmdb_values(path)) - 1, 0))  # killed before the first commit, it holds nothing
    assert found == sorted(found)
    assert pack(source(), path) == LENGTH - found[-1]
    pack(source(), tmp_path / "whole.lmdb")
    whole = lmdb_values(tmp_path / "whole.lmdb")
    assert lmdb_values(path) == whole
    write_lmdb(path, {MANIFEST_KEY: whole[MANIFEST_KEY].replace(b'"complete": true', b'"complete": false')})
    assert pack(source(tmp_path / "reads"), path) == 0
    assert reads_of(tmp_path / "reads").total() == 4
    assert lmdb_values(path) == whole


def _is_free(path: Path) -> bool:
    """Whether no process has the lock: workers have a copy of it until they end, half a second after their parent."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _version(path: Path) -> int:
    """It changes with each commit."""
    return path.stat().st_mtime_ns if path.exists() and path.stat().st_size > 8192 else 0


def fill_the_disk(disk: Disk) -> Any:
    path = disk.directory / "x.lmdb"
    packing.BATCH_BYTES = 1 << 20
    (disk.directory / "other").write_bytes(bytes(60 << 20))
    try:
        pack(source(size=10**6), path)
    except LMDBError as error:
        said = str(error)
    kept = len(lmdb_values(path)) - 1
    disk.make_room()
    written = pack(source(size=10**6), path)
    return said, kept, written, samples_of(LMDBSource(path)) == samples_of(source(size=10**6))


@pytest.mark.processes
def test_a_full_disk_is_an_error_and_loses_nothing(full_disk: Any) -> None:
    """It says how much is free, and once there is room the same call goes on."""
    said, kept, written, same = full_disk(fill_the_disk, mib=150)
    assert "/disk/x.lmdb cannot be written" in said
    assert "make room, and run the same command again" in said
    assert 0 < kept < LENGTH
    assert written == LENGTH - kept
    assert same


def test_a_file_that_would_be_too_large_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    """It names the limit, not the disk, and a way without it."""
    monkeypatch.setattr(packing, "MAP_BYTES", 1 << 20)
    path = tmp_path / "x.lmdb"
    with pytest.raises(LMDBError, match=r"larger than 1,048,576 bytes.*parts of the source.*ConcatDataset"):
        pack([bytes(1 << 19)] * 4, path)


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    """A file, an LMDB of others, another pack: all stay as they are. A second pack into one file is refused at once."""
    (tmp_path / "text").write_text("precious" * 1000)
    write_lmdb(tmp_path / "foreign", {"a": b"precious"})
    pack([1, 2, 3], tmp_path / "mine")
    for name, words in (("text", "is not an LMDB"), ("foreign", "has not packed"), ("mine", "samples 3, here 60")):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(LMDBError, match=words):
            pack(source(tmp_path / "reads"), tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(LMDBError, match="fingerprint '', here 'v2'"):
        pack([1, 2, 3], tmp_path / "mine", fingerprint="v2")
    assert not reads_of(tmp_path / "reads")

    def pack_too(index: int) -> None:
        if index == 1:
            with pytest.raises(LMDBError, match="another process is packing into"):
                pack(source(), tmp_path / "shared")

    assert pack(source(before=pack_too), tmp_path / "shared") == LENGTH


def test_other_data_of_the_same_class_and_length_is_found_out(tmp_path: Path) -> None:
    """Where it was stopped, and where all of it is there; what differs in the last bits alone is the same."""
    with pytest.raises(PackError):
        pack(["a", "b", {1}], tmp_path / "x")
    with pytest.raises(LMDBError, match="holds other data: its sample 1 is another one"):
        pack(["a", "other", "c"], tmp_path / "x")
    assert pack(["a", "b", "c"], tmp_path / "x") == 1
    with pytest.raises(LMDBError, match="holds other data: its sample 0 is another one"):
        pack(["other", "b", "c"], tmp_path / "x")
    assert list(LMDBSource(tmp_path / "x")) == ["a", "b", "c"]
    assert [pack([{"x": number}], tmp_path / "y") for number in (0.1 + 0.2, 0.3)] == [1, 0]


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


@pytest.mark.processes
def test_what_cannot_be_packed_is_said_before_anything_is_written(tmp_path: Path) -> None:
    """With its place; a worker tells an error that it could not send; of a random source one draw would be frozen."""
    path = tmp_path / "x"
    words = r"sample 0 of list: sample\['a'\]\[1\] is a set, which cannot.*What can be packed"
    with pytest.raises(PackError, match=words):
        pack([{"a": (1, {2})}] * 3, path, workers=2)
    with pytest.raises(PackError, match="sample 0 of Made: Unsendable: no such file") as caught:
        pack(source(before=partial(raising, 0, Unsendable("no such file"))), path, workers=1)
    assert "in raising" in caught.value.__notes__[0]
    random_source = Made(lambda index: torch.rand(2), 3)
    for workers in (0, 1):
        with pytest.raises(PackError, match="sample 0 of Made: reading it moves the generator of torch"):
            pack(random_source, path, workers=workers)
    assert list(tmp_path.iterdir()) == []
    assert pack(random_source, path, freeze_random=True) == 3


@pytest.mark.parametrize("loader", [None, read_image], ids=["PIL", "tensor"])
def test_files_are_kept_as_they_are(tmp_path: Path, loader: Any) -> None:
    """Without the transform, with the classes' names; also of a Subset, and of what a user's source reads."""
    folder, flip = write_photos(tmp_path / "photos"), v2.RandomHorizontalFlip(1.0)
    arguments = {} if loader is None else {"loader": loader}
    pack(ImageFolder(str(folder), v2.RandomCrop(8), **arguments), tmp_path / "x", encoded=True)
    packed = LMDBSource(tmp_path / "x")
    assert samples_of(packed) == samples_of(ImageFolder(str(folder), **arguments))
    assert packed.classes == ["cat", "dog"]
    assert (folder / "cat" / "0.jpg").read_bytes() in packed.read(0)
    flipped = ImageFolder(str(folder), flip, lambda label: label + 10, **arguments)
    again = LMDBSource(tmp_path / "x", transform=flip, target_transform=lambda label: label + 10)
    assert samples_of(again) == samples_of(flipped)
    subset = Subset(Subset(ImageFolder(str(folder), **arguments), [5, 3, 2, 0]), [2, 0, 1])
    pack(subset, tmp_path / "subset", encoded=True)
    assert samples_of(LMDBSource(tmp_path / "subset")) == samples_of(subset)
    files = CountedFiles(lambda index: bytes([index] * 4), lambda content, index: sum(content))
    pack(files, tmp_path / "files", encoded=True)
    assert (LMDBSource(tmp_path / "files")[2], LMDBSource(tmp_path / "files", transform=sum)[2]) == (b"\2\2\2\2", 8)
