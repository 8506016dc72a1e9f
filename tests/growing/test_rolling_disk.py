"""A rolling cache on a disk: the next job trains on what is resident, and loads nothing of that again."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_stocache import CachedDataset, RollingCache, RollingWriter
from lightning_stocache.cache.contents import contents_of
from lightning_stocache.node import processes
from lightning_stocache.node.files import prefix
from lightning_stocache.node.named import clean, named_segments
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup.named_cache import CacheInUseError
from lightning_stocache.setup.segments import CacheMemoryError
from tests.cache.stores import refuse_stores
from tests.growing.pools import LENGTH, SPEC, Numbers, all_resident, epoch, fillers_end, row, write
from tests.jobs import skip_without, warnings
from tests.processes import call, call_many, enter_container, hanging, wait_until
from tests.sources import Allowance, CountedSource, CountedStream, Made

EACH = SPEC.nbytes + 8 + 5 * 8  # generation, and entry
COMPARED = 4  # samples that a job reads to compare them


@pytest.fixture
def on_disk(opened: Any, tmp_path: Path) -> Callable[..., RollingCache]:
    """Opens the pool that has a name in a folder, as the next job does."""
    options = {"budget": "100%", "spec": SPEC, "fillers": 2, "minimum": 1}
    return partial(opened, **options, dir=str(tmp_path / "pools"), name="pool")


def path_of(tmp_path: Path) -> Path:
    return tmp_path / "pools" / f"{prefix()}pool"


def fill(pool: RollingCache) -> None:
    """Wait until the whole source is there, and end the job."""
    all_resident(pool)
    pool.close()


@pytest.mark.processes
def test_the_next_job_loads_nothing_that_is_resident(on_disk, tmp_path):
    """The next job loads only what is compared, and the commands list the pool and remove it when it is unused."""
    first, second = Numbers(log_path=tmp_path / "first"), Numbers(log_path=tmp_path / "second")
    pool = on_disk(first)
    all_resident(pool)
    assert epoch(pool) == sorted(first.loaded) == list(range(LENGTH))
    pool.close()
    pool = on_disk(second)
    assert epoch(pool) == list(range(LENGTH))
    fillers_end()
    assert second.loads == COMPARED
    stats = pool.stats()
    assert (stats.resident, stats.appended, stats.evicted, stats.memory_bytes) == (LENGTH, 0, 0, 0)
    assert stats.disk_bytes > LENGTH * SPEC.nbytes
    assert stats.times_seen == 1
    folder = str(tmp_path / "pools")
    [listed] = named_segments(contents_of, folder)
    assert (listed.name, listed.in_use, listed.contents.filled, listed.contents.damage) == ("pool", True, LENGTH, "")
    assert clean("pool", folder) == []
    pool.close()
    assert [segment.name for segment in clean("pool", folder)] == ["pool"]
    assert os.listdir(folder) == []


@pytest.mark.processes
def test_a_damaged_sample_is_loaded_again(on_disk, tmp_path):
    """The fillers verify what is resident, and load what is not sound, alone."""
    fill(on_disk(Numbers()))
    content = bytearray(path_of(tmp_path).read_bytes())
    for index in (7, 31):
        content[content.index(bytes(row(index)[0].numpy())) + 5] ^= 64
    path_of(tmp_path).write_bytes(content)
    source = Numbers(log_path=tmp_path / "loads")
    pool = on_disk(source)
    wait_until(lambda: pool.stats().appended == 2)
    wait_until(lambda: len(pool.store.readable_slots()) == LENGTH)  # one that is still being written is resident
    assert epoch(pool) == list(range(LENGTH))
    assert {7, 31} <= set(source.loaded)
    assert source.loads <= COMPARED + 2


@pytest.mark.processes
def test_fillers_go_on_behind_what_the_last_job_drew(on_disk, tmp_path, caplog):
    """Over some jobs each sample of the source is drawn once per permutation. Other draws begin anew, and say so."""

    def drawn(job: int, seed: int = 0) -> list[int]:
        """The indices that the only filler of a job draws: 18, behind what is compared at set-up."""
        allowed = Allowance(tmp_path / f"allowed {job}", 18)
        source = Numbers(trouble=allowed, log_path=tmp_path / f"loads {job}")
        pool = on_disk(source, budget=24 * EACH, fillers=1, fingerprint="v1", seed=seed)
        wait_until(lambda: pool.stats().appended == 18)
        pool.close()
        return source.loaded[-18:]

    # A sample that the filler is loading when its job ends is left out, so 37 of 40 are drawn.
    jobs = [drawn(job) for job in range(2)]
    assert len(set().union(*jobs)) == 36
    assert "from the beginning again" not in caplog.text
    assert drawn(2, seed=3) != jobs[0]
    assert caplog.text.count("the fillers draw from the beginning again") == 1


@pytest.mark.processes
def test_a_second_live_job_is_refused(on_disk, monkeypatch):
    """In this process and in another one. When the first job has ended, even if it was killed, the next one opens."""
    monkeypatch.setattr(processes, "REPORT_SECONDS", 0.2)
    with hanging(lambda: len(on_disk(Numbers(), minimum=LENGTH))) as child:
        with pytest.raises(CacheInUseError, match=r"'pool' is in use, and .* one job at a time"):
            len(on_disk(Numbers()))
        child.kill()
        monkeypatch.setattr(processes, "REPORT_SECONDS", 60.0)  # its fillers end by themselves
        pool = on_disk(Numbers())
        assert len(pool) > 0
    monkeypatch.setattr(processes, "REPORT_SECONDS", 0.2)
    with pytest.raises(CacheInUseError):
        len(on_disk(Numbers()))
    assert epoch(pool)


def opened_at_once(folder: Path, jobs: int, number: int) -> bool:
    """Whether this one of some jobs that open a pool at the same moment has it. It ends when all have tried."""
    processes.REPORT_SECONDS = 0.2
    pool = RollingCache(None, 20 * EACH + 2**14, spec=SPEC, minimum=1, dir=str(folder / "pools"), name="pool")

    def meet(where: str) -> None:
        (folder / f"{where} {number}").touch()
        wait_until(lambda: len(list(folder.glob(f"{where} *"))) == jobs)

    meet("ready")
    try:
        pool.share()
    except (CacheInUseError, CacheMemoryError) as error:  # the latter where another job has just made the file
        if "is in use" not in str(error):
            raise
        meet("tried")
        return False
    write(pool.handle, [pool.stats().appended])
    meet("tried")
    pool.close()
    return True


@pytest.mark.processes
def test_one_of_many_jobs_that_open_a_pool_at_once_has_it(on_disk, tmp_path):
    """Whether the file is there or not. The others write nothing."""
    for moment in ("first", "second"):
        folder = tmp_path / moment
        folder.mkdir()
        (folder / "pools").symlink_to(tmp_path / "pools")
        (tmp_path / "pools").mkdir(exist_ok=True)
        assert sorted(call_many(opened_at_once, [(folder, 4, number) for number in range(4)])) == [False] * 3 + [True]
    assert on_disk(None, budget=20 * EACH + 2**14).stats().resident == 2


def shared_apart(folder: str, rank: int) -> list[int]:
    """What a rank of a job reads, the second one in a container of its own."""
    if rank:
        enter_container()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        pool = RollingCache(Numbers(), "100%", spec=SPEC, fillers=1, minimum=LENGTH, dir=f"{folder}/pools", name="pool")
        pool.share()
        read = sorted(pool[number][1] for number in range(len(pool)))
        dist.barrier()
        assert pool.stats().disk_bytes
        pool.close()
        return read
    finally:
        dist.destroy_process_group()


@pytest.mark.processes
def test_ranks_in_two_containers_share_a_pool(monkeypatch, tmp_path):
    """They share the directory, /dev/shm and the network."""
    skip_without(["unshare", "--pid", "--fork", "--mount-proc"])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert call_many(shared_apart, [(str(tmp_path), rank) for rank in range(2)]) == [list(range(LENGTH))] * 2


@pytest.mark.processes
def test_a_file_of_other_data_or_kind_is_left_alone(on_disk, tmp_path, caplog):
    """The pool then lies in memory, with one warning that says why and how to remove the file."""
    fill(on_disk(Numbers()))
    pool_path = path_of(tmp_path)
    CachedDataset(Numbers(), dir=str(tmp_path / "pools"), name="rows").close()
    newer = bytearray(pool_path.read_bytes())
    newer[24] ^= 255  # its format
    for name, content in (("newer", bytes(newer)), ("text", b"text" * 5000), ("cut", bytes(newer[:100]))):
        path = pool_path.with_name(f"{prefix()}{name}")
        path.write_bytes(content)
        path.chmod(0o600)
    command, other = "stocache clean", Numbers(make=lambda index: (row(index)[0] ^ 1, index))
    for source, options, words in (
        (other, {}, rf"sample \d+ of the cache 'pool' is another one.\n.*{command} pool --dir"),
        (Numbers(length=LENGTH + 1), {}, f"'pool' holds something else than .* {command} pool --dir"),
        (Numbers(), {"fingerprint": "v2"}, "'pool' holds something else than "),
        (Numbers(), {"name": "rows"}, f"'rows' holds something else than .* {command} rows --dir"),
        (Numbers(), {"name": "newer"}, f"'newer' is of another version .* {command} newer --dir"),
        (Numbers(), {"name": "text"}, "text is no cache: give another name, or remove it"),
        (Numbers(), {"name": "cut"}, "'cut' is damaged: its header is cut off"),
    ):
        caplog.clear()
        pool = on_disk(source, **options)
        all_resident(pool, len(source))
        assert (pool.stats().memory_bytes > 0, pool.stats().disk_bytes) == (True, 0)
        pool.close()
        [warning] = warnings(caplog)
        assert re.search("^the rolling cache lies in memory, and ends with this job: .*" + words, warning)
    assert len(on_disk(Numbers())) == LENGTH


NOISE = partial(Numbers, make=lambda index: (torch.randint(0, 256, row(index)[0].shape), index))


@pytest.mark.processes
@pytest.mark.parametrize("make", [NOISE, partial(CountedStream, LENGTH, row)])
def test_samples_that_cannot_be_compared_are_trusted_with_a_warning(on_disk, caplog, make):
    """Random samples differ from themselves, and those of a stream have no index. Another fingerprint is refused."""
    for _ in range(2):
        pool = on_disk(make(), budget=LENGTH * EACH)
        wait_until(lambda pool=pool: pool.stats().resident > 4)
        pool.close()
    assert not on_disk(make(), budget=LENGTH * EACH, fingerprint="v1").stats().disk_bytes
    assert caplog.text.count("taken for those of ") == 1


@pytest.mark.processes
def test_a_writer_goes_on_where_the_disk_refuses_samples(on_disk, monkeypatch, caplog):
    """What it appends then is not stored, with one warning. The training goes on with what is resident."""
    pool = on_disk(None, budget=20 * EACH + 2**14)
    write(pool.handle, range(10))
    refuse_stores(monkeypatch)
    writer = RollingWriter.attach(pool.handle)
    for number in range(10, 13):
        writer.append(row(number), number)
    writer.close()
    assert epoch(pool) == list(range(10))
    assert caplog.text.count("takes no new samples for now") == 1


def record(index: int) -> Any:
    """A sample that is no row."""
    return f"{index}," * (index % 17), torch.full((3, 64, 64), index % 256, dtype=torch.uint8)


@pytest.mark.processes
@pytest.mark.parametrize("source", [CountedSource(10**4, (3, 64, 64)), Made(record, 10**4)], ids=["rows", "records"])
def test_the_file_never_takes_more_than_the_budget(on_disk, tmp_path, source):
    """A budget in bytes is that of the file's blocks, with header, columns and checksums; it is used."""
    budget = 2 * 2**20 + 1234
    pool = on_disk(source, budget=budget, spec=None)
    wait_until(lambda: pool.stats().evicted > 300)
    pool.close()
    with path_of(tmp_path).open("rb") as file:
        os.fsync(file.fileno())
    assert 0.97 * budget < path_of(tmp_path).stat().st_blocks * 512 <= budget


@pytest.mark.processes
def test_writers_in_other_processes_append(on_disk, monkeypatch, caplog):
    """A full disk stops the growth, with one warning; what RollingWriters have appended is there for the next job."""
    budget = 20 * EACH + 2**14
    pool = on_disk(None, budget=budget)
    call(write, pool.handle, range(10), method="forkserver")
    monkeypatch.setattr(Segment, "free_bytes", property(lambda segment: 0))
    write(pool.handle, range(10, 30))
    assert caplog.text.count("stops growing at") == 1
    assert "; give it more room.\n" in caplog.text
    stats = pool.stats()
    assert stats.resident == stats.capacity == 10
    assert epoch(pool) == list(range(20, 30))
    pool.close()
    monkeypatch.undo()
    pool = on_disk(None, budget=budget)
    assert epoch(pool) == list(range(20, 30))
    call(write, pool.handle, range(100))
    assert epoch(pool) == list(range(100 - pool.stats().capacity, 100))
    assert pool.stats().capacity >= 20
