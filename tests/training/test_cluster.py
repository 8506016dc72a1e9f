"""Jobs of several ranks as launchers start them: meshes, uneven nodes, a container per rank, SLURM, caches that last.

All ranks run on this machine. A "node" is a mount namespace with a /dev/shm of its own, which lives as long as its
keeper; a container has process ids of its own, too.
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

from tests.jobs import OWN_SHM, exit_codes, free_port, job_environment, skip_without, start, start_module
from tests.training.job import CLUSTER_SAMPLES as SAMPLES
from tests.training.job import logs, read_ranks
from tests.training.tiny import source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.processes]

SECONDS = 240
CONTAINER = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *OWN_SHM[2:]]


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Skips where there is no namespace to be had."""
    skip_without(CONTAINER)


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


def torchrun(rank: int, world: int, local: int = 0) -> dict[str, str]:
    """The environment of a rank under torchrun."""
    words = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "1"}
    return {name: str(value) for name, value in words.items()}


def slurm(rank: int, folder: Path) -> dict[str, str]:
    """The environment of a SLURM task on two nodes, with a `scontrol` that records its arguments."""
    control = folder / "bin" / "scontrol"
    control.parent.mkdir(exist_ok=True)
    control.write_text(f'#!/bin/sh\necho "$@" >> {folder}/requeued\n')
    control.chmod(0o755)
    words = {"JOB_ID": 7, "JOB_NAME": "job", "NTASKS": 2, "NTASKS_PER_NODE": 1, "NNODES": 2, "NODELIST": "node[1-2]"}
    words |= {"NODEID": rank, "PROCID": rank, "LOCALID": 0}
    return {f"SLURM_{name}": str(value) for name, value in words.items()} | {
        "PATH": f"{control.parent}{os.pathsep}{os.environ['PATH']}"
    }


def run(
    folder: Path, places: Sequence[Sequence[str]], told: Sequence[Mapping[str, str]], words: Sequence[Sequence[str]]
) -> list[int]:
    """The exit codes of one rank per place, with the environment from its launcher and the words for its job."""
    folder.mkdir(exist_ok=True)
    base, output = job_environment(free_port()), folder / "said"
    ranks: list[Any] = []
    for place, environment, more in zip(places, told, words, strict=True):
        job = ["tests.training.job", "cluster", str(folder), *more]
        if place:
            ranks.append(start([*place, sys.executable, "-m", *job], base | environment, output))
        else:
            ranks.append(start_module(*job, environments=[base | environment], said=output))
    return exit_codes(ranks, output, SECONDS)


def said(folder: Path) -> str:
    return (folder / "said").read_text()[-4000:]


def seen(folder: Path, rank: int) -> list[tuple[int, list[int]]]:
    """The epoch and the samples of each batch of a rank."""
    return [tuple(json.loads(line)) for line in (folder / f"rank{rank}.seen").read_text().splitlines()]


def samples(batches: Sequence[Sequence[tuple[int, list[int]]]], epoch: int) -> list[int]:
    """The samples of an epoch, of these ranks together."""
    return sorted(index for rank in batches for number, labels in rank if number == epoch for index in labels)


def epochs(folder: Path, rank: int = 0) -> list[dict[str, float]]:
    """The metrics of a rank in each epoch."""
    [logged] = read_ranks(folder, rank + 1)[rank]
    for epoch in logged:
        assert epoch["hits"] + epoch["misses"] + epoch["bypasses"] > 0
    return logged


def warnings(folder: Path) -> list[str]:
    """The package's warnings on all ranks."""
    return [line for line in logs(folder).splitlines() if line.startswith("WARNING:lightning_stocache")]


EVERYTHING: list[Any] = list(range(SAMPLES))


@pytest.mark.parametrize(
    ("door", "replicas", "parallel"),
    [
        ("callback", 1, 2),
        pytest.param("callback", 2, 2, marks=pytest.mark.soak),
        pytest.param("cache_datamodule", 1, 2, marks=pytest.mark.soak),
        pytest.param("cache_datamodule", 2, 2, marks=pytest.mark.soak),
        pytest.param("ours", 1, 2, marks=pytest.mark.soak),
        pytest.param("ours", 2, 2, marks=pytest.mark.soak),
    ],
)
def test_the_ranks_of_a_replica_see_the_same_batches(tmp_path, door, replicas, parallel):
    """On a mesh of data and tensor parallel ranks the replicas divide the dataset, all ranks share one cache, and each
    rank's samples count."""
    world = replicas * parallel
    words = [door, "2", f"mesh={replicas}x{parallel}", f"devices={world}"]
    told = [torchrun(rank, world, rank) for rank in range(world)]
    assert run(tmp_path, [[]] * world, told, [words] * world) == [0] * world, said(tmp_path)
    batches = [seen(tmp_path, rank) for rank in range(world)]
    firsts = batches[::parallel]
    assert batches == [first for first in firsts for _ in range(parallel)]
    assert samples(firsts, 0) == samples(firsts, 1) == EVERYTHING
    first, second = epochs(tmp_path)
    assert SAMPLES - 32 <= first["fills"] <= SAMPLES - 4, "set-up has stored what it has read"
    assert first["hits"] + first["misses"] == second["hits"] == parallel * SAMPLES
    assert all(epochs(tmp_path, rank) == [first, second] for rank in range(world))


@pytest.mark.soak
def test_a_container_per_rank_has_a_cache_each(tmp_path):
    """Ranks with separate /dev/shm and process ids cannot share: one warning, half of the dataset in each container,
    and all of it in both together."""
    told = [torchrun(rank, 2, rank) for rank in range(2)]
    words = ["callback", "3", "devices=2", "budget=50%"]
    assert run(tmp_path, [CONTAINER] * 2, told, [words] * 2) == [0, 0], said(tmp_path)
    batches = [seen(tmp_path, rank) for rank in range(2)]
    assert all(samples(batches, epoch) == EVERYTHING for epoch in range(3))
    first, _, last = epochs(tmp_path)
    assert first["hits"] <= 2 * 32, "what the set-up of both ranks has read is stored"
    assert last["coverage"] == 1
    assert last["hit_rate"] > 0.8  # a random deal has 0.44
    [warning] = warnings(tmp_path)
    assert "ranks of one machine do not share memory" in warning


@pytest.mark.soak
@pytest.mark.parametrize("door", ["ours", "callback"])
def test_slurm_requeues_in_the_middle_of_an_epoch(tmp_path, door):
    """On SIGUSR1 Lightning saves a checkpoint and requeues; the next job trains on exactly the other samples."""
    told, words = [slurm(rank, tmp_path) for rank in range(2)], [door, "2", "nodes=2", "budget=50%"]
    stops = [[*words, "stops=0.10"]] * 2
    assert run(tmp_path, [OWN_SHM] * 2, told, stops) == [-signal.SIGKILL] * 2, said(tmp_path)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    batches = [seen(tmp_path, rank)[:11] for rank in range(2)]  # later ones are not in the checkpoint
    for rank in range(2):
        (tmp_path / f"rank{rank}.seen").unlink()
    assert run(tmp_path, [OWN_SHM] * 2, told, [words] * 2) == [0, 0], said(tmp_path)
    batches = [before + seen(tmp_path, rank) for rank, before in enumerate(batches)]
    assert samples(batches, 0) == samples(batches, 1) == EVERYTHING


@pytest.mark.soak
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_named_caches_of_several_nodes(tmp_path, where):
    """The second job starts warm on the same nodes in another order. One node alone still has its own part."""
    with kept_nodes(2) as nodes:
        rates = []
        for number, order in enumerate([(0, 1), (1, 0), (0,)]):
            folder, world = tmp_path / str(number), len(order)
            words = [["ours", "1", f"nodes={world}", "budget=50%", f"name=k{os.getpid()}"] for _ in order]
            if where == "disk":
                words = [[*more, f"dir={tmp_path / f'disk{node}'}"] for more, node in zip(words, order, strict=True)]
            told = [torchrun(rank, world) for rank in range(world)]
            places = [nodes[node] for node in order]
            assert run(folder, places, told, words) == [0] * world, said(folder)
            assert samples([seen(folder, rank) for rank in range(world)], 0) == EVERYTHING
            [logged] = epochs(folder)
            rates.append(logged["hit_rate"])
            assert logged["hits"] + source(folder).loads >= SAMPLES
    assert rates[0] <= 2 * 32 / SAMPLES, "what the set-up of two nodes has read is stored"
    assert rates[1] > 0.75  # of what a random deal finds on these nodes: a half
    assert rates[2] == pytest.approx(0.44, abs=0.06)  # what one epoch has filled of its half
