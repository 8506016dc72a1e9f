"""`STOCACHE=...` alone caches the trainings of applications, and changes nothing of them.

Each runs three times in an environment of its own: twice as it is, and once with the switch.
"""

import json
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.apps.environments import python_with

pytestmark = [pytest.mark.apps, pytest.mark.processes, pytest.mark.timeout(3600)]

_HERE = Path(__file__).parent
_MOST_IN_SETUP = 32  # samples
_LOOKS = 4  # in epochs 1, 2, 3 and 5
_LOOK = 4  # samples

# A script with its arguments, and what its environment needs.
CACHED = {
    "pytorch_forecasting": ("pytorch-forecasting==1.8.0",),
    "neuralforecast": ("neuralforecast==3.3.0",),
    "darts": ("darts==0.48.1",),
    "chemprop": ("chemprop==2.3.1",),
    "lightly": ("lightly-train==0.18.0",),
    "anomalib": ("anomalib==2.7.0",),
    "careamics": ("careamics==0.0.4.2", "setuptools<81"),  # it imports pkg_resources
    "torchgeo": ("torchgeo==0.8.1",),
    "rfdetr": ("rfdetr[train]==1.9.4",),
    "rfdetr --replacement": ("rfdetr[train]==1.9.4",),
}
LENT = {"chemprop": 16}
"""Batch sizes of applications whose samples are the dataset's own memory: a look reads a whole batch again."""

CACHED_OR_EXPLAINED = {
    "anomalib --augmented": (("anomalib==2.7.0",), "the sample does not hold what its transform returns"),
    "scvi": (("scvi-tools==1.4.2",), "its sampler draws lists of indices"),
    "ultralytics": (("ultralytics==8.4.190",), "its transform holds a dataset"),
}
"""With the reason of a warning."""


@dataclass(repr=False)
class Run:
    """A training: the losses of its steps, the reads of training samples, what it printed, and the files it wrote."""

    losses: list[Any]
    reads: list[dict[str, Any]]
    printed: str
    files: list[str]

    @property
    def warnings(self) -> list[str]:
        """Each warning that a training set is not cached."""
        lines = [line for line in self.printed.splitlines() if "passes through uncached" in line]
        return [line for line in lines if ", val) " not in line]

    @property
    def samples_of_setup(self) -> int:
        """How many samples set-up has read."""
        return len({read["index"] for read in self.reads if read["setup"]})

    @property
    def repeated(self) -> int:
        """How many reads of the epochs are those of a sample that an epoch had read."""
        loads = Counter(read["index"] for read in self.reads if not read["setup"])
        return loads.total() - len(loads)

    def is_cached(self, look: int) -> bool:
        """Whether each sample was loaded once at most, but for looks of so many samples."""
        return self.samples_of_setup <= _MOST_IN_SETUP and self.repeated <= _LOOKS * look

    def __str__(self) -> str:
        lines = [line for line in self.printed.splitlines() if "stocache" in line]
        reads = f"{self.samples_of_setup} samples in set-up, {self.repeated} repeated of {len(self.reads)} reads"
        return "\n".join((reads, *lines))


def run(application: str, python: Path, folder: Path, **variables: str) -> Run:
    """Run the script of an application in a new folder."""
    folder.mkdir()
    script, *arguments = application.split()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STOCACHE")}
    offline = {"HF_HUB_OFFLINE": "1", "NO_ALBUMENTATIONS_UPDATE": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "400"}
    environment |= offline | {"PYTHONPATH": str(_HERE.parents[1]), "OMP_NUM_THREADS": "1"} | variables
    command = [str(python), str(_HERE / f"train_{script}.py"), *arguments]
    ended = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert not ended.returncode, ended.stdout[-4000:]
    lines = {name: (folder / f"{name}.jsonl").read_text().splitlines() for name in ("losses", "reads")}
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    files = sorted(re.sub(r"\d+", "#", name) for name in names)  # times, versions and processes differ
    return Run(*(list(map(json.loads, values)) for values in lines.values()), ended.stdout, files)


def trained(application: str, requirements: tuple[str, ...], folder: Path) -> Run:
    """The training with the switch, whose losses and files are those of two without."""
    python = python_with(*requirements)
    plain = [run(application, python, folder / name) for name in ("plain", "again")]
    assert plain[0].losses == plain[1].losses, "two trainings without a cache differ: seed the application"
    cached = run(application, python, folder / "cached", STOCACHE="1GiB")
    assert cached.losses == plain[0].losses
    assert cached.files == plain[0].files
    assert not plain[0].is_cached(LENT.get(application, _LOOK))
    return cached


@pytest.mark.parametrize("application", CACHED)
def test_an_application_is_cached(application, tmp_path):
    """Each sample is loaded once at most, but for looks, set-up reads a few, and losses are equal."""
    cached = trained(application, CACHED[application], tmp_path)
    assert cached.is_cached(LENT.get(application, _LOOK)), str(cached)
    assert not cached.warnings, str(cached)


@pytest.mark.parametrize("application", CACHED_OR_EXPLAINED)
def test_an_application_is_cached_or_told_why_not(application, tmp_path):
    """Losses are equal, and if the training set is not cached, one warning says why."""
    requirements, reason = CACHED_OR_EXPLAINED[application]
    cached = trained(application, requirements, tmp_path)
    assert cached.is_cached(_LOOK) or len(cached.warnings) == 1, str(cached)
    assert all(reason in warning for warning in cached.warnings), str(cached)
