"""Several ranks in plain scripts and in Fabric: nodes that are not alike, ranks that die, loaders that go on."""

import os
import signal
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler

from lightning_stocache import CachedDataset, CachedLoader
from lightning_stocache.cache.placement import Ring
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.loader_sampler import global_seed, locality_sampler
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.sampling.assignment import Dealer
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from tests.loading.twins import Numbers, logged_to
from tests.processes import ChildError, run_ranks
from tests.sources import CountedSource

LENGTH, EPOCHS, BATCH = 1200, 3, 20


@pytest.mark.parametrize(
    ("world", "rank", "kind", "workers", "options", "words"),
    [
        ("2", "0", CachedLoader, 2, {}, ["each of 2 ranks has a cache of its own: ", "share()", "DistributedSampler"]),
        ("2", "0", CachedLoader, 0, {"defer": True}, ["each of 2 ranks loads its samples uncached: "]),
        ("2", "0", DataLoader, 2, {"budget": 0}, ["each of 2 ranks loads its samples uncached: "]),
        ("2", "1", CachedLoader, 0, {}, []),
        ("1", "0", CachedLoader, 0, {}, []),
    ],
)
def test_a_loader_says_that_ranks_are_alone(monkeypatch, tmp_path, world, rank, kind, workers, options, words):
    """Under torchrun one warning of all workers and epochs, on rank zero, names share() and a DistributedSampler."""
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("RANK", rank)
    with logged_to(tmp_path / "log"), closing(CachedDataset(CountedSource(8), **options)) as dataset:
        for _ in range(2):
            list(kind(dataset, 2, num_workers=workers))
    said = (tmp_path / "log").read_text().splitlines()
    assert len(said) == (1 if words else 0)
    assert all(word in said[0] for word in words)


FOLD = list(range(1, LENGTH, 4))
FIRST, SECOND = "node0 (ranks 0): room for 75", "node1 (ranks 1, 2): room for 150"


def train_on_fold(rank: int) -> Any:
    """Some epochs of a fold on a node of one rank and one of two, each with a budget of its own."""
    group = NodeGroup.discover(key=min(rank, 1))
    dataset = CachedDataset(Numbers(LENGTH, (4,)), ("25%", "50%")[group.node], indices=FOLD, defer=True)
    dataset.share(group)
    assert dataset.describe().startswith(f"Numbers on {(SECOND, FIRST)[rank == 0]} of the 300 that are drawn of 1,200")
    dist.barrier()  # nobody fills before all have looked
    torch.manual_seed(5)
    loader = CachedLoader(dataset, BATCH, sampler=SubsetRandomSampler(FOLD), locality=True)
    drawn, hits = [], []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        drawn.append([label for _, labels in loader for label in labels.tolist()])
        hits.append(dataset.counters.totals(rank).hits)
        dist.barrier()
    assert dataset.ring.coverage == 0.75
    assert group.shares == pytest.approx((1 / 3, 2 / 3))
    dataset.close()
    return drawn, hits


@pytest.mark.processes
@pytest.mark.epoch_one_reads_all
def test_a_fold_is_dealt_to_nodes_that_are_not_alike() -> None:
    """By `indices` and a sampler of the user's: each epoch has the fold once, and hits all that the nodes hold."""
    drawn, hits = zip(*run_ranks(train_on_fold, 3), strict=True)
    for epoch in range(EPOCHS):
        assert sorted(index for epochs in drawn for index in epochs[epoch]) == FOLD
    rates = np.diff(np.sum(hits, axis=0), prepend=0) / len(FOLD)
    assert rates == pytest.approx([0, 0.75, 0.75], abs=0.05)


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


@pytest.mark.processes
@pytest.mark.parametrize("when", ["before", "leader", "guest"])
def test_a_rank_that_dies_while_caches_open_keeps_nobody_waiting(tmp_path, when) -> None:
    """All others, on both nodes, get an error: it dies before ranks have met, as a leader that reads, or as a guest."""
    with pytest.raises(ChildError, match="SIGKILL"):
        run_ranks(one_dies, 4, str(tmp_path), when, all_end=True)
    victim = "2" if when == "leader" else "3"
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "3"} - {victim}


# ---- Fabric ----


def epoch_of(loader: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


def in_fabric(rank: int, folder: str, world: int, locality: bool) -> Any:
    """Three epochs by Fabric, of which the second is broken off and gone on with by other objects."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    warnings.filterwarnings("ignore")
    path, runs = Path(folder) / "state.ckpt", []
    for broken in (False, True):
        fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp")
        fabric.launch()

        def new(fabric: Fabric = fabric) -> tuple[Any, CachedDataset]:
            dataset = CachedDataset(Numbers(LENGTH, (4,)), defer=True)
            dataset.share()
            loader = CachedLoader(dataset, BATCH, shuffle=True, locality=locality, gather="main")
            return fabric.setup_dataloaders(loader), dataset

        loader, dataset = new()
        assert type(loader.sampler) is (LocalitySampler if locality else DistributedSampler)
        assert (type(loader._dataloader), loader._dataloader.gather) == (CachedLoader, "main")
        seen = [epoch_of(loader)]
        begun = [labels.tolist() for _, (_, labels) in zip(range(4), loader, strict=False)] if broken else []
        if broken:
            fabric.save(path, {"loader": loader})
            dataset.close()
            loader, dataset = new()
            fabric.load(path, {"loader": loader})
        seen += [begun + epoch_of(loader), epoch_of(loader)]
        dist.barrier()
        dataset.close()
        runs.append(seen)
    return runs


@pytest.mark.processes
@pytest.mark.parametrize("locality", [True, False])
def test_fabric_saves_and_loads_a_loader(tmp_path: Path, locality: bool) -> None:
    """The rest of the epoch comes, and then the next one, though Fabric counts epochs from zero again."""
    ranks = run_ranks(in_fabric, 2, str(tmp_path), 2, locality)
    for whole, broken in ranks:
        assert whole == broken
    for epoch in range(3):
        labels = [label for whole, _ in ranks for batch in whole[epoch] for label in batch]
        assert sorted(labels) == list(range(LENGTH))
    assert ranks[0][0][0] != ranks[0][0][1]


def test_a_loader_in_a_large_job_draws_few_global_batches_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 ranks computes the deal of all ranks, so a warm loader does not deal many batches at once."""
    ranks, size = 64, 64
    nodes = tuple(tuple(range(first, first + 8)) for first in range(0, ranks, 8))
    length = ranks * size * 8
    ring = Ring.cut(length, [1 / 8] * 8, [length // 8] * 8)
    deal, most, deals = Dealer.deal, [], []
    monkeypatch.setattr(Dealer, "deal", lambda dealer, batch: deals.append(1) or deal(dealer, batch))
    with closing(CachedDataset(torch.arange(length), spec=SampleSpec.infer(torch.tensor(0)))) as dataset:
        list(CachedLoader(dataset, 1024))
        sampler = LocalitySampler(dataset, ranks, 5, batch_size=size, ring=ring, nodes=nodes)
        expected = list(sampler)
        deals.clear()
        loader = CachedLoader(dataset, size, sampler=sampler)
        seen = []
        for number, batch in enumerate(loader):
            most.append(len(deals) - number)
            seen += batch.tolist()
    assert seen == expected
    assert max(most) <= 4  # the one that is handed out, two that are gathered, and one that the sampler deals ahead


def test_the_sampler_of_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one replica get the same samples, a sampler that deals stays, and a grown source has no ring."""
    source: Any = list(range(LENGTH))
    dataset = CachedDataset(source, spec=SampleSpec.infer(0))
    parts = [
        list(CachedLoader(dataset, BATCH, shuffle=True, locality=True, num_replicas=2, rank=rank).sampler)
        for rank in (0, 0, 1, 1)
    ]
    assert parts[0] == parts[1] != parts[2] == parts[3]
    assert sorted(parts[1] + parts[2]) == source
    dealing = DistributedSampler(dataset, 2, 0)
    assert CachedLoader(dataset, BATCH, sampler=dealing, locality=True).sampler is dealing
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert (global_seed(), locality_sampler(dataset, 2, True).seed) == (0, 0)
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert (global_seed(), locality_sampler(dataset, 2, True).seed) == (17, 17)
    assert locality_sampler(dataset, 2, False).ring is dataset.ring
    source.append(LENGTH)
    sampler = locality_sampler(dataset, 2, False)
    assert sampler.ring is None
    assert list(sampler) == source
    dataset.close()
