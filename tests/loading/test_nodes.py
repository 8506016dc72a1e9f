"""Nodes that are not alike, and ranks that die while caches open, in a plain torch.distributed script."""

import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.node.group import NodeGroup
from tests.logs import Log
from tests.processes import ChildError, call
from tests.ranks import run_ranks
from tests.sampling.theory import rates_of
from tests.sources import CountedSource

pytestmark = pytest.mark.processes

LENGTH, BATCH, EPOCHS = 1200, 40, 4


@pytest.mark.parametrize(
    ("kind", "workers", "options", "state"),
    [
        (DataLoader, 0, {}, "has a cache of its own"),
        (CachedLoader, 2, {}, "has a cache of its own"),
        (CachedLoader, 0, {"defer": True}, "loads its samples uncached"),
        (DataLoader, 2, {"budget": 0}, "loads its samples uncached"),
    ],
)
def test_a_loader_says_that_ranks_are_alone(monkeypatch, kind, workers, options, state):
    """Under torchrun one warning of all workers and epochs, on rank zero, names share() and a DistributedSampler."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, warnings in ((1, 0), (0, 1)):
        monkeypatch.setenv("RANK", str(rank))
        said = call(alone, kind, workers, options)
        assert len(said) == warnings
    assert f"each of 2 ranks {state}: " in said[0]
    assert "share()" in said[0]
    assert "DistributedSampler" in said[0]
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert call(alone, kind, workers, options) == []


def alone(kind: Any, workers: int, options: dict[str, Any]) -> list[str]:
    """What a script is told that shares nothing, with logging in a file that workers share."""
    with tempfile.NamedTemporaryFile("r") as file:
        logging.getLogger("lightning_stocache").addHandler(logging.FileHandler(file.name))
        dataset = CachedDataset(CountedSource(8), **options)
        for _ in range(2):
            list(kind(dataset, 2, num_workers=workers))
        dataset.close()
        return file.read().splitlines()


FOLD = list(range(1, LENGTH, 4))


def train_on_fold(rank: int) -> Any:
    """Some epochs of a fold on a node of one rank and one of two, each with a budget of its own."""
    log, group = Log(), NodeGroup.discover(key=min(rank, 1))
    logging.getLogger("lightning_stocache").setLevel(logging.INFO)
    source = CountedSource(LENGTH, (4,))
    dataset = CachedDataset(source, ("25%", "50%")[group.node], indices=FOLD, defer=True)
    dataset.share(group)
    assert dataset.describe() == describe_of(group.node)
    dist.barrier()  # nobody fills before all have looked
    assert dataset.ring is not None
    assert dataset.counters is not None
    torch.manual_seed(5)
    loader = CachedLoader(dataset, 20, sampler=SubsetRandomSampler(FOLD), sampling="locality")
    hits, seen, states = [0], [], []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        images = []
        for number, batch in enumerate(loader):
            images.append(batch[0])
            if epoch == 1 and number == 2:
                states.append(loader.state_dict())
        drawn = torch.cat(images)
        seen.append([next(i for i in FOLD if torch.equal(source.expected(i)[0], image)) for image in drawn])
        hits.append(dataset.counters.totals(rank).hits)
        dist.barrier()
    loader.load_state_dict(states[0])
    again = torch.cat([batch[0] for batch in loader])
    whole = torch.stack([source.expected(index)[0] for index in seen[1]])
    assert torch.equal(again, whole[3 * 20 :]), "what was left of the epoch"
    rates = [sum(its[epoch + 1] - its[epoch] for its in group.exchange(hits)) / len(FOLD) for epoch in range(EPOCHS)]
    expected = rates_of(dataset.ring, group.nodes, 20, EPOCHS)
    coverage, shares = dataset.ring.coverage, group.shares
    dist.barrier()
    dataset.close()
    return seen, rates, expected, coverage, shares, [line for line in log.lines if "read at set-up" not in line]


def describe_of(node: int) -> str:
    """The line on the cache of a node: its ranks, arc, slots and budget."""
    name, slots, start, size = [("node0 (ranks 0)", 75, 0, "975 B"), ("node1 (ranks 1, 2)", 150, 100, "1.9 KiB")][node]
    return (
        f"CountedSource on {name}: {slots} of the 300 that are drawn of 1,200 samples have a slot in an arc that "
        f"starts at {start}, 0 are filled, {size} in use of {size}"
    )


@pytest.mark.epoch_one_reads_all
def test_a_fold_is_dealt_to_nodes_that_are_not_alike() -> None:
    """By `indices` and a sampler of the user's: each epoch has the fold once, hit rates are those of theory, an epoch
    goes on in its middle, and one rank of each node describes the node's cache."""
    results = run_ranks(train_on_fold, 3)
    _, rates, expected, coverage, shares, _ = results[0]
    assert shares == pytest.approx((1 / 3, 2 / 3))
    assert coverage == 0.75
    assert [result[5] for result in results] == [[describe_of(0)], [describe_of(1)], []]
    for epoch in range(EPOCHS):
        assert sorted(index for result in results for index in result[0][epoch]) == FOLD
    assert expected[-1] > 0.6
    assert rates == pytest.approx(expected, abs=0.05)


class Deadly(CountedSource):
    """Kills the process that waits for the look at it, on one rank."""

    armed = False

    def __getitem__(self, index: int) -> Any:
        if self.armed:
            os.kill(os.getppid(), signal.SIGKILL)
        return super().__getitem__(index)


def one_dies(rank: int, folder: str, when: str) -> None:
    victim = rank == (2 if when == "leader" else 3)
    try:
        if victim and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        group = NodeGroup.discover(key=rank // 2)
        if victim and when == "guest":
            os.kill(os.getpid(), signal.SIGKILL)
        Deadly.armed = victim
        CachedDataset(Deadly(LENGTH), defer=True).share(group)
    except Exception as error:
        Path(folder, str(rank)).write_text(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("when", ["before", "leader", "guest"])
def test_a_rank_that_dies_while_caches_open_keeps_nobody_waiting(tmp_path, when) -> None:
    """All other ranks get an error, on the node of the dead one and on the other: it dies before the ranks have found
    each other, as a leader that reads, or as a guest."""
    with pytest.raises(ChildError, match="SIGKILL"):
        run_ranks(one_dies, 4, str(tmp_path), when)
    victim = "2" if when == "leader" else "3"
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "3"} - {victim}
