"""Ranks of one machine share one cache, under every launcher; and whatever is killed, nothing is left."""

import json
import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import OWN_SHM, exit_codes, skip_without
from tests.proc import is_alive, memory_files
from tests.processes import wait_until
from tests.training.job import FITS, logs, printed, read_at_setup, read_ranks, start_nodes
from tests.training.tiny import SAMPLES, source

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks into /proc"),
]

SECONDS = 240  # a job takes ten; a machine with much else to do takes longer


def start(folder: Path, door: str, strategy: str, **options: Any) -> BaseProcess:
    """A job of two ranks, which are started one by one with "ddp", and else by the strategy itself."""
    folder.mkdir(exist_ok=True)
    told = [] if strategy == "ddp" else [[{}]]
    options |= {"strategy": strategy.removesuffix(" itself"), "door": door, "val": 8, "early": door == "ours"}
    [job] = start_nodes(folder, "train", told=told, **options)
    return job


@pytest.mark.parametrize(
    ("door", "strategy", "fits", "jobs"),
    [
        ("ours", "ddp", 2, 2),
        ("cache_datamodule", "ddp_fork", 2, 1),
        pytest.param("callback", "ddp_spawn", 1, 1, marks=pytest.mark.soak),  # each rank imports everything anew
        pytest.param("ours", "ddp_notebook", 1, 1, marks=pytest.mark.soak),
    ],
)
def test_ranks_share_one_cache(tmp_path, door, strategy, fits, jobs):
    """In each fit of a job both ranks map one segment, load every sample once between them, log the same counts, and
    end with the same weights. Two jobs on one node have a cache each."""
    folders = [tmp_path / str(number) for number in range(jobs)]
    started = [start(folder, door, strategy, fits=fits) for folder in folders]
    for folder, job in zip(folders, started, strict=True):
        assert exit_codes([job], folder / "said", SECONDS) == [0], printed(folder)
    results = [read_ranks(folder, 2) for folder in folders]
    assert len({fit["weights"] for ranks in results for fits_of_rank in ranks for fit in fits_of_rank[:1]}) == 1
    for folder, (first, second) in zip(folders, results, strict=True):
        assert first == second
        assert len(first) == fits
        all_stored = 0
        for fit in first:
            epochs = {key: [epoch[key] for epoch in fit["epochs"]] for key in ("hits", "misses", "bypasses")}
            stored = epochs["hits"][0]
            assert 4 <= stored <= SAMPLES, "what set-up has read is stored"
            assert epochs["hits"] == [stored, SAMPLES, SAMPLES]
            assert epochs["misses"] == [SAMPLES - stored, 0, 0]
            assert epochs["bypasses"] == [0, 0, 0]
            all_stored += stored
        train, val = (read_at_setup(folder, stage) for stage in ("train", "val"))
        assert source(folder).loads == fits * SAMPLES + train - all_stored
        assert 0 <= source(folder, "val").loads - val <= 4 * fits, "of eight at least four are stored"
        assert "sync_dist" not in printed(folder)


@pytest.mark.parametrize(
    ("victim", "strategy"),
    [
        ("rank 0", "ddp"),
        ("rank 1", "ddp"),
        ("worker", "ddp"),
        pytest.param("rank 1", "ddp itself", marks=pytest.mark.soak),  # Lightning starts it as a command
    ],
)
def test_sigkill_of_any_process_ends_all_and_leaves_nothing(tmp_path, victim, strategy):
    """When a rank or a worker is killed, all processes of the job end by themselves, and with them the memory."""
    options = {"workers": 1, "budget": "50%"} if victim == "worker" else {}  # all in memory needs no worker
    job = start(tmp_path, "ours", strategy, epochs=10**6, **options)
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


@pytest.mark.parametrize("nodes", [1, 2])
def test_no_collective_of_others_is_crossed(tmp_path, nodes):
    """Every fit ends, with each bar, order of callbacks and kind of reduction. The values that a checkpoint can watch
    are the same on all ranks, though one rank is late, and agree with the source. If one rank alone has a monitor, it
    warns once per fit and logs nothing, and training continues; the next fit logs again."""
    if nodes > 1:
        skip_without(OWN_SHM)
    fits, alone = (len(FITS), (4, 5)) if nodes == 1 else (2, ())
    jobs = start_nodes(tmp_path, "crossing", devices=2 // nodes, nodes=nodes, fits=fits)
    assert exit_codes(jobs, tmp_path / "said", SECONDS) == [0] * nodes, printed(tmp_path)
    first, second = read_ranks(tmp_path, 2)
    assert len(first) == fits
    for number, (fit, other) in enumerate(zip(first, second, strict=True)):
        assert fit == other
        if number in alone:
            assert fit["epochs"] == [{}, {}]
            continue
        for epoch_number, epoch in enumerate(fit["epochs"]):
            for stage, samples in (("", SAMPLES), ("val/", 8)):
                counts = [epoch[stage + name] for name in ("hits", "misses", "bypasses")]
                assert sum(counts) == samples
                assert epoch[f"{stage}hit_rate"] == pytest.approx(counts[0] / samples)
            if nodes == 1:
                assert epoch["fill_fraction"] == 1
                assert (epoch["hit_rate"] == 1) if epoch_number else (epoch["hits"] >= 4)
    if nodes == 1:  # two keep samples that are dealt to both in turn
        at_setup = read_at_setup(tmp_path) // 2  # each was read twice, and is stored
        assert sum(first[-1]["loads"]) == len(first) * (SAMPLES + 8) + at_setup
    assert logs(tmp_path).count("the cache counts of the other ranks have not come") == len(alone)
