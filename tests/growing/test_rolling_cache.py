"""A dataset that grows and rolls while it is trained on, in loaders of all kinds; and the faults of its fillers."""

import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_stocache import CachedDataset, CachedLoader, RollingCache, RollingWriter, SampleSpec
from lightning_stocache.node import processes
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.segment import Segment, SegmentHandle
from lightning_stocache.setup.first_samples import FirstSampleError
from tests.proc import is_alive
from tests.processes import Child, call, wait_until
from tests.ranks import run_ranks
from tests.sources import Allowance

WORDS = 256
SPEC = SampleSpec.infer((torch.zeros(WORDS, dtype=torch.int64), 0))
EACH = WORDS * 8 + 8 + 24  # bytes of a slot

pytestmark = pytest.mark.processes


class Numbers(Dataset[Any]):
    """Samples whose every word is their index; `trouble` is called with the index before each load."""

    def __init__(self, length: int = 40, trouble: Callable[[int], None] | None = None) -> None:
        self.length, self.trouble = length, trouble

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.trouble is not None:
            self.trouble(index)
        return torch.full((WORDS,), index), index


def labels(loader: Any) -> list[int]:
    """The numbers of an epoch, whose words are all checked."""
    found = []
    for words, numbers in loader:
        assert (words == numbers[:, None]).all()
        found += numbers.tolist()
    return found


@pytest.fixture
def opened() -> Iterator[Callable[..., RollingCache]]:
    pools = []

    def make(*args: Any, **more: Any) -> RollingCache:
        pools.append(RollingCache(*args, **more))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def write(pool: RollingCache, numbers: range) -> None:
    with RollingWriter.attach(pool.handle) as writer:
        for number in numbers:
            writer.append(Numbers()[number])


def all_resident(pool: RollingCache, count: int) -> None:
    wait_until(lambda: pool.stats().resident == count)


def fillers_end() -> None:
    wait_until(lambda: not [child for child in active_children() if child.name.startswith("filler")])


# ---- epochs ----


def test_an_epoch_begins_before_any_rank_can_read_from_it(opened, monkeypatch):
    """The leader begins it before the ranks of the node agree, or the others would count newer samples wrongly."""
    pool, steps, lead = opened(budget=100 * EACH, spec=SPEC, minimum=10), [], NodeGroup.lead
    write(pool, range(10))
    begin = pool.store.begin_epoch

    def agree(group: NodeGroup, work: Callable[[], Any]) -> Any:
        outcome = lead(group, work)
        steps.append("agreed")
        return outcome

    monkeypatch.setattr(pool.store, "begin_epoch", lambda: (steps.append("begun"), begin()))
    monkeypatch.setattr(NodeGroup, "lead", agree)
    pool.begin_epoch()
    assert steps == ["begun", "agreed"]


LOADERS = {
    "plain": lambda pool: DataLoader(pool, 8, sampler=pool.sampler()),
    "plain with persistent workers": lambda pool: DataLoader(
        pool, 8, sampler=pool.sampler(), num_workers=1, persistent_workers=True
    ),
    "cached": lambda pool: CachedLoader(pool, 8, shuffle=True),
    "cached, by workers": lambda pool: CachedLoader(pool, 8, shuffle=True, num_workers=1, gather="worker"),
    "plain, workers of a fork server": lambda pool: DataLoader(
        pool, 8, sampler=pool.sampler(), num_workers=1, multiprocessing_context="forkserver"
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_an_epoch_has_the_samples_that_are_resident_when_it_begins(opened, kind):
    """Each resident sample comes once, as a hit. Samples that come later are in the next epoch."""
    pool = opened(budget=100 * EACH, spec=SPEC, minimum=10)
    write(pool, range(10))
    loader = LOADERS[kind](pool)
    assert sorted(labels(loader)) == list(range(10))
    write(pool, range(10, 30))
    pool.begin_epoch()
    assert sorted(labels(loader)) == list(range(30))
    assert len(loader) == 4
    counts = pool.dataset.counters.totals()
    assert (counts.hits, counts.misses, counts.bypasses) == (40, 0, 0)
    write(pool, range(30, 130))
    pool.begin_epoch()
    assert sorted(labels(loader)) == list(range(30, 130))
    assert pool.stats().evicted == 30
    if hasattr(loader, "close"):
        loader.close()
    del loader


@pytest.mark.parametrize("make", [DataLoader, CachedLoader])
def test_newer_samples_replace_samples_that_leave_during_an_epoch(opened, make):
    """The number of batches stays, each sample is whole, and `renewed` counts the newer samples."""
    words = 2**17  # a megabyte each: small ones are gathered together, before the first batch is handed out
    pool = opened(budget=16 * (8 * words + 32), spec=SampleSpec.infer((torch.zeros(words).long(), 0)), minimum=16)
    writer = RollingWriter.attach(pool.handle)
    for number in range(16):
        writer.append((torch.full((words,), number), number))
    batches = []
    for number, (rows, found) in enumerate(make(pool, batch_size=4, sampler=pool.sampler())):
        assert (rows == found[:, None]).all()
        batches += found.tolist()
        if number == 0:
            for newer in range(16, 32):
                writer.append((torch.full((words,), newer), newer))
    assert len(batches) == 16
    assert sum(number >= 16 for number in batches) == pool.stats().renewed >= 8


def test_a_transform_comes_after_the_cache(opened):
    """It runs whenever a sample is served. A view has another transform."""
    pool = opened(budget=100 * EACH, spec=SPEC, minimum=4, transform=lambda sample: (sample[0], sample[1] * 10))
    write(pool, range(4))
    assert sorted(int(label) for _, batch in CachedLoader(pool, 2) for label in batch) == [0, 10, 20, 30]
    assert sorted(labels(CachedLoader(pool.view(None), 2))) == [0, 1, 2, 3]
    assert pool[3][1] == 30
    assert pool[-1][1] == 30


def test_a_view_keeps_the_fillers_at_work():
    """Even if no other object refers to the pool."""
    view = RollingCache(Numbers(), "100%", fillers=1, minimum=40).view(None)
    assert sorted(labels(CachedLoader(view, 8))) == list(range(40))
    assert view.is_open


# ---- fillers ----


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_fillers_load_the_whole_source_once_where_it_fits(opened, method):
    """If all samples have room, each is loaded once, and the fillers end."""
    pool = opened(Numbers(), "100%", fillers=3, minimum=1, multiprocessing_context=method)
    all_resident(pool, 40)
    assert sorted(labels(CachedLoader(pool, 8, shuffle=True))) == list(range(40))
    fillers_end()
    assert (pool.stats().appended, pool.stats().evicted) == (40, 0)


def test_fillers_roll_where_it_does_not_fit(opened):
    """The pool stays full, the oldest samples leave, and every sample of the source comes some time."""
    pool, seen = opened(Numbers(), "25%", fillers=2, minimum=10), set()
    loader = CachedLoader(pool, 4, shuffle=True)
    wait_until(lambda: pool.stats().evicted > 0)
    end = time.monotonic() + 120
    while len(seen) < 40 and time.monotonic() < end:
        found = labels(loader)
        assert len(found) == 10
        seen |= set(found)
    assert seen == set(range(40))


def test_an_epoch_waits_for_the_minimum_and_goes_on(opened, tmp_path):
    """With fillers slower than training, an epoch has at least the minimum, and later epochs have more."""
    allowed, lengths = Allowance(tmp_path / "allowed", 5), []
    pool = opened(Numbers(trouble=allowed), "100%", spec=SPEC, fillers=1, minimum=5)
    loader = CachedLoader(pool, 5, shuffle=True)
    for resident in (5, 15, 25, 35):
        wait_until(lambda resident=resident: pool.stats().resident >= resident)
        lengths.append(len(labels(loader)))
        allowed.more(10)
    assert lengths == [5, 15, 25, 35]


class Stream(IterableDataset[Any]):
    """The samples of Numbers up to an end, divided among workers."""

    def __init__(self, end: int) -> None:
        self.end = end

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        return map(
            Numbers().__getitem__, range(self.end) if info is None else range(info.id, self.end, info.num_workers)
        )


def test_a_stream_is_divided_among_the_fillers(opened):
    """An IterableDataset sees its filler as it sees a worker. When it has ended, it begins again."""
    pool, seen = opened(Stream(20), 60 * EACH, fillers=2, minimum=60), set()
    wait_until(lambda: seen.update(labels(CachedLoader(pool, 8))) or seen == set(range(20)))


def test_a_generator_ends_and_training_goes_on(opened):
    """Its samples stay, even if fewer than the minimum have come."""
    source = (Numbers()[number] for number in range(12))  # which cannot be pickled
    pool = opened(source, 60 * EACH, fillers=2, minimum=50, multiprocessing_context="fork")
    loader = CachedLoader(pool, 8)
    assert sorted(labels(loader)) == sorted(labels(loader)) == list(range(12))


def test_fillers_load_the_given_indices(opened):
    """One filler loads each index of the stream."""
    pool = opened(Numbers(), 60 * EACH, fillers=2, minimum=3, indices=[7, 3, 9])
    assert sorted(labels(CachedLoader(pool, 8))) == [3, 7, 9]


def texts(number: int) -> dict[str, Any]:
    return {"text": f"{number} " * number, "numbers": torch.full((1 + 7 * number,), number)}


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_any_kind_roll_as_records(opened, workers):
    """Text and tensors of many lengths come out as they went in. The oldest leave, and all samples come some time."""
    source, seen = [texts(number) for number in range(60)], set()
    pool = opened(source, 70_000, fillers=2, minimum=5)
    loader = CachedLoader(pool, 4, shuffle=True, collate_fn=list, num_workers=workers)
    end = time.monotonic() + 120
    while len(seen) < 60 and time.monotonic() < end:
        for batch in loader:
            for sample in batch:
                number = int(sample["numbers"][0])
                assert sample["text"] == source[number]["text"]
                assert torch.equal(sample["numbers"], source[number]["numbers"])
                seen.add(number)
    assert seen == set(range(60))
    assert pool.stats().evicted > 0
    loader.close()


def test_a_few_records_have_room(opened):
    """The budget is for samples alone. Writers may append more samples than the source has."""
    pool = opened([texts(20)], "100%", fillers=1, minimum=1)
    assert len(pool[0]["numbers"]) == 141
    with RollingWriter.attach(pool.handle) as writer:
        for number in range(1, 20):
            writer.append(texts(number))
    assert len(pool.begin_epoch()) >= 1


def test_an_epoch_does_not_wait_for_records_that_have_no_room(opened, caplog):
    """If later records are larger than the first, fewer than the minimum may fit. Training goes on with these."""
    pool = opened([texts(number // 5) for number in range(300)], 60_000, fillers=1, minimum=256, shuffle=False)
    assert 0 < len(pool.begin_epoch()) < 256
    wait_until(lambda: pool.stats().evicted > 0)


# ---- faults ----


def raises_at(index: int) -> None:
    if index % 2:
        raise OSError(f"no answer for {index}")


def test_samples_that_cannot_be_loaded_are_left_out(opened, caplog):
    """The first error is logged with its traceback; the others are counted."""
    pool = opened(Numbers(trouble=raises_at), "100%", fillers=1, minimum=1, shuffle=False)
    wait_until(lambda: pool.stats().failed == 20)
    fillers_end()
    assert sorted(labels(CachedLoader(pool, 8))) == list(range(0, 40, 2))
    assert pool.stats().failed == 20
    assert caplog.text.count("OSError: no answer for 1") == 1
    assert "in raises_at" in caplog.text
    assert "filler 0 could not load sample 1" in caplog.text


def always_raises(index: int) -> None:
    raise OSError("the store is gone")


def test_a_source_that_always_fails_is_an_error_of_the_training(opened):
    """Without a resident sample and without a filler, the epoch raises the last error of the fillers."""
    pool = opened(Numbers(trouble=always_raises), 60 * EACH, spec=SPEC, fillers=2, minimum=1)
    with pytest.raises(RuntimeError, match=r"(?s)none of its fillers is left.*the store is gone"):
        len(pool)


def test_samples_that_cannot_be_stored_are_refused(opened):
    """The error tells whether samples are no rows, cannot be pickled, or cannot be read."""
    with pytest.raises(FirstSampleError, match=r'the sample is a str.*layout="records" keeps what can be pickled'):
        len(opened(["one", "two", "three"], 60 * EACH, layout="rows"))
    with pytest.raises(FirstSampleError, match="cannot be kept"):
        len(opened([lambda: 1, lambda: 2], 60 * EACH))
    with pytest.raises(FirstSampleError, match="OSError: the store is gone"):
        len(opened(Numbers(trouble=always_raises), 60 * EACH))


class Dies:
    """Kills the process that loads index 3, in fillers only."""

    def __call__(self, index: int) -> None:
        info = get_worker_info()
        if index == 3 and info is not None and info.num_workers == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class Drawn(Numbers):
    """Indices with a random number each."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return super().__getitem__(index)[0], int(torch.randint(2**62, ()))


def test_a_filler_that_dies_is_started_anew_behind_that_sample(opened, caplog):
    """The log names filler, signal and sample. All other samples come, with other random numbers than before."""
    pool = opened(Drawn(trouble=Dies()), "100%", spec=SPEC, fillers=2, minimum=39)
    batches = list(CachedLoader(pool, 8, shuffle=True))
    assert sorted(int(row[0]) for rows, _ in batches for row in rows) == [number for number in range(40) if number != 3]
    assert len({number for _, numbers in batches for number in numbers.tolist()}) == 39
    assert pool.stats().restarts == 1
    assert "killed by SIGKILL" in caplog.text
    assert "loading sample 3; it is started anew" in caplog.text


def dies(index: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_filler_that_always_dies_is_given_up(opened, caplog):
    """After three restarts it is not started again, and the empty pool is an error."""
    pool = opened(Numbers(trouble=dies), 60 * EACH, spec=SPEC, fillers=1, minimum=1)
    with pytest.raises(RuntimeError, match=r"it has 3 times before; it is not started again"):
        len(pool)
    assert pool.stats().restarts == 3


class HangsAfter:
    """Blocks for ever from an index on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(self, index: int) -> None:
        if index >= self.first:
            time.sleep(1000)


def test_a_filler_that_hangs_is_logged_while_training_waits(opened, caplog, monkeypatch):
    """The log tells which filler loads which sample, and for how long. With the minimum, training goes on."""
    monkeypatch.setattr(processes, "REPORT_SECONDS", 0.3)
    source = Numbers(trouble=HangsAfter(6))
    pool = opened(source, "100%", spec=SPEC, fillers=1, minimum=8, shuffle=False)
    writer = RollingWriter.attach(pool.handle)
    all_resident(pool, 6)
    monkeypatch.setattr(time, "time", lambda: -1e9)  # the wall clock does not matter
    log = logging.getLogger("lightning_stocache.growing.rolling_cache")

    def answer(record: logging.LogRecord) -> bool:
        """When the message comes, another writer appends the missing samples."""
        for number in (6, 7) if "training waits" in record.getMessage() and pool.stats().resident < 8 else ():
            writer.append(Numbers()[number])
        return True

    log.addFilter(answer)
    assert sorted(labels(CachedLoader(pool, 4))) == list(range(8))
    assert sorted(labels(CachedLoader(pool, 4))) == list(range(8))
    log.removeFilter(answer)
    assert "6 of 8 have come" in caplog.text
    assert "filler 0 has been loading sample 6 for " in caplog.text


def train_and_be_killed(path: str) -> None:
    pool = RollingCache(Numbers(trouble=HangsAfter(4)), "100%", spec=SPEC, fillers=2, minimum=2, shuffle=False)
    len(pool)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    Path(path).write_text(children)
    time.sleep(1000)


def test_fillers_end_with_their_parent(tmp_path):
    """Even if the parent is killed, and in the middle of a load."""
    path = tmp_path / "fillers"
    child = Child(train_and_be_killed, str(path))
    wait_until(lambda: path.exists() and len(path.read_text().split()) >= 2)
    fillers = [int(pid) for pid in path.read_text().split()]
    child.kill()
    wait_until(lambda: not any(map(is_alive, fillers)), seconds=60)


CACHED = CachedDataset([1, 2, 3], defer=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fillers": -1}, "fillers must be a whole number of at least 0, got -1"),
        ({"minimum": 0}, "minimum must be a whole number of at least 1, got 0"),
        ({"epoch_samples": 2.5}, "epoch_samples must be a whole number of at least 1, got 2.5"),
        ({"source": None}, "without a source a rolling cache needs spec"),
        ({"source": Stream(3), "indices": [1]}, "indices needs a map-style source"),
        ({"budget": "much"}, "budget cannot be read"),
        ({"layout": "columns"}, "layout must be 'auto', 'rows' or 'records', got 'columns'"),
        ({"source": CACHED}, "source must be the dataset itself, got a CachedDataset that is cached already"),
    ],
)
def test_arguments_that_break_a_rule(arguments, message):
    """They are refused before the pool opens."""
    with pytest.raises((ValueError, TypeError), match=message):
        RollingCache(**({"source": Numbers(), "budget": "1MiB"} | arguments))


@pytest.mark.parametrize("index", [10**7, -(10**7)])
def test_an_index_outside_is_an_index_error(opened, index):
    """Alone and in a batch."""
    pool = opened(spec=SPEC, budget=60 * EACH, minimum=1)
    write(pool, range(1))
    with pytest.raises(IndexError, match="out of range"):
        pool[index]
    with pytest.raises(IndexError):
        pool.__getitems__([0, index])


def train_on(rank: int, by_name: bool) -> tuple[list[list[int]], int, int]:
    attach = Segment.attach

    def by_name_only(handle: SegmentHandle) -> Segment:
        if handle.data.startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", handle.data)
        return attach(handle)

    if by_name and rank == 1:
        Segment.attach = by_name_only  # type: ignore[method-assign,assignment]
    pool = RollingCache(Numbers(), "50%", fillers=2, minimum=20)
    pool.share()
    loader, epochs = CachedLoader(pool, 4, shuffle=True), []
    for _ in range(3):
        epochs.append(labels(loader))
    appended = pool.stats().appended
    pool.close()
    return epochs, appended, len(pool.source)


@pytest.mark.parametrize("by_name", [False, True])
def test_ranks_share_a_pool_and_run_the_same_number_of_batches(by_name):
    """The ranks divide the resident samples of each epoch. Ranks in separate pid namespaces attach by name."""
    found = run_ranks(train_on, 2, by_name)
    for first, second in zip(found[0][0], found[1][0], strict=True):
        assert len(first) == len(second) == 10


def train_apart(rank: int) -> tuple[list[int], set[int]]:
    from lightning_stocache.node.group import NodeGroup

    pool = RollingCache(Numbers(), "50%" if rank else "20%", fillers=1, minimum=100)
    pool.share(NodeGroup.discover(key=rank))
    loader, counts, seen = CachedLoader(pool, 2, shuffle=True), [], set()
    for _ in range(8):
        found = labels(loader)
        counts.append(len(found))
        seen |= set(found)
    pool.close()
    return counts, seen


def test_nodes_have_pools_of_their_own_and_run_the_same_number_of_batches():
    """The smaller pool decides the number. All samples of the larger pool are drawn some time."""
    (small, few), (large, many) = run_ranks(train_apart, 2)
    assert small == large == [8] * 8
    assert len(few) >= 8
    assert len(many) > 8


def train_alone(rank: int) -> tuple[list[str], int]:
    from tests.logs import Log

    log, pool = Log(), RollingCache(Numbers(), "100%", fillers=1, minimum=40)
    loader = CachedLoader(pool, 8)
    counts = [len(labels(loader)) for _ in range(2)]
    pool.close()
    return log.lines, min(counts)


def test_a_rank_with_a_pool_of_its_own_is_warned():
    """Without `share`, each rank has its own pool, and trains on all of it. One warning on rank zero says so."""
    (lines, first), (_, second) = run_ranks(train_alone, 2)
    assert sum("call share() of the dataset" in line for line in lines) == 1
    assert first == second == 40


def use_up() -> int:
    pool = RollingCache(Numbers(), "50%", fillers=2, minimum=20)
    count = len(labels(CachedLoader(pool, 4)))
    del pool
    return count


def test_a_pool_that_is_not_closed_ends_with_its_process():
    """Its fillers are daemons, so the process ends at once."""
    assert call(use_up) == 20
