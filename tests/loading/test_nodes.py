"""Nodes that are not alike, and ranks that die while caches open, in a plain torch.distributed script."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_stocache.insight.theory import expected_hit_rate, moved_share
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from tests.processes import ChildError
from tests.ranks import run_ranks
from tests.sources import CountedSource

pytestmark = pytest.mark.processes

LENGTH, BATCH, EPOCHS = 1200, 40, 4


def train(rank: int, budgets: list[str]) -> Any:
    """Some epochs on a node of one rank and one of two, each with a budget of its own."""
    group = NodeGroup.discover(key=min(rank, 1))
    source = CountedSource(LENGTH, (4,))
    dataset = CachedDataset(source, budget=budgets[group.node], defer=True)
    dataset.share(group)
    assert dataset.ring is not None
    assert dataset.counters is not None
    said = dataset.describe()
    dist.barrier()  # nobody fills before all have looked
    sampler = LocalitySampler(source, 3, rank, batch_size=BATCH, ring=dataset.ring, nodes=group.nodes)
    hits, seen = [0], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        order = list(sampler)
        images = torch.cat([batch[0] for batch in DataLoader(dataset, BATCH, sampler=order)])
        assert torch.equal(images, torch.stack([source.expected(index)[0] for index in order]))
        hits.append(dataset.counters.totals(rank).hits)
        seen.append(order)
        dist.barrier()
    rates = [sum(its[epoch + 1] - its[epoch] for its in group.exchange(hits)) / LENGTH for epoch in range(EPOCHS)]
    moved = moved_share(dataset.ring, group.nodes, BATCH)
    expected = [expected_hit_rate(dataset.ring, group.shares, epoch, moved) for epoch in range(EPOCHS)]
    result = group.nodes, group.shares, dataset.ring.coverage, said, seen, rates, expected
    dist.barrier()
    dataset.close()
    return result


def test_nodes_may_have_different_ranks_and_budgets() -> None:
    """One rank with a quarter of the dataset beside two with a half: every epoch is whole, the hit rate is as
    predicted, and each node describes its own arc, slots and budget."""
    results = run_ranks(train, 3, ["25%", "50%"])
    nodes, shares, coverage, _, _, rates, expected = results[0]
    assert nodes == ((0,), (1, 2))
    assert shares == pytest.approx((1 / 3, 2 / 3))
    assert coverage == 0.75
    for epoch in range(EPOCHS):
        assert sorted(index for result in results for index in result[4][epoch]) == list(range(LENGTH))
    assert expected[-1] > 0.7
    assert rates == pytest.approx(expected, abs=0.02)
    said = [result[3] for result in results]
    assert said[0].startswith(
        "CountedSource on node0 (ranks 0): 300 of 1,200 samples have a slot in an arc that starts"
    )
    assert said[1].startswith("CountedSource on node1 (ranks 1, 2): 600 of 1,200 samples have a slot in an arc")
    assert said[1] == said[2]


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
