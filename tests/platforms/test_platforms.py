"""Python 3.14's way to start processes; and systems that are not Linux, played on it: what they lack is taken away."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.platforms.job import KEPT, SAMPLES

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="plays another system on Linux"),
]

DOORS = ("ranks", "cache_datamodule", "callback", "loop")
LOOKED = 4  # stored samples that are read again in an epoch, at most

ROOT = Path(__file__).parents[2]
DARWIN = str(Path(__file__).parent / "darwin")


def run(folder: Path, what: str, path: str = DARWIN) -> Any:
    """What a job prints, with a temp folder of its own, in which only a named cache is left."""
    (folder / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}" if path else str(ROOT)}
    environment |= {"TMPDIR": str(folder / "tmp"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.platforms.job", what, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    left = sorted(path.name.removeprefix(f"lsc-{os.getuid()}-") for path in (folder / "tmp").glob("lsc-*"))
    assert left == (["kept"] if what == "named" else [])
    if path == DARWIN and what != "commands":
        makers = 2 if what == "doors" else 1  # the trainer's process, and rank 0 of two that were spawned
        assert done.stderr.count("no locks between processes") == makers
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.soak
@pytest.mark.parametrize("path", ["", DARWIN], ids=["fork server", "macOS"])
def test_every_door_caches(tmp_path, path):
    """Epoch two hits everything, batches are as without a cache, two ranks load each sample once, no file is left.

    Without locks between processes only the trainer's process stores: what workers and other ranks load is not.
    """
    found = run(tmp_path, "doors", path)
    doors = [found[name] for name in ("cache_datamodule", "callback", "loop")]
    assert [same for _, same in doors] == [True] * 3
    hits = [found["ranks"], *(hits for hits, _ in doors)]
    for door, (first, second), loads in zip(DOORS, hits, found["loads"], strict=True):
        if path == DARWIN and door in ("ranks", "callback"):
            assert second <= SAMPLES  # set-up may have stored all; what workers hit is not counted
            continue
        assert 4 <= first <= SAMPLES, "what set-up has read and stored, which it has read twice"
        assert second == SAMPLES
        assert SAMPLES + first <= loads <= SAMPLES + first + 2 * LOOKED


@pytest.mark.soak
@pytest.mark.parametrize("what", ["named", "disk"])
def test_a_cache_lasts_on_macos(tmp_path, what):
    """What its maker has stored is found by the next who opens it, in the temp folder and on a disk."""
    found = run(tmp_path, what)
    stored, held = found["held"]
    assert 0 < stored <= 32, "what set-up has read is stored; where reading is slow it is less"
    assert held == stored
    # Set-up reads twice what it stores, and a few samples to compare; epochs load what is not stored, and look again.
    assert found["loads"] <= 2 * stored + 2 * (KEPT - stored) + 4 * LOOKED


def test_the_commands_work_on_macos(tmp_path):
    """What cannot be known there is a sentence; a cache is listed, removed, and nothing else is left."""
    doctor, listed, cleaned, empty = run(tmp_path, "commands")["said"]
    assert "nothing to mend" in doctor
    # Lines are wrapped, in the middle of a path, too.
    assert f"a cache is a file in {tmp_path}/tmp, in the page cache".replace(" ", "") in "".join(doctor.split())
    assert listed.startswith("kept: CountedSource (24 samples)")
    assert "removed 1 cache" in cleaned
    assert "no named caches" in empty


@pytest.mark.soak
def test_windows_trains_as_without(tmp_path):
    """All modules can be imported, each door passes samples through with one warning, commands say what is missing."""
    found = run(tmp_path, "windows", "")
    assert found["modules"] > 90
    for door in ("cache_datamodule", "callback", "loop"):
        assert found[door] == [[-1, -1], True]
    assert found["loads"][1:] == [2 * SAMPLES] * 3
    assert len(found["warnings"]) == 3
    assert all("all samples pass through uncached" in warning for warning in found["warnings"])
    assert all("Windows has no" in words for words in found["said"])
