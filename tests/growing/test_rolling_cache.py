"""A dataset that grows and rolls while it is trained on, in loaders of all kinds; and the faults of its fillers."""

import logging
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_stocache import CachedDataset, CachedLoader, RollingCache, RollingWriter
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.shortage import Shortage
from lightning_stocache.node import processes
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.find import FirstSampleError
from tests.growing.pools import LENGTH, SPEC, Numbers, all_resident, epoch, fillers_end, labels, row, write
from tests.jobs import Log
from tests.loading.twins import same
from tests.processes import call, descendants, hanging, is_alive, run_ranks, wait_until
from tests.sources import Allowance, CountedStream

EACH = SPEC.nbytes + 24  # bytes of a slot


# ---- epochs ----

OF_A_SERVER: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "forkserver"}
LOADERS = {
    "plain, with persistent workers": lambda pool: DataLoader(pool, 8, sampler=pool.sampler(), **OF_A_SERVER),
    "cached": lambda pool: CachedLoader(pool, 8, shuffle=True),
    "cached, by workers": lambda pool: CachedLoader(pool, 8, shuffle=True, num_workers=1, gather="worker"),
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", LOADERS)
def test_an_epoch_has_the_samples_that_are_resident_when_it_begins(opened, kind):
    """Each resident sample comes once, as a hit. Samples that come later are in the next epoch."""
    pool = opened(budget=100 * EACH, spec=SPEC, minimum=10)
    write(pool.handle, range(10))
    loader = LOADERS[kind](pool)
    assert sorted(labels(loader)) == list(range(10))
    write(pool.handle, range(10, 30))
    pool.begin_epoch()
    assert sorted(labels(loader)) == list(range(30))
    assert len(loader) == 4
    counts = pool.dataset.counters.totals()
    assert (counts.hits, counts.misses, counts.bypasses) == (40, 0, 0)
    write(pool.handle, range(30, 130))
    pool.begin_epoch()
    assert sorted(labels(loader)) == list(range(30, 130))
    assert pool.stats().evicted == 30
    if hasattr(loader, "close"):
        loader.close()


@pytest.mark.parametrize("make", [DataLoader, CachedLoader])
def test_newer_samples_replace_samples_that_leave_during_an_epoch(opened, make):
    """The number of batches stays, each sample is whole, and `renewed` counts the newer samples."""
    words = 2**17  # a megabyte each: small ones are gathered together, before the first batch is handed out
    pool = opened(budget=16 * (8 * words + 32), spec=SampleSpec.infer((torch.zeros(words).long(), 0)), minimum=16)
    writer = RollingWriter.attach(pool.handle)
    for number in range(16):
        writer.append((torch.full((words,), number), number))
    numbers = []
    for batch, (rows, found) in enumerate(make(pool, batch_size=4, sampler=pool.sampler())):
        assert (rows == found[:, None]).all()
        numbers += found.tolist()
        if batch == 0:
            for newer in range(16, 32):
                writer.append((torch.full((words,), newer), newer))
    assert len(numbers) == 16
    assert sum(number >= 16 for number in numbers) == pool.stats().renewed >= 8


def test_an_epoch_begins_before_any_rank_can_read_from_it(opened, monkeypatch):
    """The leader begins it before the ranks of the node agree, or the others would count newer samples wrongly."""
    pool, steps, lead = opened(budget=100 * EACH, spec=SPEC, minimum=1), [], NodeGroup.lead
    write(pool.handle, range(1))
    monkeypatch.setattr(pool.store, "begin_epoch", lambda: steps.append("begun"))
    monkeypatch.setattr(NodeGroup, "lead", lambda group, work: (lead(group, work), steps.append("agreed"))[0])
    pool.begin_epoch()
    assert steps == ["begun", "agreed"]


def test_samples_have_the_transform_and_a_number(opened):
    """The transform comes after the cache, and a view has another one. A number outside is an IndexError."""
    pool = opened(budget=100 * EACH, spec=SPEC, minimum=4, transform=lambda sample: (sample[0], sample[1] * 10))
    write(pool.handle, range(4))
    assert sorted(int(label) for _, batch in CachedLoader(pool, 2) for label in batch) == [0, 10, 20, 30]
    assert epoch(pool.view(None)) == [0, 1, 2, 3]
    assert pool[3][1] == pool[-1][1] == 30
    for outside in (10**7, -(10**7)):
        with pytest.raises(IndexError, match="out of range"):
            pool[outside]
        with pytest.raises(IndexError):
            pool.__getitems__([0, outside])


# ---- fillers ----


def text(number: int) -> Any:
    """A sample of its own length."""
    return torch.full((1 + 7 * number,), number), f"{number} " * number


def fails(index: int) -> None:
    raise OSError(f"no answer for {index}")


def dies(index: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("make", "budget", "options", "expected"),
    [
        (Numbers, "100%", {"multiprocessing_context": "forkserver"}, range(LENGTH)),
        (Numbers, 60 * EACH, {"indices": [7, 3, 9]}, [3, 7, 9]),
        # A generator, which cannot be pickled, with fewer samples than the minimum.
        (lambda: map(row, range(12)), 60 * EACH, {"minimum": 50, "multiprocessing_context": "fork"}, range(12)),
    ],
    ids=["source", "indices", "generator"],
)
def test_fillers_load_each_sample_once_where_all_have_room(opened, make, budget, options, expected):
    """Then the fillers end, and training goes on with these samples."""
    pool = opened(make(), budget, fillers=2, **{"minimum": 1} | options)
    all_resident(pool, len(expected))
    fillers_end()
    assert epoch(pool) == epoch(pool) == list(expected)
    assert (pool.stats().appended, pool.stats().evicted) == (len(expected), 0)


@pytest.mark.processes
def test_a_stream_is_divided_among_the_fillers(opened):
    """An IterableDataset sees its filler as it sees a worker. When it has ended, it begins again."""
    pool, seen = opened(CountedStream(20, row), 60 * EACH, fillers=2, minimum=60), set()
    wait_until(lambda: seen.update(epoch(pool)) or seen == set(range(20)))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "budget", "workers"),
    [(Numbers(length=60), "25%", 0), ([text(number) for number in range(60)], 70_000, 1)],
    ids=["rows", "records in workers"],
)
def test_fillers_roll_where_it_does_not_fit(opened, source, budget, workers):
    """Epochs have the minimum at least, the oldest samples leave, and every sample comes some time, as it is."""
    pool, seen = opened(source, budget, fillers=2, minimum=8), set()
    loader = CachedLoader(pool, 4, shuffle=True, collate_fn=list, num_workers=workers)

    def all_have_come() -> bool:
        samples = [sample for batch in loader for sample in batch]
        numbers = [int(sample[0][0]) for sample in samples]
        assert len(numbers) >= 8
        assert all(same(sample, source[number]) for sample, number in zip(samples, numbers, strict=True))
        seen.update(numbers)
        return seen == set(range(60))

    wait_until(all_have_come)
    assert pool.stats().evicted > 0
    loader.close()


@pytest.mark.processes
def test_an_epoch_does_not_wait_for_records_that_have_no_room(opened):
    """If later records are larger than the first, fewer than the minimum may fit. Training goes on with these."""
    pool = opened([text(number // 5) for number in range(300)], 60_000, fillers=1, minimum=256, shuffle=False)
    assert 0 < len(pool.begin_epoch()) < 256
    wait_until(lambda: pool.stats().evicted > 0)


# ---- faults ----


@pytest.mark.processes
def test_samples_that_cannot_be_loaded_are_left_out(opened, caplog):
    """The first error is logged with its traceback; the others are counted."""
    pool = opened(Numbers(trouble=lambda index: index % 2 and fails(index)), "100%", fillers=1, shuffle=False)
    wait_until(lambda: pool.stats().failed == LENGTH // 2)
    fillers_end()
    assert epoch(pool) == list(range(0, LENGTH, 2))
    assert pool.stats().failed == LENGTH // 2
    assert caplog.text.count("OSError: no answer for 1") == 1
    assert "in fails" in caplog.text
    assert "filler 0 could not load sample 1" in caplog.text


@pytest.mark.processes
def test_samples_that_do_not_fit_are_left_out(opened, caplog):
    """They were loaded: what fails is to store them. The way out is an option of this cache."""
    source = Numbers(make=lambda index: row(index) if index % 2 else (row(index)[0].float(), index))
    pool = opened(source, "100%", fillers=1, shuffle=False, spec=SPEC, minimum=1)
    assert len(pool)
    wait_until(lambda: pool.stats().failed == LENGTH // 2)
    fillers_end()
    assert "filler 0 could not store sample 0, which is left out" in caplog.text
    assert 'layout="records" of CachedDataset, CachedStream or RollingCache' in caplog.text


def words(index: int) -> Any:
    """A record; every fifth one is larger."""
    return str(index), torch.full((4000 if index % 5 else 100_000,), index % 256, dtype=torch.uint8)


@pytest.mark.processes
def test_a_filler_goes_on_behind_a_sample_that_finds_no_room_any_more(opened, monkeypatch):
    """A pool that has stopped growing leaves larger samples out. That is no failure of the source."""
    monkeypatch.setattr(Shortage, "comes_with", lambda shortage, nbytes: "no room" if nbytes > 50_000 else None)
    options = {"fillers": 1, "shuffle": False, "minimum": 1, "indices": range(1, 10**6)}
    pool = opened(Numbers(make=words, length=10**6), "4MiB", spec=words(1), **options)
    wait_until(lambda: pool.stats().appended > 40)
    stats = pool.stats()
    pool.close()
    assert stats.evicted
    assert (stats.failed, stats.restarts) == (0, 0)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("trouble", "words", "restarts"),
    [
        (fails, r"(?s)none of its fillers is left.*no answer for", 0),
        (dies, "it has 3 times before; it is not started again", 3),
    ],
)
def test_a_source_that_always_fails_is_an_error_of_the_training(opened, trouble, words, restarts):
    """With no sample and no filler, the epoch raises their last error. A filler that dies is restarted three times."""
    pool = opened(Numbers(trouble=trouble), 60 * EACH, spec=SPEC, fillers=1, minimum=1)
    with pytest.raises(RuntimeError, match=words):
        len(pool)
    assert pool.stats().restarts == restarts


@pytest.mark.parametrize(
    ("source", "layout", "words"),
    [
        (["one", "two"], "rows", r'the sample is a str.*layout="records" keeps what can be pickled'),
        ([lambda: 1, lambda: 2], "auto", "cannot be kept"),
        (Numbers(trouble=fails), "auto", "OSError: no answer for"),
    ],
)
def test_samples_that_cannot_be_stored_are_refused(opened, source, layout, words):
    """The error tells whether samples are no rows, cannot be pickled, or cannot be read."""
    with pytest.raises(FirstSampleError, match=words):
        len(opened(source, 60 * EACH, layout=layout))


@pytest.mark.processes
def test_a_filler_that_dies_is_started_anew_behind_that_sample(opened, caplog):
    """The log names filler, signal and sample. All other samples come, with other random numbers than before."""
    drawn = Numbers(
        trouble=lambda index: index == 3 and dies(index),
        make=lambda index: (row(index)[0], int(torch.randint(2**62, ()))),
    )
    pool = opened(drawn, "100%", spec=SPEC, fillers=2, minimum=LENGTH - 1)
    batches = list(CachedLoader(pool, 8, shuffle=True))
    assert sorted(int(words[0]) for rows, _ in batches for words in rows) == [n for n in range(LENGTH) if n != 3]
    assert len({number for _, numbers in batches for number in numbers.tolist()}) == LENGTH - 1
    assert pool.stats().restarts == 1
    assert "killed by SIGKILL" in caplog.text
    assert "loading sample 3; it is started again" in caplog.text


@pytest.mark.processes
def test_a_filler_that_hangs_is_logged_while_training_waits(opened, caplog, monkeypatch, tmp_path):
    """The log tells which filler loads which sample, and for how long; `close` ends it, and with it the memory."""
    monkeypatch.setattr(processes, "REPORT_SECONDS", 0.3)
    hangs = Allowance(tmp_path / "allowed", 6)
    pool = opened(Numbers(trouble=hangs), "100%", spec=SPEC, fillers=1, minimum=8, shuffle=False)
    all_resident(pool, 6)
    monkeypatch.setattr(time, "time", lambda: -1e9)  # the wall clock does not matter
    log = logging.getLogger("lightning_stocache.growing.rolling_cache")

    def answer(record: logging.LogRecord) -> bool:
        """When the message comes, another writer appends the missing samples."""
        if "training waits" in record.getMessage() and pool.stats().resident < 8:
            write(pool.handle, (6, 7))
        return True

    log.addFilter(answer)
    assert epoch(pool) == epoch(pool) == list(range(8))
    log.removeFilter(answer)
    assert "6 of 8 have come" in caplog.text
    assert "filler 0 has been loading sample 6 for " in caplog.text
    pool.dataset.close()
    pool.close()
    fillers_end()


@pytest.mark.processes
def test_fillers_end_with_their_parent(opened, tmp_path):
    """Even if the parent is killed, and in the middle of a load."""
    source, before = Numbers(trouble=Allowance(tmp_path / "allowed", 2)), descendants()
    with hanging(lambda: len(opened(source, "100%", spec=SPEC, fillers=2, minimum=2, shuffle=False))) as trainer:
        fillers = descendants() - before - {trainer.process.pid}
    assert len(fillers) == 2
    wait_until(lambda: not any(map(is_alive, fillers)), seconds=60)


@pytest.mark.processes
def test_a_pool_that_is_not_closed_ends_with_its_process():
    """A view keeps the fillers at work, and the process does not wait for them at its end."""
    numbers = call(lambda: epoch(RollingCache(Numbers(), "100%", fillers=1, minimum=LENGTH).view(None)))
    assert numbers == list(range(LENGTH))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fillers": -1}, "fillers must be a whole number of at least 0, got -1"),
        ({"minimum": 0}, "minimum must be a whole number of at least 1, got 0"),
        ({"epoch_samples": 2.5}, "epoch_samples must be a whole number of at least 1, got 2.5"),
        ({"source": None}, "without a source a rolling cache needs spec"),
        ({"source": iter([1]), "indices": [1]}, "indices needs a map-style source"),
        ({"layout": "columns"}, "layout must be 'auto', 'rows' or 'records', got 'columns'"),
        ({"source": CachedDataset([1], defer=True)}, "source must be the dataset itself, got a CachedDataset that is"),
        ({"dir": "/tmp"}, "needs dir= and name="),
    ],
)
def test_arguments_that_break_a_rule(arguments, message):
    """They are refused before the pool opens."""
    with pytest.raises((ValueError, TypeError), match=message):
        RollingCache(**({"source": Numbers(), "budget": "1MiB"} | arguments))


# ---- ranks ----


def epochs_of(group: NodeGroup | None, budget: str, minimum: int, **on_disk: str) -> tuple[list[list[int]], int]:
    """The numbers of three epochs on this rank, of a pool that a group shares, and how many samples came."""
    pool = RollingCache(Numbers(), budget, spec=SPEC, fillers=2, minimum=minimum, **on_disk)
    if group is not None:
        pool.share(group)
    loader = CachedLoader(pool, 2, shuffle=True)
    epochs, came = [labels(loader) for _ in range(3)], pool.stats().appended
    pool.close()
    return epochs, came


def train(rank: int, folder: str) -> tuple[Any, ...]:
    """Pools: of this rank's own, of two nodes, of two jobs on a disk, and in memory of both ranks; and warnings."""
    log, node = Log(), NodeGroup.discover()
    alone, _ = epochs_of(None, "100%", LENGTH)
    apart, _ = epochs_of(NodeGroup.discover(key=rank), "50%" if rank else "20%", 100)
    jobs = []
    for _ in range(2):
        jobs.append(epochs_of(node, "100%", LENGTH, dir=folder, name="pool"))
        dist.barrier()
    shared, _ = epochs_of(node, "50%", 20)
    return alone, apart, jobs, shared, sum("call share() of the dataset" in line for line in log.lines)


@pytest.mark.processes
def test_ranks_run_the_same_number_of_batches(tmp_path):
    """Ranks of a node divide the resident samples, of which the smaller of two nodes decides the number, in this job
    and in the next one. Without `share` each rank has all of its own pool, and one warning says so."""
    first, second = run_ranks(train, 2, str(tmp_path / "pools"))
    for alone, *_ in (first, second):
        assert [sorted(numbers) for numbers in alone] == [list(range(LENGTH))] * 3
    assert [warnings for *_, warnings in (first, second)] == [1, 0]
    small, large = first[1], second[1]
    assert [len(numbers) for numbers in small + large] == [8] * 6
    assert len(set().union(*large)) > 8
    for came, (ours, all_came), (theirs, _) in zip((LENGTH, 0), first[2], second[2], strict=True):
        assert all_came == came
        assert [sorted(numbers + others) for numbers, others in zip(ours, theirs, strict=True)] == [
            list(range(LENGTH))
        ] * 3
    for numbers, others in zip(first[3], second[3], strict=True):
        assert len(numbers) == len(others) == 10
