"""A dataset that grows and rolls while it is trained on, in loaders of all kinds; and the faults of its fillers."""

import errno
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_stocache import CachedDataset, CachedLoader, RollingCache, RollingWriter, SampleSpec
from lightning_stocache.node import processes
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.segment import Segment, SegmentHandle
from lightning_stocache.setup.first_samples import FirstSampleError
from tests.growing.pools import LENGTH, SPEC, Numbers, Stream, all_resident, epoch, fillers_end, labels, write
from tests.loading.twins import same
from tests.logs import Log
from tests.proc import is_alive
from tests.processes import Child, call, wait_until
from tests.ranks import run_ranks
from tests.sources import Allowance

EACH = SPEC.nbytes + 24  # bytes of a slot

pytestmark = pytest.mark.processes


# ---- epochs ----


def test_an_epoch_begins_before_any_rank_can_read_from_it(opened, monkeypatch):
    """The leader begins it before the ranks of the node agree, or the others would count newer samples wrongly."""
    pool, steps, lead = opened(budget=100 * EACH, spec=SPEC, minimum=10), [], NodeGroup.lead
    write(pool.handle, range(10))
    begin = pool.store.begin_epoch

    def agree(group: NodeGroup, work: Callable[[], Any]) -> Any:
        outcome = lead(group, work)
        steps.append("agreed")
        return outcome

    monkeypatch.setattr(pool.store, "begin_epoch", lambda: (steps.append("begun"), begin()))
    monkeypatch.setattr(NodeGroup, "lead", agree)
    pool.begin_epoch()
    assert steps == ["begun", "agreed"]


OF_A_SERVER: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "forkserver"}
LOADERS = {
    "plain": lambda pool: DataLoader(pool, 8, sampler=pool.sampler()),
    "plain with persistent workers": lambda pool: DataLoader(pool, 8, sampler=pool.sampler(), **OF_A_SERVER),
    "cached": lambda pool: CachedLoader(pool, 8, shuffle=True),
    "cached, by workers": lambda pool: CachedLoader(pool, 8, shuffle=True, num_workers=1, gather="worker"),
}


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
    write(pool.handle, range(4))
    assert sorted(int(label) for _, batch in CachedLoader(pool, 2) for label in batch) == [0, 10, 20, 30]
    assert epoch(pool.view(None)) == [0, 1, 2, 3]
    assert pool[3][1] == pool[-1][1] == 30


def test_a_view_keeps_the_fillers_at_work():
    """Even if no other object refers to the pool."""
    view = RollingCache(Numbers(), "100%", fillers=1, minimum=LENGTH).view(None)
    assert epoch(view) == list(range(LENGTH))
    assert view.is_open


@pytest.mark.parametrize("index", [10**7, -(10**7)])
def test_an_index_outside_is_an_index_error(opened, index):
    """Alone and in a batch."""
    pool = opened(spec=SPEC, budget=60 * EACH, minimum=1)
    write(pool.handle, range(1))
    with pytest.raises(IndexError, match="out of range"):
        pool[index]
    with pytest.raises(IndexError):
        pool.__getitems__([0, index])


# ---- fillers ----


def test_fillers_load_the_whole_source_once_where_it_fits(opened):
    """If all samples have room, each is loaded once, and the fillers end."""
    pool = opened(Numbers(), "100%", fillers=2, minimum=1, multiprocessing_context="forkserver")
    all_resident(pool)
    assert epoch(pool) == list(range(LENGTH))
    fillers_end()
    assert (pool.stats().appended, pool.stats().evicted) == (LENGTH, 0)


def text(number: int) -> Any:
    """A sample of its own length."""
    return torch.full((1 + 7 * number,), number), f"{number} " * number


@pytest.mark.parametrize(
    ("source", "budget", "workers"),
    [(Numbers(60), "25%", 0), ([text(number) for number in range(60)], 70_000, 1)],
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


def test_an_epoch_waits_for_the_minimum_and_goes_on(opened, tmp_path):
    """With fillers slower than training, an epoch has at least the minimum, and later epochs have more."""
    allowed, lengths = Allowance(tmp_path / "allowed", 5), []
    pool = opened(Numbers(trouble=allowed), "100%", spec=SPEC, fillers=1, minimum=5)
    loader = CachedLoader(pool, 5, shuffle=True)
    for resident in (5, 15, 25, 35):
        all_resident(pool, resident)
        lengths.append(len(labels(loader)))
        allowed.more(10)
    assert lengths == [5, 15, 25, 35]


def test_a_stream_is_divided_among_the_fillers(opened):
    """An IterableDataset sees its filler as it sees a worker. When it has ended, it begins again."""
    pool, seen = opened(Stream(20), 60 * EACH, fillers=2, minimum=60), set()
    wait_until(lambda: seen.update(epoch(pool)) or seen == set(range(20)))


def test_a_generator_ends_and_training_goes_on(opened):
    """Its samples stay, even if fewer than the minimum have come."""
    source = (Numbers()[number] for number in range(12))  # which cannot be pickled
    pool = opened(source, 60 * EACH, fillers=2, minimum=50, multiprocessing_context="fork")
    assert epoch(pool) == epoch(pool) == list(range(12))


def test_fillers_load_the_given_indices(opened):
    """One filler loads each index of the stream."""
    assert epoch(opened(Numbers(), 60 * EACH, fillers=2, minimum=3, indices=[7, 3, 9])) == [3, 7, 9]


def test_a_few_records_have_room(opened):
    """The budget is for samples alone. Writers may append more samples than the source has."""
    pool = opened([text(20)], "100%", fillers=1, minimum=1)
    assert len(pool[0][0]) == 141
    with RollingWriter.attach(pool.handle) as writer:
        for number in range(1, 20):
            writer.append(text(number))
    assert len(pool.begin_epoch()) >= 1


def test_an_epoch_does_not_wait_for_records_that_have_no_room(opened):
    """If later records are larger than the first, fewer than the minimum may fit. Training goes on with these."""
    pool = opened([text(number // 5) for number in range(300)], 60_000, fillers=1, minimum=256, shuffle=False)
    assert 0 < len(pool.begin_epoch()) < 256
    wait_until(lambda: pool.stats().evicted > 0)


# ---- faults ----


def raises_at(index: int) -> None:
    if index % 2:
        raise OSError(f"no answer for {index}")


def always_raises(index: int) -> None:
    raise OSError("the store is gone")


def dies(index: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at_three(index: int) -> None:
    """In fillers alone: set-up reads the first samples, too."""
    info = get_worker_info()
    if index == 3 and info is not None and info.num_workers == 2:
        dies(index)


class HangsAfter:
    """Blocks for ever from an index on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(self, index: int) -> None:
        if index >= self.first:
            time.sleep(1000)


def test_samples_that_cannot_be_loaded_are_left_out(opened, caplog):
    """The first error is logged with its traceback; the others are counted."""
    pool = opened(Numbers(trouble=raises_at), "100%", fillers=1, minimum=1, shuffle=False)
    wait_until(lambda: pool.stats().failed == LENGTH // 2)
    fillers_end()
    assert epoch(pool) == list(range(0, LENGTH, 2))
    assert pool.stats().failed == LENGTH // 2
    assert caplog.text.count("OSError: no answer for 1") == 1
    assert "in raises_at" in caplog.text
    assert "filler 0 could not load sample 1" in caplog.text


@pytest.mark.parametrize(
    ("trouble", "words", "restarts"),
    [
        (always_raises, r"(?s)none of its fillers is left.*the store is gone", 0),
        (dies, "it has 3 times before; it is not started again", 3),
    ],
)
def test_a_source_that_always_fails_is_an_error_of_the_training(opened, trouble, words, restarts):
    """With no sample and no filler, the epoch raises their last error. A filler that dies is restarted three times."""
    pool = opened(Numbers(trouble=trouble), 60 * EACH, spec=SPEC, fillers=1, minimum=1)
    with pytest.raises(RuntimeError, match=words):
        len(pool)
    assert pool.stats().restarts == restarts


def test_samples_that_cannot_be_stored_are_refused(opened):
    """The error tells whether samples are no rows, cannot be pickled, or cannot be read."""
    with pytest.raises(FirstSampleError, match=r'the sample is a str.*layout="records" keeps what can be pickled'):
        len(opened(["one", "two", "three"], 60 * EACH, layout="rows"))
    with pytest.raises(FirstSampleError, match="cannot be kept"):
        len(opened([lambda: 1, lambda: 2], 60 * EACH))
    with pytest.raises(FirstSampleError, match="OSError: the store is gone"):
        len(opened(Numbers(trouble=always_raises), 60 * EACH))


class Drawn(Numbers):
    """Indices with a random number each."""

    def expected(self, index: int) -> tuple[torch.Tensor, int]:
        return super().expected(index)[0], int(torch.randint(2**62, ()))


def test_a_filler_that_dies_is_started_anew_behind_that_sample(opened, caplog):
    """The log names filler, signal and sample. All other samples come, with other random numbers than before."""
    pool = opened(Drawn(trouble=dies_at_three), "100%", spec=SPEC, fillers=2, minimum=LENGTH - 1)
    batches = list(CachedLoader(pool, 8, shuffle=True))
    assert sorted(int(row[0]) for rows, _ in batches for row in rows) == [n for n in range(LENGTH) if n != 3]
    assert len({number for _, numbers in batches for number in numbers.tolist()}) == LENGTH - 1
    assert pool.stats().restarts == 1
    assert "killed by SIGKILL" in caplog.text
    assert "loading sample 3; it is started anew" in caplog.text


def test_a_filler_that_hangs_is_logged_while_training_waits(opened, caplog, monkeypatch):
    """The log tells which filler loads which sample, and for how long. With the minimum, training goes on."""
    monkeypatch.setattr(processes, "REPORT_SECONDS", 0.3)
    pool = opened(Numbers(trouble=HangsAfter(6)), "100%", spec=SPEC, fillers=1, minimum=8, shuffle=False)
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


def test_fillers_end_with_a_pool_whose_dataset_was_closed_before(opened):
    """Closing the dataset behind a pool closes the memory, and `close` ends the fillers all the same."""
    pool = opened(Numbers(trouble=HangsAfter(4)), "100%", spec=SPEC, fillers=1, minimum=4, shuffle=False)
    pool.dataset.close()
    pool.close()
    fillers_end()


def train_and_be_killed(path: Path) -> None:
    pool = RollingCache(Numbers(trouble=HangsAfter(4)), "100%", spec=SPEC, fillers=2, minimum=2, shuffle=False)
    len(pool)
    path.write_text(Path(f"/proc/self/task/{os.getpid()}/children").read_text())
    time.sleep(1000)


def test_fillers_end_with_their_parent(tmp_path):
    """Even if the parent is killed, and in the middle of a load."""
    path = tmp_path / "fillers"
    child = Child(train_and_be_killed, path)
    wait_until(lambda: path.exists() and len(path.read_text().split()) >= 2)
    fillers = [int(pid) for pid in path.read_text().split()]
    child.kill()
    wait_until(lambda: not any(map(is_alive, fillers)), seconds=60)


def use_up() -> int:
    pool = RollingCache(Numbers(), "50%", fillers=2, minimum=20)
    count = len(epoch(pool))
    del pool
    return count


def test_a_pool_that_is_not_closed_ends_with_its_process():
    """Its fillers are daemons, so the process ends at once."""
    assert call(use_up) == 20


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
        ({"source": CachedDataset([1], defer=True)}, "source must be the dataset itself, got a CachedDataset that is"),
        ({"dir": "/tmp"}, "needs dir= and name="),
        ({"name": "pool"}, "needs dir= and name="),
    ],
)
def test_arguments_that_break_a_rule(arguments, message):
    """They are refused before the pool opens."""
    with pytest.raises((ValueError, TypeError), match=message):
        RollingCache(**({"source": Numbers(), "budget": "1MiB"} | arguments))


# ---- ranks ----


def attach_by_name() -> None:
    """Reach memory by names alone, as a process of another pid namespace has to."""
    attach = Segment.attach

    def by_name(handle: SegmentHandle) -> Segment:
        if handle.data.startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", handle.data)
        return attach(handle)

    Segment.attach = by_name  # type: ignore[method-assign,assignment]


def epochs_of(pool: RollingCache, group: NodeGroup | None, count: int) -> list[list[int]]:
    """The numbers of some epochs on this rank, of a pool that a group shares."""
    if group is not None:
        pool.share(group)
    loader = CachedLoader(pool, 2, shuffle=True)
    epochs = [labels(loader) for _ in range(count)]
    pool.close()
    return epochs


def train(rank: int) -> tuple[Any, ...]:
    """Epochs of a pool of this rank's own, of a pool that both ranks share, and of pools of two nodes."""
    log = Log()
    alone = epochs_of(RollingCache(Numbers(), "100%", fillers=1, minimum=LENGTH), None, 2)
    nodes = NodeGroup.discover(key=rank)
    apart = epochs_of(RollingCache(Numbers(), "50%" if rank else "20%", fillers=1, minimum=100), nodes, 3)
    warnings = sum("call share() of the dataset" in line for line in log.lines)
    if rank == 1:
        attach_by_name()
    shared = epochs_of(RollingCache(Numbers(), "50%", fillers=2, minimum=20), NodeGroup.discover(), 3)
    return alone, apart, shared, warnings


def test_ranks_run_the_same_number_of_batches():
    """Ranks of a node divide the resident samples, also in separate pid namespaces, where they attach by name. Of two
    nodes the smaller pool decides the number, and more samples of the larger pool are drawn some time. Without `share`,
    each rank trains on all of its own pool, and one warning on rank zero says so."""
    first, second = run_ranks(train, 2)
    for alone, _, _, _ in (first, second):
        assert [sorted(numbers) for numbers in alone] == [list(range(LENGTH))] * 2
    assert [warnings for *_, warnings in (first, second)] == [1, 0]
    small, large = first[1], second[1]
    assert [len(numbers) for numbers in small + large] == [8] * 6
    assert len(set().union(*large)) > 8
    for ours, theirs in zip(first[2], second[2], strict=True):
        assert len(ours) == len(theirs) == 10
