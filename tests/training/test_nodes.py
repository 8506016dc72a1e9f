"""Two nodes on one machine, each with a /dev/shm of its own: their memory adds up, and bad luck on one reaches all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_stocache.cache.placement import Ring
from tests.jobs import OWN_SHM, exit_codes, free_port, job_environment, start
from tests.sampling.theory import moved_share
from tests.training.nodes_job import BATCH, FOLD, SAMPLES
from tests.training.tiny import source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.processes]

NODES = ((0, 1), (2, 3))
SECONDS = 240
SLURM = 'for id in 0 1; do SLURM_LOCALID=$id SLURM_PROCID=$((2 * SLURM_NODEID + id)) "$@" & done; wait'


@pytest.fixture(scope="module", autouse=True)
def own_shm() -> None:
    """Skips where a process may not have a /dev/shm of its own."""
    try:
        subprocess.run([*OWN_SHM, "true"], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare here to make two nodes with")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"two nodes cannot be made here: {error.stderr.strip()}")


def commands(launcher: str, port: str, *arguments: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """What a user types on each node, and what more its environment says there."""
    script = ["-m", "tests.training.nodes_job", *arguments]
    for node in ("0", "1"):
        if launcher == "torchrun":
            meet = [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
            run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
            yield [*run, *meet, *script], {}
        elif launcher == "slurm":
            job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "job", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
            yield ["sh", "-c", SLURM, "sh", sys.executable, *script], {**job, "SLURM_NODEID": node}
        else:
            yield [sys.executable, *script], {"NODE_RANK": node}


def run_nodes(folder: Path, launcher: str, case: str, epochs: int) -> list[int]:
    """Run the job on both nodes; their exit codes."""
    environment = job_environment(free_port())
    words = commands(launcher, environment["MASTER_PORT"], str(folder), case, str(epochs))
    jobs = [start([*OWN_SHM, *command], environment | more, folder / "said") for command, more in words]
    return exit_codes(jobs, folder / "said", SECONDS)


def said(folder: Path) -> str:
    return (folder / "said").read_text()[-4000:]


@pytest.mark.parametrize(
    ("launcher", "door"), [("torchrun", "locality"), ("NODE_RANK", "callback"), ("slurm", "cached")]
)
def test_the_memory_of_two_nodes_adds_up(tmp_path, launcher, door):
    """In every door, however the nodes meet: with half of the dataset per node all is covered, epoch two hits 1 - 2 m,
    later ones 1 - m, m being moved; the metrics of all ranks are the same, per node too, and say what the source says.
    """
    assert run_nodes(tmp_path, launcher, door, 3) == [0, 0], said(tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert ranks[0] == ranks[1] == ranks[2] == ranks[3]
    half = SAMPLES // 2
    moved = moved_share(Ring.cut(SAMPLES, (0.5, 0.5), (half, half)), NODES, BATCH)
    epochs = [{name.removeprefix("stocache/"): value for name, value in epoch.items()} for epoch in ranks[0]]
    rates = [epoch["hit_rate"] for epoch in epochs]
    assert rates[0] == 0
    assert rates[1] >= 1 - 2.2 * moved
    assert rates[2] >= 1 - 1.2 * moved
    for epoch in epochs:
        assert epoch["coverage"] == 1
        assert epoch["hits"] + epoch["misses"] + epoch["bypasses"] == SAMPLES
        assert epoch["hit_rate"] == pytest.approx(sum(epoch[f"node{node}/hit_rate"] for node in (0, 1)) / 2, abs=1e-6)
    assert epochs[0]["fills"] == pytest.approx(SAMPLES * (1 - moved), abs=SAMPLES * moved)
    assert epochs[2]["node0/fill_fraction"] > 0.99
    assert epochs[2]["node1/fill_fraction"] > 0.99
    logs = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    loads = source(tmp_path).loads - sum(map(int, re.findall(r"(\d+) samples read at set-up", logs)))
    second_reads = loads - sum(epoch["misses"] + epoch["bypasses"] for epoch in epochs)
    assert 0 < second_reads <= 8 * len(ranks)  # while the cache fills, to see whether the source is random
    assert loads - second_reads <= (1 + 4 * moved) * SAMPLES


def test_a_fold_has_the_memory_of_two_nodes(tmp_path):
    """A SubsetRandomSampler of a quarter, and half of that quarter on each node: through the callback and our own
    DataModule it is hit as a whole dataset is, and nothing else is loaded."""
    assert run_nodes(tmp_path, "NODE_RANK", "fold", 3) == [0, 0], said(tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert ranks[0] == ranks[1] == ranks[2] == ranks[3]
    half = len(FOLD) // 2
    moved = moved_share(Ring.cut(len(FOLD), (0.5, 0.5), (half, half)), NODES, BATCH)
    for epochs in (ranks[0][:3], ranks[0][3:]):
        rates = [epoch["stocache/hit_rate"] for epoch in epochs]
        assert rates[0] == 0
        assert rates[1] >= 1 - 2.5 * moved
        assert rates[2] >= 1 - 1.5 * moved
        for epoch in epochs:
            assert sum(epoch[f"stocache/{key}"] for key in ("hits", "misses", "bypasses")) == len(FOLD)
    assert set(source(tmp_path).loaded) == set(FOLD)


def test_records_find_room_whatever_was_expected(tmp_path):
    """The samples that were looked at are ten times as large as the others: each node holds all that it trains on."""
    assert run_nodes(tmp_path, "torchrun", "records", 3) == [0, 0], said(tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert ranks[0] == ranks[1] == ranks[2] == ranks[3]
    half = SAMPLES // 2
    moved = moved_share(Ring.cut(SAMPLES, (0.5, 0.5), (half, half)), NODES, BATCH)
    rates = [epoch["stocache/hit_rate"] for epoch in ranks[0]]
    assert rates[1] >= 1 - 2.2 * moved
    assert rates[2] >= 1 - 1.2 * moved
    assert ranks[0][0]["stocache/coverage"] < 0.3
    logs = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert "hit rate of this epoch is" not in logs


@pytest.mark.parametrize("case", ["full", "dies", "wrapped"])
def test_bad_luck_on_one_node_ends_all(tmp_path, case):
    """No memory on a node (`strict`), a rank that dies in setup, a sampler that would be halved: all hear and end;
    the reason is the same everywhere, where there is somebody left to tell it."""
    assert 0 not in run_nodes(tmp_path, "NODE_RANK", case, 1), said(tmp_path)
    errors = {path.stem: path.read_text() for path in tmp_path.glob("*.error")}
    if case == "dies":
        assert "rank3" not in errors
        return
    assert errors, said(tmp_path)
    assert len(set(errors.values())) == 1
    expected = {"full": "CacheMemoryError: rank 2 could not make", "wrapped": "TypeError: EveryOther deals samples"}
    assert next(iter(errors.values())).startswith(expected[case])
