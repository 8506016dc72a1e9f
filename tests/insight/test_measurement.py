"""The measurements of a plan: what is measured is the user's own loading, and what is wrong is said in one sentence."""

import os
import time
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset
from torchvision.transforms import v2

from lightning_stocache.insight.measurement import Data, PlanError, measure, measure_curves
from tests.sources import Made

QUICK = 0.01
WITH_GRADIENTS = Made(lambda index: torch.ones(2, requires_grad=True), 40)
NOISE = Made(lambda index: torch.rand(3), 40)


@pytest.mark.parametrize(("samples", "batch_size", "workers"), [(64, 4, 2), (5, 8, 0), (1, 8, 2)])
def test_all_paces_are_measured(samples, batch_size, workers):
    """Each round measures uncached samples, misses and hits, also of fewer samples than a batch or than workers."""
    source = [torch.full((500,), index) for index in range(samples)]
    paces = measure(Data(source, batch_size, workers), seconds=QUICK)
    assert paces.codec is not None
    assert paces.codec.nbytes == 4000
    for spread in (paces.plain, paces.stored, paces.hit):
        assert 0 < spread.low < spread.high
        assert spread.deviation > 0


def test_paces_are_what_the_clock_says(tmp_path, monkeypatch):
    """A miss takes read and transform, a hit the transform alone; of a slow source few batches are read."""
    now = 0.0

    def takes(seconds, value=None):
        nonlocal now
        now += seconds
        return value

    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(time, name, lambda: takes(1e-6, now))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(takes(1e-6, now) * 1e9))
    source = Made(lambda index: takes(0.25, torch.tensor([index])), 1000, tmp_path / "loads")
    paces = measure(Data(source, 4, transform=lambda sample: takes(0.125, sample)), seconds=QUICK)
    for spread, seconds in ((paces.plain, 0.375), (paces.stored, 0.375), (paces.hit, 0.125)):
        assert spread[:3] == pytest.approx((seconds,) * 3, rel=0.01)
    assert 0 < source.loads < 100


@pytest.mark.parametrize(("workers", "words"), [(0, "ValueError: no file$"), (2, r"for \d+$")])
def test_a_source_that_raises_is_one_line(workers, words):
    """The error is told without a traceback: by its first line, and if it comes from a worker by its last line."""
    here = os.getpid()

    def load(index):
        if workers and os.getpid() == here:
            return torch.tensor([index])
        raise ValueError(f"no file\nfor {index}")

    with pytest.raises(PlanError, match=f"a sample of Made cannot be loaded: {words}") as caught:
        measure(Data(Made(load, 40), 4, workers), seconds=QUICK)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"), [([], "at least one sample, got an empty list"), (iter([1]), "be a map-style dataset")]
)
def test_what_is_no_fault_of_a_sample_is_not_called_one(source, words):
    """An empty dataset and a stream are named as what they are."""
    with pytest.raises(PlanError, match=f"^source must .*{words}"):
        measure(Data(source, 4), seconds=QUICK)


@pytest.mark.parametrize(("source", "words"), [(WITH_GRADIENTS, "requires grad"), (NOISE, "random")])
def test_what_cannot_be_cached_has_a_reason(source, words):
    """It is measured uncached, with the reason; with freeze_random a random source is cached in the plan, too."""
    paces = measure(Data(source, 4), seconds=QUICK)
    assert paces.codec is None
    assert words in str(paces.reason)
    assert paces.hit == paces.plain
    found = measure_curves(Data(source, 4), [0], seconds=0.05)
    assert [arm.kind for arm in found.rates] == ["plain"]
    assert "Nothing can be cached" in found.left_out[0]
    assert (measure(Data(source, 4, freeze_random=True), seconds=QUICK).codec is None) == (source is not NOISE)


class Part(Dataset[Any]):
    """Numbers of one part, with a transform that is random, and then marks the part."""

    def __init__(self, part: float) -> None:
        self.part = part
        self.transform = v2.Compose([v2.ToDtype(torch.float32), v2.RandomHorizontalFlip(), v2.Lambda(self.marked)])

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(torch.full((1, 4, 4), self.part))

    def marked(self, image: torch.Tensor) -> torch.Tensor:
        return image + self.part


def checked(image: torch.Tensor) -> torch.Tensor:
    """A sample of part 1 is 2, a sample of part 5 is 10."""
    assert image.unique().tolist() in ([2.0], [10.0])
    return image


def test_what_is_random_is_measured_after_the_cache(caplog):
    """Hits are finished by the random rest of their own part's transform, then by the user's transform; none passes."""
    paces = measure(Data(ConcatDataset([Part(1), Part(5)]), 4, transform=checked), seconds=QUICK)
    assert paces.reason is None
    assert paces.hit.median > 0


def test_no_memory_is_one_sentence(monkeypatch):
    """Without room for a single sample the plan says so."""
    monkeypatch.setattr(Data, "safe_bytes", lambda *_: 100)
    with pytest.raises(PlanError, match="no memory for one sample"):
        measure(Data([torch.zeros(100)] * 8, 4), seconds=QUICK)


@pytest.mark.processes
def test_every_arm_is_measured_in_every_round():
    """Each loader is measured once per round, of source and cache; the limit leaves out the rest, in a sentence."""
    source, told = [torch.full((50,), index) for index in range(64)], list[str]()
    found = measure_curves(
        Data(source, 4), [0, 2], [4, 60], [False, True], seconds=0.05, limit=1e9, progress=told.append
    )
    for kind in ("plain", "hit"):
        for name, numbers in (("num_workers", [0, 2]), ("batch_size", [4, 60]), ("pin_memory", [False, True])):
            assert [number for number, _ in found.over(name, kind)] == numbers
    assert all(0 < rates.low < rates.high for rates in found.rates.values())
    assert [words.partition(":")[0] for words in told] == [f"{done} of 24" for done in range(1, 25)]
    assert "num_workers=0, batch_size=4, pin_memory=False, batches from the cache: " in told[1]
    assert found.left_out == []
    over = measure_curves(Data(source, 4), [0], limit=-1.0)
    assert over.rates == {}
    assert over.left_out[0].endswith("s were over after 0 of 6 measurements.")
