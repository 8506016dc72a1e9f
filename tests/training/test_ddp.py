"""Two ranks share one cache, under every launcher; and whatever is killed, nothing is left."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import OWN_SHM, Job, exit_codes, job_environment, say_where, skip_without, start_module
from tests.proc import is_alive, memory_files
from tests.training.job import FITS, logs, read_at_setup, read_ranks, start_nodes
from tests.training.tiny import SAMPLES, source

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks into /proc"),
]

SECONDS = 240  # a job takes ten; a machine with much else to do takes longer


def start(folder: Path, door: str, strategy: str, epochs: int, fits: int = 1, ranks: int = 0) -> Job:
    """The job; what it says goes to `said`. With `ranks` each is started by itself, else the strategy starts them."""
    if ranks:
        return start_nodes(folder, "ddp", door, strategy, epochs, fits, devices=ranks)[0]
    words = ["tests.training.job", "ddp", folder, door, strategy, epochs, fits]
    return start_module(*words, environments=[job_environment()], said=folder / "said")


def wait_for(condition: Callable[[], Any], job: Job, folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if job.poll() is not None or time.monotonic() > deadline:
            say_where()
            pytest.fail(f"the job ended with {job.wait()}:\n{(folder / 'said').read_text()}")
        time.sleep(0.05)


def check_loads(folder: Path, fits: int, stored: int) -> None:
    """Each sample was loaded once, or stored at set-up."""
    train, val = (read_at_setup(folder, stage) for stage in ("train", "val"))
    assert source(folder).loads == fits * SAMPLES + train - stored
    assert 0 <= source(folder, "val").loads - val <= 4 * fits, "of eight at least four are stored"


@pytest.mark.parametrize(
    ("door", "strategy", "fits"),
    [
        ("ours", "ddp", 2),
        ("cache_datamodule", "ddp_fork", 2),
        ("callback", "ddp_spawn", 1),
        pytest.param("ours", "ddp_notebook", 1, marks=pytest.mark.soak),
    ],
)
def test_ranks_share_one_cache(tmp_path, door, strategy, fits):
    """In each fit of a job both ranks map one segment, load every sample once between them, and log the same counts."""
    job = start(tmp_path, door, strategy, 3, fits, ranks=2 if strategy == "ddp" else 0)
    wait_for(lambda: job.poll() == 0, job, tmp_path)
    ranks = read_ranks(tmp_path, 2)
    assert [len(saw) for saw in ranks] == [fits, fits]
    all_stored = 0
    for one, other in zip(*ranks, strict=True):
        assert one["inodes"] == other["inodes"]
        assert one["weights"] == other["weights"]
        assert one["epochs"] == other["epochs"]
        epochs = {key: [epoch[key] for epoch in one["epochs"]] for key in ("hits", "misses", "bypasses")}
        stored = epochs["hits"][0]
        assert 4 <= stored <= SAMPLES
        all_stored += stored
        assert epochs == {"hits": [stored, SAMPLES, SAMPLES], "misses": [SAMPLES - stored, 0, 0], "bypasses": [0, 0, 0]}
    check_loads(tmp_path, fits, all_stored)
    assert "sync_dist" not in (tmp_path / "said").read_text()


def test_two_jobs_on_one_node_do_not_meet(tmp_path):
    """Each job of a user has its own cache: both load every sample once, count right, and end with equal weights."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    jobs = [start(folder, "ours", "ddp", 3, ranks=2) for folder in folders]
    for folder, job in zip(folders, jobs, strict=True):
        wait_for(lambda job=job: job.poll() == 0, job, folder)
    saw = [read_ranks(folder, 1)[0][0] for folder in folders]
    assert saw[0]["weights"] == saw[1]["weights"]
    for folder, one in zip(folders, saw, strict=True):
        first, *later = [epoch["hits"] for epoch in one["epochs"]]
        assert 4 <= first <= SAMPLES, "what set-up has read is stored"
        assert later == [SAMPLES, SAMPLES]
        check_loads(folder, 1, int(first))


@pytest.mark.parametrize(("victim", "ranks"), [("rank 0", 2), ("rank 1", 0), ("worker", 2)])
def test_sigkill_of_any_process_ends_all_and_leaves_nothing(tmp_path, victim, ranks):
    """When a rank or a worker is killed, all processes of the job end by themselves, and with them the memory."""
    job = start(tmp_path, "workers" if victim == "worker" else "ours", "ddp", 10**6, ranks=ranks)
    try:
        notes = [tmp_path / "rank0.pids", tmp_path / "rank1.pids"]
        wait_for(lambda: all(note.exists() for note in notes), job, tmp_path)
        ranks = [json.loads(note.read_text()) for note in notes]
        everyone = {pid for rank in ranks for pid in rank}
        assert (len(ranks[1]) > 1) == (victim == "worker")
        assert all(memory_files({rank[0]}) for rank in ranks)
        os.kill({"rank 0": ranks[0][0], "rank 1": ranks[1][0], "worker": ranks[1][-1]}[victim], signal.SIGKILL)
        assert job.wait(SECONDS) != 0
    finally:
        job.kill()  # the other rank ends by that, too
    deadline = time.monotonic() + SECONDS / 2
    while any(map(is_alive, everyone)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in everyone if is_alive(pid)]


@pytest.mark.parametrize(("devices", "nodes"), [(2, 1), (1, 2)])
def test_no_collective_of_others_is_crossed(tmp_path, devices, nodes):
    """Every fit ends, with each bar, order of callbacks and kind of reduction. The values that a checkpoint can watch
    are the same on all ranks, though one rank is late, and agree with the source. If one rank alone has a monitor, it
    warns once per fit and logs nothing, and training continues; the next fit logs again."""
    if nodes > 1:
        skip_without(OWN_SHM)
    jobs = start_nodes(tmp_path, "crossing", devices, nodes, devices=devices, nodes=nodes)
    assert exit_codes(jobs, tmp_path / "said", SECONDS) == [0] * nodes, (tmp_path / "said").read_text()[-4000:]
    first, second = read_ranks(tmp_path, 2)
    assert len(first) == len(FITS) + 3
    *fits, alone, alone_again, after = zip(first, second, strict=True)
    for fit, other in (*fits, after):
        assert fit == other
        for number, epoch in enumerate(fit["epochs"]):
            for stage, samples in (("", SAMPLES), ("val/", 8)):
                counts = [epoch[stage + name] for name in ("hits", "misses", "bypasses")]
                assert sum(counts) == samples
                assert epoch[f"{stage}hit_rate"] == pytest.approx(counts[0] / samples)
            if nodes == 1:
                assert epoch["fill_fraction"] == 1
                assert (epoch["hit_rate"] == 1) if number else (epoch["hits"] >= 4)
    if nodes == 1:  # two keep samples that are dealt to both in turn
        at_setup = read_at_setup(tmp_path) // 2  # each was read twice, and is stored
        assert sum(first[-1]["loads"]) == len(first) * (SAMPLES + 8) + at_setup
    assert [fit["epochs"] for fit in (*alone, *alone_again)] == [[{}, {}]] * 4
    assert logs(tmp_path).count("the cache counts of the other ranks have not come") == 2
