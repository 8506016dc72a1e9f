"""pack: what comes out is the source, each index is read once, and what stops it loses nothing."""

import fcntl
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.io import read_image
from torchvision.transforms import v2

from lightning_stocache import LMDBSource
from lightning_stocache.source import pack as packing
from lightning_stocache.source.lmdb_source import LMDBError
from lightning_stocache.source.pack import PackError, pack
from lightning_stocache.source.samples import bits
from tests.processes import Child, wait_until, without_room
from tests.sources import Made, write_photos

lmdb = pytest.importorskip("lmdb")

LENGTH = 60


class Source(Dataset[Any]):
    """Samples of many sizes; notes each read in a file, may be slow, and may do something else at one index.

    Args:
        reads: the file.
        seconds: per read.
        at: the index where it is odd.
        odd: what it does there.
    """

    def __init__(self, reads: Path, seconds: float = 0.0, at: int = -1, odd: Any = None, size: int = 500) -> None:
        self.reads, self.seconds, self.at, self.odd, self.size = str(reads), seconds, at, odd, size

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        with open(self.reads, "ab") as file:
            file.write(b"%d\n" % index)
        time.sleep(self.seconds)
        if index == self.at:
            return self.odd()
        chance = random.Random(index)
        return {"x": torch.full((chance.randrange(self.size),), float(index)), "name": "x" * index}, index


def reads_of(path: Path) -> Counter[int]:
    return Counter(map(int, path.read_text().split()))


def expected() -> list[Any]:
    source = Source(Path(os.devnull))
    return [bits(source[index]) for index in range(LENGTH)]


def packed(path: Path) -> list[Any]:
    return [bits(sample) for sample in LMDBSource(path)]


def values(path: Path) -> dict[bytes, bytes]:
    """All that lies in an LMDB."""
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment:
        with environment.begin() as transaction:
            return dict(transaction.cursor())


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_the_source_comes_out_and_each_index_is_read_once(tmp_path: Path, workers: int) -> None:
    """With workers and without; a second call writes nothing, and reads four, to compare them."""
    source = Source(tmp_path / "reads")
    assert pack(source, tmp_path / "x.lmdb", workers=workers) == LENGTH
    assert packed(tmp_path / "x.lmdb") == expected()
    assert reads_of(tmp_path / "reads") == Counter(range(LENGTH))
    assert pack(source, tmp_path / "x.lmdb", workers=workers) == 0
    assert reads_of(tmp_path / "reads") == Counter(range(LENGTH)) + Counter((0, 19, 39, 59))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reads", "x.lmdb"]


def test_the_generator_of_the_user_is_not_drawn_from(tmp_path: Path) -> None:
    """A loader draws a seed; not here."""
    before = torch.get_rng_state()
    pack([1, 2], tmp_path / "x")
    assert torch.equal(torch.get_rng_state(), before)


# ---- stopped, and gone on with ----


def broken() -> Any:
    raise ValueError("no such file")


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "at"), [(0, 17), (2, 1), (2, LENGTH - 1)])
def test_an_error_of_the_source_loses_nothing(tmp_path: Path, workers: int, at: int) -> None:
    """It is told with the index; what came before is kept, and four of that are read again."""
    path = tmp_path / "x.lmdb"
    with pytest.raises(PackError, match=f"sample {at} of Source: ValueError: no such file"):
        pack(Source(tmp_path / "first", at=at, odd=broken), path, workers=workers)
    with pytest.raises(LMDBError, match=f"has {at} of the {LENGTH} samples"):
        LMDBSource(path)
    assert pack(Source(tmp_path / "again"), path, workers=workers) == LENGTH - at
    assert packed(path) == expected()
    compared = {number * (at - 1) // 3 for number in range(4)}
    assert reads_of(tmp_path / "again") == Counter([*compared, *range(at, LENGTH)])


def interrupted() -> Any:
    raise KeyboardInterrupt


def test_ctrl_c_keeps_what_is_loaded(tmp_path: Path) -> None:
    """And comes through."""
    path = tmp_path / "x.lmdb"
    with pytest.raises(KeyboardInterrupt):
        pack(Source(tmp_path / "reads", at=30, odd=interrupted, size=10**6), path)
    assert 0 < LENGTH - pack(Source(tmp_path / "reads", size=10**6), path) <= 30


def slowly(path: str, folder: str, workers: int) -> None:
    packing.BATCH_SECONDS = 0.005
    pack(Source(Path(folder) / "reads", seconds=0.02), path, workers=workers)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pack_that_is_killed_goes_on_where_it_was(tmp_path: Path, workers: int) -> None:
    """Killed at random moments until it is whole, it holds what one that was never stopped does."""
    path, chance, found, ended = tmp_path / "x.lmdb", random.Random(workers), [0], False
    while not ended:
        child = Child(slowly, str(path), str(tmp_path), workers)
        _wait_for_a_commit(path, child)
        child.process.join(chance.uniform(0.0, 0.1))
        ended = child.process.exitcode is not None
        child.kill()
        wait_until(lambda: _is_free(path))
        found.append(max(len(values(path)) - 1, 0))  # killed before the first commit, it holds nothing
    assert len(set(found)) > 3, "the kills came too early or too late"
    assert found == sorted(found)
    pack(Source(tmp_path / "whole"), tmp_path / "whole.lmdb")
    assert values(path) == values(tmp_path / "whole.lmdb")
    assert packed(path) == expected()


def _is_free(path: Path) -> bool:
    """Whether no process has the lock: workers have a copy of it until they end, half a second after their parent."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _wait_for_a_commit(path: Path, child: Child) -> None:
    before = _version(path)
    wait_until(lambda: _version(path) != before or child.process.exitcode is not None)


def _version(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() and path.stat().st_size > 8192 else 0


def test_one_that_was_killed_before_the_manifest_says_all_is_completed(tmp_path: Path) -> None:
    """All samples are there; nothing is read but the four that are compared."""
    path = tmp_path / "x"
    with pytest.raises(PackError):
        pack(Source(tmp_path / "reads", at=LENGTH - 1, odd=broken), path)
    source = Source(tmp_path / "reads")
    pack(source, path)
    lines = len((tmp_path / "reads").read_text().split())
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24) as environment:
        with environment.begin(write=True) as transaction:
            key = b"#lightning_stocache"
            transaction.put(key, transaction.get(key).replace(b'"complete": true', b'"complete": false'))
    assert pack(source, path) == 0
    assert len((tmp_path / "reads").read_text().split()) == lines + 4
    assert packed(path) == expected()


def test_samples_of_any_size_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to guess the size of the map, not even for a sample that is larger than all before it."""
    monkeypatch.setattr(packing, "BATCH_BYTES", 1 << 14)
    samples = [os.urandom(size) for size in (10, 10**5, 10**3, 3 * 10**6, 10, 10**4)]
    pack(samples, tmp_path / "x")
    assert list(LMDBSource(tmp_path / "x")) == samples
    assert (tmp_path / "x").stat().st_size > 1 << 21


def fill_the_disk() -> Any:
    path, reads = Path("/dev/shm/x.lmdb"), Path("/dev/shm/reads")
    packing.BATCH_BYTES = 1 << 20
    ballast = Path("/dev/shm/ballast")
    ballast.write_bytes(bytes(60 << 20))
    try:
        pack(Source(reads, size=10**6), path)
    except LMDBError as error:
        said = str(error)
    kept = len(values(path)) - 1
    ballast.unlink()
    written = pack(Source(reads, size=10**6), path)
    source = Source(reads, size=10**6)
    same = [bits(sample) for sample in LMDBSource(path)] == [bits(source[index]) for index in range(LENGTH)]
    return said, kept, written, same


@pytest.mark.processes
def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    """It says how much is free, and once there is room the same call goes on."""
    said, kept, written, same = without_room(fill_the_disk, mib=150)
    assert "/dev/shm/x.lmdb cannot be written" in said
    assert "make room, and run the same command again" in said
    assert 0 < kept < LENGTH
    assert written == LENGTH - kept
    assert same


# ---- what lies there already ----


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    """A file, an LMDB of others, a pack of another source, length or fingerprint: all stay as they are."""
    (tmp_path / "text").write_text("precious" * 1000)
    with lmdb.open(str(tmp_path / "foreign"), subdir=False, lock=False) as environment:
        with environment.begin(write=True) as transaction:
            transaction.put(b"a", b"precious")
    pack([1, 2, 3], tmp_path / "mine")
    for name, words in (("text", "is not an LMDB"), ("foreign", "has not packed"), ("mine", "samples 3, here 60")):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(LMDBError, match=words):
            pack(Source(tmp_path / "reads"), tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(LMDBError, match="fingerprint '', here 'v2'"):
        pack([1, 2, 3], tmp_path / "mine", fingerprint="v2")
    assert not (tmp_path / "reads").exists()


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


def hold(path: str, reads: Path) -> None:
    pack(Source(reads, at=1, odd=lambda: time.sleep(1000)), path)


@pytest.mark.processes
def test_two_processes_do_not_pack_into_one_file(tmp_path: Path) -> None:
    """The second is refused at once."""
    path = tmp_path / "x"
    child = Child(hold, str(path), tmp_path / "held")
    # It locks the file before it reads: who only sees the file may be the first to lock it.
    wait_until(lambda: (tmp_path / "held").exists() and len(reads_of(tmp_path / "held")) == 2)
    try:
        with pytest.raises(LMDBError, match="another process is packing into"):
            pack(Source(tmp_path / "reads"), path)
    finally:
        child.kill()
    pack(Source(tmp_path / "reads"), path)
    assert packed(path) == expected()


# ---- samples that are no good ----


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_what_cannot_be_packed_is_said_before_anything_is_written(tmp_path: Path, workers: int) -> None:
    """With its place in the sample, and what can be packed."""
    with pytest.raises(
        PackError, match=r"sample 0 of list: sample\['a'\]\[1\] is a set, which cannot.*What can be packed"
    ):
        pack([{"a": (1, {2})}] * 3, tmp_path / "x", workers=workers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_a_random_source_is_refused(tmp_path: Path, workers: int) -> None:
    """One draw would be frozen for all epochs; unless that is what the user wants."""
    source = Made(lambda index: torch.rand(2), 3)
    with pytest.raises(PackError, match="sample 0 of Made: reading it moves the generator of torch"):
        pack(source, tmp_path / "x", workers=workers)
    assert not (tmp_path / "x").exists()
    assert pack(source, tmp_path / "x", workers=workers, allow_random=True) == 3


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


def unsendable() -> Any:
    raise Unsendable("no such file")


@pytest.mark.processes
def test_an_error_that_cannot_be_sent_is_told_all_the_same(tmp_path: Path) -> None:
    """A worker that could not send it would say nothing, and its parent would wait for ever."""
    with pytest.raises(PackError, match="sample 3 of Source: Unsendable: no such file") as caught:
        pack(Source(tmp_path / "reads", at=3, odd=unsendable), tmp_path / "x", workers=1)
    assert "in unsendable" in caught.value.__notes__[0]


# ---- files ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos")


@pytest.mark.parametrize("loader", [None, read_image], ids=["PIL", "tensor"])
def test_files_are_kept_as_they_are(tmp_path: Path, folder: Path, loader: Any) -> None:
    """Without the source's transform, which LMDBSource takes; with the names of the classes."""
    flip = v2.RandomHorizontalFlip(1.0)
    arguments = {} if loader is None else {"loader": loader}
    pack(ImageFolder(str(folder), v2.RandomCrop(8), **arguments), tmp_path / "x", encoded=True)
    source, plain = LMDBSource(tmp_path / "x"), ImageFolder(str(folder), **arguments)
    assert [bits(sample) for sample in source] == [bits(sample) for sample in plain]
    assert source.classes == ["cat", "dog"]
    assert (folder / "cat" / "0.jpg").read_bytes() in source.read(0)
    flipped = ImageFolder(str(folder), flip, lambda label: label + 10, **arguments)
    again = LMDBSource(tmp_path / "x", transform=flip, target_transform=lambda label: label + 10)
    assert [bits(sample) for sample in again] == [bits(sample) for sample in flipped]


def test_files_of_a_subset_are_kept(tmp_path: Path, folder: Path) -> None:
    """Of a Subset of a Subset, with its labels."""
    subset = Subset(Subset(ImageFolder(str(folder)), [5, 3, 2, 0]), [2, 0, 1])
    pack(subset, tmp_path / "x", encoded=True)
    assert [bits(sample) for sample in LMDBSource(tmp_path / "x")] == [bits(subset[i]) for i in range(3)]


class Files(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.read(index), index)

    def read(self, index: int) -> Any:
        return bytes([index] * 4)

    def decode(self, content: Any, index: int) -> Any:
        return sum(content)


def test_what_a_source_of_the_users_reads_is_kept(tmp_path: Path) -> None:
    """Its decoding is a transform then."""
    pack(Files(), tmp_path / "x", encoded=True)
    assert LMDBSource(tmp_path / "x")[2] == b"\2\2\2\2"
    assert LMDBSource(tmp_path / "x", transform=sum)[2] == 8
