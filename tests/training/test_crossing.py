"""With progress bars and metrics that are reduced over the ranks, training neither hangs nor counts wrong."""

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import OWN_SHM, exit_codes, free_port, job_environment, skip_without, start_module
from tests.training.job import FITS, logs, read_at_setup, read_ranks
from tests.training.tiny import SAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.processes]

SECONDS = 300


def run(folder: Path, devices: int, nodes: int) -> list[list[dict[str, Any]]]:
    """The lines of each rank, one per fit."""
    environment, said = job_environment(free_port()), folder / "said"
    words = ["tests.training.job", "crossing", folder, str(devices), str(nodes)]
    jobs = []
    for node in range(nodes):
        told = [environment | {"NODE_RANK": str(node), "LOCAL_RANK": str(local)} for local in range(devices)]
        jobs.append(start_module(*words, environments=told, said=said, shm_mib=0 if nodes == 1 else 64))
    assert exit_codes(jobs, said, SECONDS) == [0] * nodes, said.read_text()[-4000:]
    return read_ranks(folder, devices * nodes)


@pytest.mark.parametrize(("devices", "nodes"), [(2, 1), (1, 2)])
def test_no_collective_of_others_is_crossed(tmp_path, devices, nodes):
    """Every fit ends, with each bar, order of callbacks and kind of reduction. The values that a checkpoint can watch
    are the same on all ranks, though one rank is late, and agree with the source. If one rank alone has a monitor, it
    warns once per fit and logs nothing, and training continues; the next fit logs again."""
    if nodes > 1:
        skip_without(OWN_SHM)
    first, second = run(tmp_path, devices, nodes)
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
