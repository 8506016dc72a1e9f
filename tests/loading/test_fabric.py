"""Loops of one's own, in Fabric and in plain PyTorch: locality, epochs and states as in a Trainer."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.utils.data import DistributedSampler

from lightning_stocache import CachedDataset, CachedLoader, LocalitySampler, SampleSpec
from lightning_stocache.loading.loader_sampler import global_seed, locality_sampler
from tests.loading.twins import Numbers
from tests.ranks import run_ranks

LENGTH, BATCH, EPOCHS = 600, 25, 4


def epoch_of(loader: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


def in_fabric(rank: int, folder: str, world: int, sampling: Any) -> Any:
    """Three epochs by Fabric, of which the second is broken off and gone on with by other objects."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    warnings.filterwarnings("ignore")
    runs = []
    for broken in (False, True):
        fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp")
        fabric.launch()
        source = Numbers(LENGTH, (4,))

        def new(fabric: Fabric = fabric, source: Any = source) -> tuple[Any, CachedDataset]:
            dataset = CachedDataset(source, defer=True)
            dataset.share()
            loader = CachedLoader(dataset, BATCH, shuffle=True, sampling=sampling, gather="main")
            return fabric.setup_dataloaders(loader), dataset

        loader, dataset = new()
        assert type(loader.sampler) is (LocalitySampler if sampling else DistributedSampler)
        assert (type(loader._dataloader), loader._dataloader.gather) == (CachedLoader, "main")
        seen = [epoch_of(loader)]
        if broken:
            seen.append([])
            for number, (_, labels) in enumerate(loader):
                seen[1].append(labels.tolist())
                if number == 3:
                    break
            path = Path(folder) / "state.ckpt"
            fabric.save(path, {"loader": loader})
            dataset.close()
            loader, dataset = new()
            fabric.load(path, {"loader": loader})
            seen[1] += epoch_of(loader)
            seen.append(epoch_of(loader))
        else:
            seen += [epoch_of(loader) for _ in range(2)]
        dist.barrier()
        dataset.close()
        runs.append(seen)
    return runs


@pytest.mark.processes
@pytest.mark.parametrize("sampling", ["locality", None])
def test_fabric_saves_and_loads_a_loader(tmp_path: Path, sampling: str | None) -> None:
    """`fabric.save` and `fabric.load` know the loader, made anew with a DistributedSampler or not: the rest of the
    epoch comes, and then the next one, though Fabric counts epochs from zero again."""
    ranks = run_ranks(in_fabric, 2, str(tmp_path), 2, sampling)
    for whole, broken in ranks:
        assert whole == broken
    for epoch in range(3):
        labels = [label for whole, _ in ranks for batch in whole[epoch] for label in batch]
        assert sorted(labels) == list(range(LENGTH))
    assert ranks[0][0][0] != ranks[0][0][1]


def test_a_mesh_has_fewer_replicas_than_ranks() -> None:
    """Ranks that are told to work on the same samples get the same ones, each part of the dataset once."""
    dataset = CachedDataset(Numbers(LENGTH, (4,)), defer=True)
    parts = [
        epoch_of(CachedLoader(dataset, BATCH, shuffle=True, sampling="locality", num_replicas=2, rank=rank))
        for rank in (0, 0, 1, 1)
    ]
    assert parts[0] == parts[1] != parts[2] == parts[3]
    assert sorted(label for part in parts[1:3] for batch in part for label in batch) == list(range(LENGTH))
    dataset.close()


# ---- the sampler of such a loader


def test_a_source_that_has_grown_has_no_ring() -> None:
    """The new samples would lie on no arc."""
    source = [0.0, 1.0]
    dataset = CachedDataset(source, spec=SampleSpec.infer(0.0))
    source.append(2.0)
    sampler = locality_sampler(dataset, 2, False)
    assert sampler.ring is None
    assert list(sampler) == [0, 1, 2]
    dataset.close()


def test_the_seed_is_that_of_seed_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero without it."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert (global_seed(), locality_sampler(range(4), 2, True).seed) == (0, 0)
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert (global_seed(), locality_sampler(range(4), 2, True).seed) == (17, 17)
