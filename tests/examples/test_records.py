"""The examples of photographs and text: each sample is loaded once."""

import re
from pathlib import Path

import pytest

from tests.scripts import run_example

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TWO_RANKS = ("--devices", "2", "--strategy", "ddp")  # no fork: a test before may have asked CUDA something


def run(example: str, tmp_path: Path, *arguments: str, samples: int) -> tuple[str, list[list[int]]]:
    """What an example prints, and how many samples the source has loaded in the two epochs of each training."""
    always = ("--samples", str(samples), "--epochs", "2", "--batch-size", "8")
    said = run_example(f"{example}.py", tmp_path, *always, *arguments)
    loads = [int(number) for number in re.findall(r"the source loaded (\d+) samples", said)]
    return said, [loads[at : at + 2] for at in range(0, len(loads), 2)]


@pytest.mark.parametrize("ranks", [(), pytest.param(TWO_RANKS, marks=pytest.mark.soak)], ids=["one rank", "two ranks"])
def test_each_sample_is_loaded_once(tmp_path, ranks):
    """Every sample in epoch one, by all ranks together, and nothing in epoch two."""
    _, [[first, second]] = run("text", tmp_path, *ranks, samples=160)
    assert 160 <= first <= 160 + 80, "set-up reads some, and a few are read again, to see whether the source is random"
    assert second == 0


def test_photographs_of_many_sizes_are_cached_by_both_recipes(tmp_path):
    """The recipe without a cache loads all in each epoch; with one, on images and on tensors, only in the first."""
    said, [uncached, *cached] = run("imagenet", tmp_path, samples=96)
    assert uncached == [96, 96]
    assert len(cached) == 2
    for first, second in cached:
        assert 96 <= first <= 96 + 60
        assert second == 0
    assert re.search(r"^recipe, uncached +\d+ +1\.0$\n^recipe +\d.*$\n^tensors +\d", said, re.MULTILINE)


@pytest.mark.soak
def test_photographs_are_cached_for_two_ranks(tmp_path):
    """Two trainings in a row, each on two ranks, load each photograph once where there is a cache."""
    _, trainings = run("imagenet", tmp_path, *TWO_RANKS, "--only", "recipe", "tensors", samples=96)
    assert len(trainings) == 2
    for first, second in trainings:
        assert 96 <= first <= 96 + 60
        assert second == 0
