"""A rolling cache on a disk: the next job trains on what is resident, and loads nothing of that again."""

import os
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from lightning_stocache import CachedLoader, RollingCache, RollingWriter, SampleSpec
from lightning_stocache.cache.layout import contents_of
from lightning_stocache.node import processes
from lightning_stocache.node.files import prefix
from lightning_stocache.node.named import clean, named_segments
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup.named_cache import CacheInUseError
from lightning_stocache.setup.same_data import FingerprintError
from tests.processes import call, hanging, wait_until
from tests.ranks import run_ranks
from tests.sources import Allowance, CountedSource

LENGTH = 40
SHAPE = (3, 16, 16)
SPEC = SampleSpec.infer(CountedSource(LENGTH, SHAPE).expected(0))
EACH = SPEC.nbytes + 8 + 8 + 8 + 8  # state, time, checksum, index
COMPARED = 4  # samples that a job reads to compare them

pytestmark = pytest.mark.processes


class Texts(CountedSource):
    """Samples that are no rows, of many sizes."""

    def expected(self, index: int) -> Any:
        return {"text": f"{index}," * (index % 17), "image": super().expected(index)[0], "index": index}


class Limited(CountedSource):
    """Each process may load so many samples."""

    allowed: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.allowed is not None:
            self.allowed(index)
        return super().__getitem__(index)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., RollingCache]]:
    pools = []

    def make(source: Any, budget: Any = "100%", **more: Any) -> RollingCache:
        more = {"spec": SPEC, "fillers": 2, "minimum": 1, "dir": str(tmp_path / "pools"), "name": "pool"} | more
        pools.append(RollingCache(source, budget, **more))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def epoch(pool: RollingCache, source: Any) -> list[int]:
    """The indices of an epoch's samples, each compared with the source's. Labels are unique."""
    found = []
    for batch in CachedLoader(pool, 8, shuffle=True, collate_fn=list):
        for image, label in batch:
            assert torch.equal(image, source.expected(label)[0])
            found.append(int(label))
    return sorted(found)


def counted(tmp_path: Path, log: str, **more: Any) -> Limited:
    return Limited(LENGTH, SHAPE, tmp_path / log, classes=LENGTH, **more)


def path_of(tmp_path: Path) -> Path:
    return tmp_path / "pools" / f"{prefix()}pool"


def all_resident(pool: RollingCache, count: int = LENGTH) -> None:
    wait_until(lambda: pool.stats().resident == count)


def test_the_next_job_loads_nothing_that_is_resident(opened, tmp_path):
    """If the whole source has room, the first job loads each sample once, and the next one only what is compared."""
    first = counted(tmp_path, "first")
    pool = opened(first)
    all_resident(pool)
    assert epoch(pool, first) == list(range(LENGTH))
    assert sorted(first.loaded) == list(range(LENGTH))
    pool.close()
    second = counted(tmp_path, "second")
    pool = opened(second)
    assert epoch(pool, second) == list(range(LENGTH))
    wait_until(lambda: not [child for child in active_children() if child.name.startswith("filler")])
    assert second.loads == COMPARED
    stats = pool.stats()
    assert (stats.resident, stats.appended, stats.evicted, stats.memory_bytes) == (LENGTH, 0, 0, 0)
    assert stats.disk_bytes > LENGTH * SPEC.nbytes
    assert stats.times_seen == 1


def test_a_damaged_sample_is_loaded_again(opened, tmp_path):
    """The fillers verify what is resident, and load what is not sound, alone."""
    source = counted(tmp_path, "first")
    pool = opened(source)
    all_resident(pool)
    pool.close()
    content = bytearray(path_of(tmp_path).read_bytes())
    for index in (7, 31):
        content[content.index(bytes(source.expected(index)[0].numpy())) + 5] ^= 64
    path_of(tmp_path).write_bytes(content)
    second = counted(tmp_path, "second")
    pool = opened(second)
    wait_until(lambda: pool.stats().appended == 2)
    all_resident(pool)
    assert epoch(pool, second) == list(range(LENGTH))
    assert {7, 31} <= set(second.loaded)
    assert second.loads <= COMPARED + 2


def drawn(tmp_path: Path, log: str, opened: Any, loads: int, **more: Any) -> list[int]:
    """The indices that the only filler of a job draws: so many, behind what is compared at set-up."""
    source, done = counted(tmp_path, log), len(list(tmp_path.glob("*")))
    source.allowed = Allowance(tmp_path / f"allowed {done}", loads)
    pool = opened(source, 24 * EACH, fillers=1, fingerprint="v1", **more)
    wait_until(lambda: pool.stats().appended == loads)
    pool.close()
    return source.loaded[-loads:]


def test_fillers_go_on_behind_what_the_last_job_drew(opened, tmp_path, caplog):
    """Over some jobs each sample of the source is drawn once per permutation. Other draws begin anew, and say so."""
    order = [index for job in range(4) for index in drawn(tmp_path, f"job {job}", opened, 10)]
    fixed = [drawn(tmp_path, "same", opened, 9), drawn(tmp_path, "same again", opened, 9)]
    assert len(set(fixed[0] + fixed[1])) == 18
    assert "from the beginning again" not in caplog.text
    assert len(set(order)) >= LENGTH - 4  # a sample that a filler is loading when its job ends is left out
    assert drawn(tmp_path, "another seed", opened, 9, seed=3) != fixed[0]
    assert caplog.text.count("the fillers draw from the beginning again") == 1


def test_a_second_live_job_is_refused(opened, tmp_path, monkeypatch):
    """In this process and in another one. When the first job has ended, even if it was killed, the next one opens."""
    monkeypatch.setattr(processes, "REPORT_SECONDS", 0.2)
    source = counted(tmp_path, "loads")
    folder = str(tmp_path / "pools")
    with hanging(hold, source, folder) as child:
        with pytest.raises(CacheInUseError, match=r"'pool' is in use, and .* one job at a time"):
            len(opened(source))
        child.kill()
        monkeypatch.setattr(processes, "REPORT_SECONDS", 60.0)  # its fillers end by themselves
        pool = opened(source)
        assert len(pool) > 0
    monkeypatch.setattr(processes, "REPORT_SECONDS", 0.2)
    with pytest.raises(CacheInUseError):
        len(opened(source))
    assert epoch(pool, source)


def hold(source: Any, folder: str) -> RollingCache:
    pool = RollingCache(source, spec=SPEC, budget="100%", minimum=LENGTH, fillers=2, dir=folder, name="pool")
    assert len(pool) == LENGTH
    return pool


class Others(CountedSource):
    """Other samples of the same class and shape."""

    def expected(self, index: int) -> Any:
        image, label = super().expected(index)
        return image ^ 1, label


def test_other_data_is_refused(opened, tmp_path):
    """A source of another length or fingerprint, or with other samples. The error has the command that removes it."""
    source = CountedSource(LENGTH, SHAPE)
    pool = opened(source)
    all_resident(pool)
    pool.close()
    other = CountedSource(LENGTH, SHAPE)
    other.expected = Others(LENGTH, SHAPE).expected
    with pytest.raises(FingerprintError, match=r"sample \d+ of the cache 'pool' is another one.\n.*clean pool --dir"):
        len(opened(other))
    for refused, more in ((CountedSource(LENGTH + 1, SHAPE), {}), (source, {"fingerprint": "v2"})):
        with pytest.raises(FingerprintError, match="holds something else"):
            len(opened(refused, **more))
    assert len(opened(source)) == LENGTH


class Random(CountedSource):
    """The same index gives another sample each time."""

    def expected(self, index: int) -> Any:
        return torch.randint(0, 256, self.shape, dtype=torch.uint8), index


def test_samples_that_cannot_be_compared_are_trusted_with_a_warning(opened, tmp_path, caplog):
    """Random samples differ from themselves, and those of a stream have no index. Another fingerprint is refused."""
    for source, words in ((Random(LENGTH, SHAPE), "Random"), (Stream(), "Stream")):
        for job in range(3):
            pool = opened(source, 40 * EACH, name=words, fingerprint="v1" if job == 2 else "")
            if job == 2:
                with pytest.raises(FingerprintError):
                    len(pool)
            else:
                wait_until(lambda pool=pool: pool.stats().resident > 4)
                pool.close()
        assert caplog.text.count(f"taken for those of {words}") == 1


class Stream(IterableDataset[Any]):
    """A stream of samples."""

    def __iter__(self) -> Iterator[Any]:
        return map(CountedSource(LENGTH, SHAPE).expected, range(LENGTH))


BUDGET = 2 * 2**20 + 1234


@pytest.mark.parametrize("layout", ["rows", "records"])
def test_the_file_never_takes_more_than_the_budget(opened, tmp_path, layout):
    """A budget in bytes is that of the file's blocks, with header, columns and checksums; it is used."""
    source: Any = CountedSource(10**4, (3, 64, 64)) if layout == "rows" else Texts(10**4, (3, 64, 64))
    pool = opened(source, BUDGET, spec=None)
    wait_until(lambda: pool.stats().evicted > 300)
    pool.close()
    with path_of(tmp_path).open("rb") as file:
        os.fsync(file.fileno())
    assert 0.97 * BUDGET < path_of(tmp_path).stat().st_blocks * 512 <= BUDGET


def test_a_full_disk_stops_the_growth(opened, tmp_path, monkeypatch, caplog):
    """With one warning. The pool rolls within what it has, and the next job grows again."""
    source = counted(tmp_path, "loads")
    pool = opened(source, fillers=0)
    write(pool.handle, 0, 10)
    monkeypatch.setattr(Segment, "free_bytes", property(lambda segment: 0))
    write(pool.handle, 10, 20)
    assert caplog.text.count("stops growing at") == 1
    assert "Give the disk more room" in caplog.text
    stats = pool.stats()
    assert stats.resident == stats.capacity == 10
    assert 29 in epoch(pool, source)
    pool.close()
    monkeypatch.undo()
    pool = opened(source, fillers=0)
    assert pool.stats().capacity == LENGTH
    assert 29 in epoch(pool, source)


def write(handle: Any, first: int, count: int) -> None:
    with RollingWriter.attach(handle) as writer:
        for index in range(first, first + count):
            writer.append(CountedSource(LENGTH, SHAPE, classes=LENGTH).expected(index), index)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_writers_in_other_processes_append(opened, method):
    """What a RollingWriter has appended is there for the next job, without a source."""
    source = CountedSource(LENGTH, SHAPE, classes=LENGTH)
    pool = opened(None, 20 * EACH + 2**14)
    call(write, pool.handle, 0, LENGTH, method=method)
    found = epoch(pool, source)
    assert found == list(range(LENGTH - len(found), LENGTH))
    pool.close()
    pool = opened(None, 20 * EACH + 2**14)
    assert epoch(pool, source) == found
    call(write, pool.handle, 0, 1, method=method)
    assert epoch(pool, source)[0] == 0


def train_on(rank: int, folder: str) -> tuple[list[int], int]:
    source = CountedSource(LENGTH, SHAPE, classes=LENGTH)
    pool = RollingCache(source, "100%", spec=SPEC, fillers=2, minimum=LENGTH, dir=folder, name="pool")
    pool.share()
    found, came = epoch(pool, source), pool.stats().appended
    pool.close()
    return found, came


def test_ranks_share_a_pool_on_a_disk(tmp_path):
    """The ranks divide the resident samples, in this job and in the next one."""
    for came in (LENGTH, 0):
        (first, all_came), (second, _) = run_ranks(train_on, 2, str(tmp_path / "pools"))
        assert sorted(first + second) == list(range(LENGTH))
        assert all_came == came


def test_the_commands_know_the_pool(opened, tmp_path):
    """It is listed with the number of its samples, and removed when no process uses it."""
    pool = opened(CountedSource(LENGTH, SHAPE))
    all_resident(pool)
    folder = str(tmp_path / "pools")
    [listed] = named_segments(contents_of, folder)
    assert (listed.name, listed.in_use, listed.contents.filled, listed.contents.damage) == ("pool", True, LENGTH, "")
    assert clean("pool", folder) == []
    pool.close()
    assert [segment.name for segment in clean("pool", folder)] == ["pool"]
    assert os.listdir(folder) == []


@pytest.mark.parametrize("given", [{"dir": "/tmp"}, {"name": "pool"}])
def test_a_directory_and_a_name_belong_together(given: Any) -> None:
    """One without the other is refused."""
    with pytest.raises(ValueError, match="needs dir= and name="):
        RollingCache(CountedSource(LENGTH), **given)


def test_a_directory_without_a_disk_is_refused(tmp_path):
    """The error tells the cause."""
    (tmp_path / "pools").write_text("a file")
    with pytest.raises(OSError, match="Not a directory"):
        len(RollingCache(CountedSource(LENGTH), dir=str(tmp_path / "pools"), name="pool"))
