"""Nodes and meshes as launchers start them: memory adds up, errors end all ranks, named caches and requeued jobs.

All ranks run on this machine. A "node" is a mount namespace with a /dev/shm of its own; a container has process ids of
its own, too.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.cache.placement import Ring
from tests.jobs import OWN_SHM, exit_codes, job_environment, skip_without, start
from tests.sampling.theory import moved_share
from tests.training.job import logs, printed, read_at_setup, read_ranks, start_nodes, words
from tests.training.tiny import source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.processes]

SECONDS = 240
SAMPLES = 8192
LARGE: dict[str, Any] = {"samples": SAMPLES, "batch_size": 64, "nodes": 2, "budget": "50%"}
SMALL: dict[str, Any] = {"samples": 512, "batch_size": 8}
EVERYTHING = list(range(512))
CONTAINER = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *OWN_SHM[2:]]
NODES = ((0, 1), (2, 3))


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Skips where there is no namespace to be had."""
    skip_without(CONTAINER)


def torchrun(rank: int, world: int, local: int = 0) -> dict[str, str]:
    """The environment of a rank under torchrun."""
    told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "1"}
    return {name: str(value) for name, value in told.items()}


def slurm(rank: int, per_node: int = 1) -> dict[str, str]:
    """The environment of a SLURM task on two nodes."""
    node, local = divmod(rank, per_node)
    told = {"JOB_ID": 7, "JOB_NAME": "job", "NTASKS": 2 * per_node, "NTASKS_PER_NODE": per_node, "NNODES": 2}
    told |= {"NODELIST": "node[1-2]", "NODEID": node, "PROCID": rank, "LOCALID": local}
    return {f"SLURM_{name}": str(value) for name, value in told.items()}


def run(folder: Path, commands: Sequence[Sequence[str]], told: Sequence[Mapping[str, str]]) -> list[int | None]:
    """The exit codes of commands, each with the environment from its launcher."""
    base = job_environment()
    jobs = [start(command, base | more, folder / "said") for command, more in zip(commands, told, strict=True)]
    return exit_codes(jobs, folder / "said", SECONDS)


def command(folder: Path, **options: Any) -> list[str]:
    """A training as a user's command."""
    return [sys.executable, "-m", *words("train", folder, **options)]


# ---- two nodes of two ranks ----

RUNS: dict[str, dict[str, Any]] = {
    "full": {"case": "full", "strict": True, "epochs": 1},
    "rows": {"door": "callback"},
    "fold, callback": {"case": "fold", "door": "callback"},
    "fold, ours": {"case": "fold"},
    "records": {"case": "records", "budget": "3MiB"},
    "dies": {"case": "dies"},
}


@pytest.fixture(scope="module")
def job(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int | None]]:
    """The folder of a SLURM job that does all `RUNS`, the last of which nobody survives, and its exit codes."""
    folder = tmp_path_factory.mktemp("nodes")
    told = [[slurm(rank, 2) for rank in node] for node in NODES]
    jobs = start_nodes(folder, "train", told=told, runs=RUNS, **LARGE)
    return folder, exit_codes(jobs, folder / "said", SECONDS)


def logged_by_all(folder: Path) -> list[dict[str, float]]:
    """The metrics of each epoch, which are the same on all ranks."""
    first, *others = (fit["epochs"] for [fit] in read_ranks(folder, 4))
    assert others == [first] * 3
    return first


def moved_of(samples: int) -> float:
    """The share of samples that other nodes draw in the next epoch, if each of two nodes has slots for half."""
    return moved_share(Ring.cut(samples, (0.5, 0.5), (samples // 2, samples // 2)), NODES, LARGE["batch_size"])


def check_sum_of_memory(folder: Path) -> None:
    """With half of the dataset per node all is covered, epoch two hits 1 - 2 m, later ones 1 - m, m being moved; the
    metrics of all ranks are the same, per node too, and say what the source says."""
    epochs, moved = logged_by_all(folder), moved_of(SAMPLES)
    rates = [epoch["hit_rate"] for epoch in epochs]
    stored = read_at_setup(folder) / 2  # by each node, where it has a slot
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
    loads = source(folder).loads - 2 * stored
    second_reads = loads - sum(epoch["misses"] + epoch["bypasses"] for epoch in epochs)
    assert 0 < second_reads <= 8 * 4  # of each rank, while the cache fills, to see whether the source is random
    assert loads - second_reads <= (1 + 4 * moved) * SAMPLES


def test_the_memory_of_two_nodes_adds_up(job):
    """Two nodes that can each cache half of a dataset cache all of it."""
    check_sum_of_memory(job[0] / "rows")


@pytest.mark.soak
def test_memory_adds_up_under_torchrun(tmp_path):
    """The same holds for ranks that torchrun starts, which meet in the store of its agents, and another door."""
    meeting, commands = job_environment(), []
    for node in (0, 1):
        torchrun_it = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}"]
        torchrun_it += ["--master-addr=127.0.0.1", f"--master-port={meeting['MASTER_PORT']}"]
        python, *job = command(tmp_path, door="cache_datamodule", **LARGE)
        commands.append([*OWN_SHM, python, *torchrun_it, *job])
    assert run(tmp_path, commands, [meeting] * 2) == [0, 0], printed(tmp_path)
    check_sum_of_memory(tmp_path)


@pytest.mark.parametrize("door", ["callback", "ours"])
def test_a_fold_has_the_memory_of_two_nodes(job, door):
    """Two nodes that each cache half of a fold, a quarter of the dataset, reach the hit rate of a fully cached dataset.
    Other samples are never loaded."""
    folder, fold = job[0] / f"fold, {door}", range(0, SAMPLES, 4)
    epochs, moved = logged_by_all(folder), moved_of(len(fold))
    rates = [epoch["hit_rate"] for epoch in epochs]
    assert rates[0] <= 2 * 32 / len(fold), "what the set-up of two nodes has read is stored"
    assert rates[1] >= 1 - 2.5 * moved
    assert rates[2] >= 1 - 1.5 * moved
    assert {epoch["hits"] + epoch["misses"] + epoch["bypasses"] for epoch in epochs} == {len(fold)}
    assert set(source(folder).loaded) == set(fold)


def test_records_find_room_whatever_was_expected(job):
    """If the samples of set-up are ten times as large as the others, each node still holds all its samples."""
    epochs, moved = logged_by_all(job[0] / "records"), moved_of(SAMPLES)
    assert epochs[1]["hit_rate"] >= 1 - 2.2 * moved
    assert epochs[2]["hit_rate"] >= 1 - 1.2 * moved
    assert epochs[0]["coverage"] < 0.3
    assert "hit rate of this epoch is" not in logs(job[0] / "records")


def test_without_memory_on_a_node_all_ranks_raise_the_same(job):
    """With `strict`, all ranks raise the error of the rank without memory; the ranks can go on with other trainings."""
    errors = [(job[0] / "full" / f"rank{rank}.error").read_text() for rank in range(4)]
    assert errors[0].startswith("rank 2 could not make")
    assert errors == errors[:1] * 4


def test_a_rank_that_dies_in_setup_ends_all(job):
    """If a rank dies in the `setup` of a DataModule, the ranks of both nodes end with an error."""
    folder, codes = job
    assert (folder / "dies").exists(), printed(folder)
    assert 0 not in codes


# ---- meshes, containers, jobs that end and come again ----


def seen(folder: Path, rank: int) -> list[tuple[int, list[int]]]:
    """The epoch and the samples of each batch of a rank."""
    return [tuple(json.loads(line)) for line in (folder / f"rank{rank}.seen").read_text().splitlines()]


def samples(batches: Sequence[Sequence[tuple[int, list[int]]]], epoch: int) -> list[int]:
    """The samples of an epoch, of these ranks together."""
    return sorted(index for rank in batches for number, labels in rank if number == epoch for index in labels)


@pytest.mark.parametrize(
    ("door", "replicas", "parallel"),
    [
        ("callback", 1, 2),
        pytest.param("callback", 2, 2, marks=pytest.mark.soak),
        pytest.param("cache_datamodule", 2, 2, marks=pytest.mark.soak),
        pytest.param("ours", 1, 2, marks=pytest.mark.soak),
        pytest.param("ours", 2, 2, marks=pytest.mark.soak),
    ],
)
def test_the_ranks_of_a_replica_see_the_same_batches(tmp_path, door, replicas, parallel):
    """On a mesh of data and tensor parallel ranks the replicas divide the dataset, all ranks share one cache, and each
    rank's samples count."""
    world = replicas * parallel
    options = SMALL | {"door": door, "epochs": 2, "mesh": [replicas, parallel], "devices": world}
    jobs = start_nodes(tmp_path, "train", told=[[torchrun(rank, world, rank) for rank in range(world)]], **options)
    assert exit_codes(jobs, tmp_path / "said", SECONDS) == [0], printed(tmp_path)
    batches = [seen(tmp_path, rank) for rank in range(world)]
    firsts = batches[::parallel]
    assert batches == [first for first in firsts for _ in range(parallel)]
    assert samples(firsts, 0) == samples(firsts, 1) == EVERYTHING
    epochs = [fit["epochs"] for [fit] in read_ranks(tmp_path, world)]
    assert epochs == epochs[:1] * world
    first, second = epochs[0]
    assert 512 - 32 <= first["fills"] <= 512 - 4, "set-up has stored what it has read"
    assert first["hits"] + first["misses"] == second["hits"] == parallel * 512


@pytest.mark.soak
def test_a_container_per_rank_has_a_cache_each(tmp_path):
    """Ranks with separate /dev/shm and process ids cannot share: one warning, half of the dataset in each container,
    and all of it in both together."""
    commands = [[*CONTAINER, *command(tmp_path, door="callback", budget="50%", **SMALL)]] * 2
    assert run(tmp_path, commands, [torchrun(rank, 2, rank) for rank in range(2)]) == [0, 0], printed(tmp_path)
    batches = [seen(tmp_path, rank) for rank in range(2)]
    assert all(samples(batches, epoch) == EVERYTHING for epoch in range(3))
    first, _, last = read_ranks(tmp_path, 1)[0][0]["epochs"]
    assert first["hits"] <= 2 * 32, "what the set-up of both ranks has read is stored"
    assert last["coverage"] == 1
    assert last["hit_rate"] > 0.8  # a random deal has 0.44
    [warning] = [line for line in logs(tmp_path).splitlines() if line.startswith("WARNING:lightning_stocache")]
    assert "ranks of one machine do not share memory" in warning


@pytest.mark.soak
@pytest.mark.parametrize("door", ["ours", "callback"])
def test_slurm_requeues_in_the_middle_of_an_epoch(tmp_path, door):
    """On SIGUSR1 Lightning saves a checkpoint and requeues; the next job trains on exactly the other samples."""
    control = tmp_path / "bin" / "scontrol"
    control.parent.mkdir()
    control.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    control.chmod(0o755)
    path = {"PATH": f"{control.parent}{os.pathsep}{os.environ['PATH']}"}
    options = SMALL | {"door": door, "epochs": 2, "budget": "50%", "devices": 1, "nodes": 2}
    batches: list[list[Any]] = [[], []]
    for stops, code in (([0, 10], -signal.SIGKILL), (None, 0)):
        commands = [[*OWN_SHM, *command(tmp_path, stops=stops, **options)]] * 2
        assert run(tmp_path, commands, [slurm(rank) | path for rank in range(2)]) == [code] * 2, printed(tmp_path)
        for rank in range(2):
            batches[rank] += seen(tmp_path, rank)[: 11 if stops else None]  # later ones are not in the checkpoint
            (tmp_path / f"rank{rank}.seen").unlink()
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert samples(batches, 0) == samples(batches, 1) == EVERYTHING


@contextlib.contextmanager
def kept_nodes(count: int) -> Iterator[list[list[str]]]:
    """Nodes whose memory outlives their jobs: for each the words before a command that run it there."""
    keepers = []
    try:
        for _ in range(count):
            keeper = subprocess.Popen([*OWN_SHM, "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE)
            keepers.append(keeper)
            assert keeper.stdout is not None
            keeper.stdout.readline()
        yield [["nsenter", "--target", str(keeper.pid), "--mount"] for keeper in keepers]
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.communicate()


@pytest.mark.soak
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_named_caches_of_several_nodes(tmp_path, where):
    """The second job starts warm on the same nodes in another order. One node alone still has its own part."""
    options = SMALL | {"epochs": 1, "devices": 1, "budget": "50%", "name": f"k{os.getpid()}"}
    rates = []
    with kept_nodes(2) as nodes:
        for number, order in enumerate([(0, 1), (1, 0), (0,)]):
            folder, world, commands = tmp_path / str(number), len(order), []
            for node in order:
                more = {"dir": str(tmp_path / f"disk{node}")} if where == "disk" else {}
                commands.append([*nodes[node], *command(folder, nodes=world, **options, **more)])
            folder.mkdir()
            assert run(folder, commands, [torchrun(rank, world) for rank in range(world)]) == [0] * world
            assert samples([seen(folder, rank) for rank in range(world)], 0) == EVERYTHING
            [logged] = read_ranks(folder, 1)[0][0]["epochs"]
            rates.append(logged["hit_rate"])
            assert logged["hits"] + source(folder).loads >= 512
    assert rates[0] <= 2 * 32 / 512, "what the set-up of two nodes has read is stored"
    assert rates[1] > 0.75  # of what a random deal finds on these nodes: a half
    assert rates[2] == pytest.approx(0.44, abs=0.06)  # what one epoch has filled of its half
