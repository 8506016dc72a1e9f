"""Jobs of several ranks, as launchers start them: the ranks of a node share a cache, and the memory of nodes adds up.

All ranks run on this machine. A "node" is a mount namespace with a /dev/shm of its own; a container has process ids of
its own, too.
"""

import itertools
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import OWN_SHM, exit_codes, job_environment, skip_without, start
from tests.processes import is_alive, memory_files, wait_until
from tests.training.job import logs, printed, read_again, read_at_setup, read_ranks, start_nodes, words
from tests.training.tiny import DOORS, SAMPLES, source

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks into /proc"),
]

SECONDS = 240  # a job takes ten; a machine with much else to do takes longer
COUNTS = ("hits", "misses", "bypasses")

Batches = dict[tuple[int, int], list[int]]  # samples, by epoch and number


def seen(folder: Path, ranks: int) -> list[Batches]:
    """The batches of each rank. A step that ran again had the same batch."""
    batches: list[Batches] = [{} for _ in range(ranks)]
    for rank, of_rank in enumerate(batches):
        for line in (folder / f"rank{rank}.seen").read_text().splitlines():
            epoch, number, labels = json.loads(line)
            assert of_rank.setdefault((epoch, number), labels) == labels, f"rank {rank}, {line}"
    return batches


def samples(batches: Sequence[Batches], epoch: int) -> list[int]:
    """The samples of an epoch, of these ranks together."""
    return sorted(itertools.chain(*(rank[at] for rank in batches for at in rank if at[0] == epoch)))


# ---- one node ----


def start_node(folder: Path, door: str, strategy: str, **options: Any) -> BaseProcess:
    """A job of two ranks, which are started one by one with "ddp", and else by the strategy itself."""
    told = [[{"NODE_RANK": "0", "LOCAL_RANK": str(rank)} for rank in (0, 1)]] if strategy == "ddp" else [[{}]]
    options |= {"strategy": strategy.removesuffix(" itself"), "door": door, "case": "early" if door == "ours" else ""}
    [job] = start_nodes(folder, told, val=8, **options)
    return job


@pytest.mark.processes
@pytest.mark.parametrize(
    ("door", "strategy", "fits"),
    [
        ("ours", "ddp", 2),
        pytest.param("cache_datamodule", "ddp_fork", 2, marks=pytest.mark.soak),
        pytest.param("callback", "ddp_spawn", 1, marks=pytest.mark.soak),  # each rank imports everything anew
        pytest.param("ours", "ddp_notebook", 1, marks=pytest.mark.soak),
    ],
)
def test_ranks_share_one_cache(tmp_path, door, strategy, fits):
    """In each fit both ranks map one segment, load every sample once between them, and end with the same weights."""
    job = start_node(tmp_path, door, strategy, fits=fits)
    assert exit_codes([job], tmp_path / "said", SECONDS) == [0], printed(tmp_path)
    first, second = read_ranks(tmp_path, 2)
    assert first == second
    assert len(first) == fits
    all_stored = 0
    for fit in first:
        epochs = {key: [epoch[key] for epoch in fit["epochs"]] for key in COUNTS}
        stored = epochs["hits"][0]
        assert 4 <= stored <= SAMPLES, "what set-up has read is stored"
        assert epochs["hits"] == [stored, SAMPLES, SAMPLES]
        assert epochs["misses"] == [SAMPLES - stored, 0, 0]
        assert epochs["bypasses"] == [0, 0, 0]
        all_stored += stored
    train, val = (read_at_setup(tmp_path, stage) for stage in ("train", "val"))
    seldom = source(tmp_path, "val").loads - val + source(tmp_path).loads - (fits * SAMPLES + train - all_stored)
    assert 0 <= seldom - read_again(tmp_path) <= 4 * fits, "of eight at least four are stored"
    assert "sync_dist" not in printed(tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("victim", "strategy"),
    [
        ("rank 0", "ddp"),  # a rank 1 is killed in `test_killed_jobs_go_on_where_they_were`
        ("worker", "ddp"),
        pytest.param("rank 1", "ddp itself", marks=pytest.mark.soak),  # Lightning starts it as a command
    ],
)
def test_sigkill_of_any_process_ends_all_and_leaves_nothing(tmp_path, victim, strategy):
    """When a rank or a worker is killed, all processes of the job end by themselves, and with them the memory."""
    options = {"workers": 1, "budget": "50%"} if victim == "worker" else {}  # all in memory needs no worker
    job = start_node(tmp_path, "ours", strategy, epochs=10**6, **options)
    try:
        notes = [tmp_path / "rank0.pids", tmp_path / "rank1.pids"]
        wait_until(lambda: all(note.exists() for note in notes) or not job.is_alive(), SECONDS)
        assert job.is_alive(), printed(tmp_path)
        ranks = [json.loads(note.read_text()) for note in notes]
        everyone = {pid for rank in ranks for pid in rank}
        assert (len(ranks[1]) > 1) == (victim == "worker")
        assert all(memory_files({rank[0]}) for rank in ranks)
        os.kill({"rank 0": ranks[0][0], "rank 1": ranks[1][0], "worker": ranks[1][-1]}[victim], signal.SIGKILL)
        assert exit_codes([job], tmp_path / "said", SECONDS) != [0]
        wait_until(lambda: not any(map(is_alive, everyone)), SECONDS)
    finally:
        if job.is_alive():
            os.killpg(job.pid, signal.SIGKILL)


SOAK = [pytest.mark.soak, pytest.mark.timeout(1200)]
EVERY_DOOR = itertools.product(DOORS, (1, 2), (0, 2))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("door", "ranks", "workers", "count"),
    [("callback", 2, 0, 1), *(pytest.param(*case, 4, marks=SOAK) for case in EVERY_DOOR)],
)
def test_killed_jobs_go_on_where_they_were(tmp_path, door, ranks, workers, count):
    """A fit that is killed in random steps, and resumes from its last checkpoint, runs on each rank the batches of a
    fit that was never killed. If it resumes on another number of ranks, each sample of an epoch comes once."""
    each, whole, broken, other = 48 // (4 * ranks), tmp_path / "whole", tmp_path / "broken", tmp_path / "other"
    options = {"strategy": "ddp_fork", "door": door, "workers": workers, "samples": 48, "saves": True}

    def run_job(folder: Path, ranks: int, *kill: tuple[str, int, int]) -> list[Batches]:
        folder.mkdir(exist_ok=True)
        jobs = start_nodes(folder, [[{}]], devices=ranks, signals=kill, **options)
        assert (exit_codes(jobs, folder / "said", SECONDS) == [0]) != bool(kill), printed(folder)
        return seen(folder, ranks)

    draw = random.Random(f"{door} {ranks} {workers}")
    kills = [("SIGKILL", draw.randrange(ranks), step) for step in sorted(draw.sample(range(3, 3 * each - 2), count))]
    expected = run_job(whole, ranks)
    before = run_job(broken, ranks, kills[0])
    shutil.copytree(broken, other)
    for kill in kills[1:]:
        run_job(broken, ranks, kill)
    assert run_job(broken, ranks) == expected
    assert [len(batches) for batches in expected] == [3 * each] * ranks
    if ranks == 1 and door != "ours":
        return  # a single rank draws another order
    done = int(max(other.glob("step=*.ckpt")).stem.removeprefix("step="))
    kept = [{at: labels for at, labels in rank.items() if each * at[0] + at[1] < done} for rank in before]
    for file in other.glob("*.seen"):
        file.unlink()
    kept += run_job(other, 3 - ranks)
    assert [samples(kept, epoch) for epoch in range(3)] == [list(range(48))] * 3


# ---- nodes, meshes, containers ----

MANY = 4096  # samples
LARGE: dict[str, Any] = {"samples": MANY, "batch_size": 64, "nodes": 2, "budget": "50%"}
SMALL: dict[str, Any] = {"samples": 512, "batch_size": 8}
EVERYTHING = list(range(512))
CONTAINER = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *OWN_SHM[2:]]
RUNS: dict[str, dict[str, Any]] = {
    "full": {"case": "full", "strict": True, "epochs": 2},
    "rows": {},
    "fold": {"case": "fold", "door": "callback"},
    "records": {"case": "records", "budget": "1.5MiB", "door": "cache_datamodule"},
    "crossing": {
        "case": "crossing",
        "door": "none",
        "fits": 3,
        "epochs": 2,
        "samples": SAMPLES,
        "val": 8,
        "batch_size": 4,
    },
    "dies": {"case": "dies"},
}


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
    skip_without(CONTAINER)
    base = job_environment()
    jobs = [start(command, base | more, folder / "said") for command, more in zip(commands, told, strict=True)]
    return exit_codes(jobs, folder / "said", SECONDS)


def command(folder: Path, *launcher: str, node: Sequence[str] = OWN_SHM, **options: Any) -> list[str]:
    """A training as a user's command on a node, by a launcher's module if there is one."""
    return [*node, sys.executable, *launcher, "-m", *words(folder, **options)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int | None]]:
    """The folder of a SLURM job that does all `RUNS`, the last of which nobody survives, and its exit codes."""
    skip_without(CONTAINER)
    folder = tmp_path_factory.mktemp("nodes")
    told = [[slurm(rank, 2) for rank in node] for node in ((0, 1), (2, 3))]
    jobs = start_nodes(folder, told, runs=RUNS, **LARGE)
    return folder, exit_codes(jobs, folder / "said", SECONDS)


def under_torchrun(folder: Path) -> Path:
    """The job of "rows" by another door, with ranks that torchrun starts, which meet in the store of its agents."""
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    launcher += [f"--master-port={job_environment()['MASTER_PORT']}"]
    options = LARGE | {"door": "cache_datamodule"}
    commands = [command(folder, *launcher, f"--node-rank={node}", **options) for node in (0, 1)]
    assert run(folder, commands, [{}, {}]) == [0, 0], printed(folder)
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("name", ["rows", "fold", "records", pytest.param("torchrun", marks=pytest.mark.soak)])
def test_the_memory_of_two_nodes_adds_up(tmp_path, request, name):
    """Two nodes that can each cache half of what is drawn cache all of it, also if samples are smaller than those of
    set-up. All ranks have the same metrics, which agree with the source, and nothing beside a fold is loaded."""
    folder = under_torchrun(tmp_path) if name == "torchrun" else request.getfixturevalue("job")[0] / name
    drawn = range(0, MANY, 2 if name == "fold" else 1)
    epochs, *others = (fit["epochs"] for [fit] in read_ranks(folder, 4))
    assert others == [epochs] * 3
    for epoch in epochs:
        assert sum(epoch[count] for count in COUNTS) == len(drawn)
        assert epoch["hit_rate"] == pytest.approx(sum(epoch[f"node{node}/hit_rate"] for node in (0, 1)) / 2, abs=1e-6)
    # A share m of the samples, 0.0225 or of a fold 0.024, is drawn by the other node in the next epoch: about 1 - 2 m
    # are hits in epoch two, and 1 - m later.
    rates = [epoch["hit_rate"] for epoch in epochs]
    assert rates[1] >= (0.939 if name == "fold" else 0.95)
    assert rates[2] >= (0.963 if name == "fold" else 0.973)
    assert set(source(folder).loaded) == set(drawn)
    assert "hit rate of this epoch is" not in logs(folder)
    if name == "records":
        assert epochs[0]["coverage"] < 0.3
        return
    assert [epoch["coverage"] for epoch in epochs] == [1, 1, 1]
    assert all(epochs[2][f"node{node}/fill_fraction"] > 0.99 for node in (0, 1))
    stored = read_at_setup(folder) / 2  # by each node, where it has a slot
    assert rates[0] <= stored / len(drawn)
    misses = sum(epoch["misses"] + epoch["bypasses"] for epoch in epochs)
    assert source(folder).loads == 2 * stored + misses + read_again(folder)


def test_no_collective_of_others_is_crossed(job):
    """Every fit ends, with each bar, order of callbacks and kind of reduction, and all ranks can watch the same values.
    If one rank alone has a monitor, it warns and logs nothing until the next fit."""
    folder = job[0] / "crossing"
    (first, alone, last), *others = ([fit["epochs"] for fit in rank] for rank in read_ranks(folder, 4))
    assert others == [[first, alone, last]] * 3
    assert alone == [{}, {}]
    for epoch, (stage, length) in itertools.product([*first, *last], (("", SAMPLES), ("val/", 8))):
        counts = [epoch[stage + name] for name in COUNTS]
        assert sum(counts) == length
        assert epoch[f"{stage}hit_rate"] == pytest.approx(counts[0] / length)
    assert logs(folder).count("the cache counts of the other ranks have not come") == 1


def test_what_fails_on_one_rank_fails_on_all(job):
    """All ranks raise the error of the rank without memory, and go on; if a rank dies in `setup`, all end."""
    folder, codes = job
    errors = [(folder / "full" / f"rank{rank}.error").read_text() for rank in range(4)]
    assert errors[0].startswith("rank 2 could not make")
    assert errors == errors[:1] * 4
    assert (folder / "dies").exists(), printed(folder)
    assert 0 not in codes


@pytest.mark.processes
@pytest.mark.parametrize(
    ("door", "replicas", "parallel"), [("callback", 1, 2), pytest.param("ours", 2, 2, marks=pytest.mark.soak)]
)
def test_the_ranks_of_a_replica_see_the_same_batches(tmp_path, door, replicas, parallel):
    """On a mesh the replicas divide the dataset, all ranks share one cache, and each rank's samples count."""
    world = replicas * parallel
    options = SMALL | {"door": door, "epochs": 2, "strategy": [replicas, parallel], "devices": world}
    jobs = start_nodes(tmp_path, [[torchrun(rank, world, rank) for rank in range(world)]], **options)
    assert exit_codes(jobs, tmp_path / "said", SECONDS) == [0], printed(tmp_path)
    batches = seen(tmp_path, world)
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
    """Ranks that cannot share memory cache half of the dataset each, and all of it together, with one warning."""
    commands = [command(tmp_path, node=CONTAINER, door="callback", budget="50%", **SMALL)] * 2
    assert run(tmp_path, commands, [torchrun(rank, 2, rank) for rank in range(2)]) == [0, 0], printed(tmp_path)
    batches = seen(tmp_path, 2)
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
    batches: list[Batches] = [{}, {}]
    ends = [(name, rank, step) for name, step in (("SIGUSR1", 11), ("SIGKILL", 16)) for rank in (0, 1)]
    for signals, code in ((ends, -signal.SIGKILL), ([], 0)):
        commands = [command(tmp_path, signals=signals, **options)] * 2
        assert run(tmp_path, commands, [slurm(rank) | path for rank in range(2)]) == [code] * 2, printed(tmp_path)
        for rank, of_rank in enumerate(seen(tmp_path, 2)):
            # Those after the eleventh are not in the checkpoint.
            batches[rank] |= {at: labels for at, labels in of_rank.items() if not signals or at <= (0, 10)}
            (tmp_path / f"rank{rank}.seen").unlink()
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert samples(batches, 0) == samples(batches, 1) == EVERYTHING


@pytest.mark.soak
def test_named_caches_of_several_nodes(tmp_path):
    """The second job starts warm on the same nodes in another order. One node alone still has its own part."""
    options = SMALL | {"epochs": 1, "devices": 1, "budget": "50%", "name": f"k{os.getpid()}"}
    rates = []
    for number, order in enumerate([(0, 1), (1, 0), (0,)]):
        folder, world = tmp_path / str(number), len(order)
        folder.mkdir()
        disks = [str(tmp_path / f"disk{node}") for node in order]
        commands = [command(folder, nodes=world, dir=disk, **options) for disk in disks]
        assert run(folder, commands, [torchrun(rank, world) for rank in range(world)]) == [0] * world
        assert samples(seen(folder, world), 0) == EVERYTHING
        [logged] = read_ranks(folder, 1)[0][0]["epochs"]
        rates.append(logged["hit_rate"])
        assert logged["hits"] + source(folder).loads >= 512
    assert rates[0] <= 2 * 32 / 512, "what the set-up of two nodes has read is stored"
    assert rates[1] > 0.75  # of what a random deal finds on these nodes: a half
    assert rates[2] == pytest.approx(0.44, abs=0.06)  # what one epoch has filled of its half
