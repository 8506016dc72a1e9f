"""Two nodes on one machine, each with its own /dev/shm: their memory adds up, and an error on one node ends all."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.cache.placement import Ring
from tests.jobs import OWN_SHM, exit_codes, free_port, job_environment, skip_without, start, start_module
from tests.sampling.theory import moved_share
from tests.training.job import NODES_BATCH as BATCH
from tests.training.job import NODES_FOLD as FOLD
from tests.training.job import NODES_SAMPLES as SAMPLES
from tests.training.job import logs, read_at_setup, read_ranks, start_nodes
from tests.training.tiny import source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.processes]

NODES = ((0, 1), (2, 3))
SECONDS = 240


@pytest.fixture(scope="module", autouse=True)
def own_shm() -> None:
    """Skips where a process may not have a /dev/shm of its own."""
    skip_without(OWN_SHM)


def command(launcher: str, node: int, port: str) -> list[str]:
    """The command of a user on a node."""
    if launcher == "NODE_RANK":
        return [sys.executable]
    meet = [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *meet]


def slurm(node: int) -> list[dict[str, str]]:
    """The environment of each rank of a node, as SLURM's tasks have it."""
    job = {"JOB_ID": "1", "JOB_NAME": "job", "NTASKS": "4", "NTASKS_PER_NODE": "2", "NODEID": node}
    told = [{**job, "LOCALID": local, "PROCID": 2 * node + local} for local in (0, 1)]
    return [{f"SLURM_{name}": str(value) for name, value in one.items()} for one in told]


def run_nodes(folder: Path, launcher: str, case: str, epochs: int) -> list[int]:
    """Run the job on both nodes; their exit codes.

    Args:
        folder: where the ranks write.
        launcher: torchrun or NODE_RANK, as commands; "slurm" or "ranks": each rank is started by itself.
        case: of the job.
        epochs: of the training.
    """
    environment, jobs = job_environment(free_port()), list[Any]()
    script = ["tests.training.job", "nodes", str(folder), case, str(epochs)]
    for node in () if launcher == "ranks" else (0, 1):
        if launcher == "slurm":
            told = [environment | more for more in slurm(node)]
            jobs.append(start_module(*script, environments=told, said=folder / "said", shm_mib=64))
        else:
            words = [*OWN_SHM, *command(launcher, node, environment["MASTER_PORT"]), "-m", *script]
            jobs.append(start(words, environment | {"NODE_RANK": str(node)}, folder / "said"))
    jobs = jobs or start_nodes(folder, "nodes", case, epochs, nodes=2)
    return exit_codes(jobs, folder / "said", SECONDS)


def said(folder: Path) -> str:
    return (folder / "said").read_text()[-4000:]


def logged_by_all(folder: Path) -> list[dict[str, float]]:
    """The metrics of each epoch, which are the same on all ranks."""
    first, *others = read_ranks(folder, 4)
    assert others == [first] * 3
    return first[0]


def moved_of(samples: int) -> float:
    """The share of samples that other nodes draw in the next epoch, if each of two nodes has slots for half."""
    return moved_share(Ring.cut(samples, (0.5, 0.5), (samples // 2, samples // 2)), NODES, BATCH)


@pytest.mark.parametrize(
    ("launcher", "door"),
    [
        ("ranks", "locality"),
        ("slurm", "callback"),
        pytest.param("ranks", "cache_datamodule", marks=pytest.mark.soak),
        pytest.param("torchrun", "locality", marks=pytest.mark.soak),  # commands, which import everything anew
        pytest.param("NODE_RANK", "callback", marks=pytest.mark.soak),
    ],
)
def test_the_memory_of_two_nodes_adds_up(tmp_path, launcher, door):
    """In every door, however the nodes meet: with half of the dataset per node all is covered, epoch two hits 1 - 2 m,
    later ones 1 - m, m being moved; the metrics of all ranks are the same, per node too, and say what the source says.
    """
    assert run_nodes(tmp_path, launcher, door, 3) == [0, 0], said(tmp_path)
    epochs, moved = logged_by_all(tmp_path), moved_of(SAMPLES)
    rates = [epoch["hit_rate"] for epoch in epochs]
    stored = read_at_setup(tmp_path) / 2  # by each node, where it has a slot
    assert rates[0] <= stored / SAMPLES
    assert rates[1] >= 1 - 2.2 * moved
    assert rates[2] >= 1 - 1.2 * moved
    for epoch in epochs:
        assert epoch["coverage"] == 1
        assert epoch["hits"] + epoch["misses"] + epoch["bypasses"] == SAMPLES
        assert epoch["hit_rate"] == pytest.approx(sum(epoch[f"node{node}/hit_rate"] for node in (0, 1)) / 2, abs=1e-6)
    assert epochs[0]["fills"] == pytest.approx(SAMPLES * (1 - moved), abs=SAMPLES * moved + stored)
    assert epochs[2]["node0/fill_fraction"] > 0.99
    assert epochs[2]["node1/fill_fraction"] > 0.99
    loads = source(tmp_path).loads - 2 * stored
    second_reads = loads - sum(epoch["misses"] + epoch["bypasses"] for epoch in epochs)
    assert 0 < second_reads <= 8 * 4  # of each rank, while the cache fills, to see whether the source is random
    assert loads - second_reads <= (1 + 4 * moved) * SAMPLES


def test_a_fold_has_the_memory_of_two_nodes(tmp_path):
    """Two nodes that each cache half of a fold, a quarter of the dataset, reach the hit rate of a fully cached dataset,
    by the callback and by StocacheDataModule. Other samples are never loaded."""
    assert run_nodes(tmp_path, "ranks", "fold", 3) == [0, 0], said(tmp_path)
    logged, moved = logged_by_all(tmp_path), moved_of(len(FOLD))
    for epochs in (logged[:3], logged[3:]):
        rates = [epoch["hit_rate"] for epoch in epochs]
        assert rates[0] <= 2 * 32 / len(FOLD), "what the set-up of two nodes has read is stored"
        assert rates[1] >= 1 - 2.5 * moved
        assert rates[2] >= 1 - 1.5 * moved
        for epoch in epochs:
            assert epoch["hits"] + epoch["misses"] + epoch["bypasses"] == len(FOLD)
    assert set(source(tmp_path).loaded) == set(FOLD)


def test_records_find_room_whatever_was_expected(tmp_path):
    """If the samples of set-up are ten times as large as the others, each node still holds all its samples."""
    assert run_nodes(tmp_path, "ranks", "records", 3) == [0, 0], said(tmp_path)
    epochs, moved = logged_by_all(tmp_path), moved_of(SAMPLES)
    rates = [epoch["hit_rate"] for epoch in epochs]
    assert rates[1] >= 1 - 2.2 * moved
    assert rates[2] >= 1 - 1.2 * moved
    assert epochs[0]["coverage"] < 0.3
    assert "hit rate of this epoch is" not in logs(tmp_path)


@pytest.mark.parametrize("case", ["full", "dies"])
def test_bad_luck_on_one_node_ends_all(tmp_path, case):
    """Without memory on a node (`strict`), or if a rank dies in `setup`, all ranks end. Without memory all of them
    raise the same error."""
    assert 0 not in run_nodes(tmp_path, "ranks", case, 1), said(tmp_path)
    errors = {path.stem: path.read_text() for path in tmp_path.glob("*.error")}
    if case == "dies":
        assert "rank3" not in errors
        return
    assert errors, said(tmp_path)
    assert len(set(errors.values())) == 1
    assert next(iter(errors.values())).startswith("CacheMemoryError: rank 2 could not make")
