"""The examples of photographs and text: each sample is loaded once."""

import re
from pathlib import Path

import pytest

from tests.scripts import run_example

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TWO_RANKS = ("--devices", "2", "--strategy", "ddp")  # no fork: a test before may have asked CUDA something


def run(example: str, tmp_path: Path, *arguments: str, samples: int) -> str:
    """What an example prints, as a user starts it, with the files that it makes in tmp_path."""
    always = ("--samples", str(samples), "--epochs", "2", "--batch-size", "8")
    return run_example(f"{example}.py", tmp_path, *always, *arguments)


def loads(said: str) -> list[int]:
    """How many samples the source has loaded in each epoch."""
    return [int(number) for number in re.findall(r"the source loaded (\d+) samples", said)]


@pytest.mark.parametrize("ranks", [(), pytest.param(TWO_RANKS, marks=pytest.mark.soak)], ids=["one rank", "two ranks"])
def test_each_sample_is_loaded_once(tmp_path, ranks):
    """Every sample in epoch one, by all ranks together, and nothing in epoch two."""
    first, second = loads(run("text", tmp_path, *ranks, samples=160))
    assert 160 <= first <= 160 + 80, "set-up reads some, and a few are read again, to see whether the source is random"
    assert second == 0


def test_the_count_sees_what_is_loaded_again(tmp_path):
    """Without a cache each epoch loads every sample."""
    assert loads(run("text", tmp_path, "--budget", "0", samples=40)) == [40, 40]


def test_photographs_of_many_sizes_are_cached_by_both_recipes(tmp_path):
    """The recipe without a cache loads all in each epoch; with one, on images and on tensors, only in the first."""
    said = run("imagenet", tmp_path, samples=96)
    uncached, recipe, tensors = (loads(said)[at : at + 2] for at in (0, 2, 4))
    assert uncached == [96, 96]
    for first, second in (recipe, tensors):
        assert 96 <= first <= 96 + 60
        assert second == 0
    assert re.search(r"^recipe, uncached +\d+ +1\.0$\n^recipe +\d.*$\n^tensors +\d", said, re.MULTILINE)


@pytest.mark.soak
def test_photographs_are_cached_for_two_ranks(tmp_path):
    """Two trainings in a row, each on two ranks, load each photograph once where there is a cache."""
    trainings = ("--only", "recipe", "tensors")
    first, second, third, fourth = loads(run("imagenet", tmp_path, *TWO_RANKS, *trainings, samples=96))
    assert 96 <= first <= 96 + 60
    assert 96 <= third <= 96 + 60
    assert second == fourth == 0
