"""A name never serves other data: what lies under it is compared with what the source gives."""

import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.setup.same_data import FingerprintError
from lightning_stocache.source.samples import same_sample
from tests.processes import call, call_many
from tests.ranks import run_ranks

pytestmark = [pytest.mark.named, pytest.mark.processes]

LENGTH = 40


class Data(Dataset[Any]):
    """Whatever a function makes of an index and a gain, which stands for the folder that it is read from."""

    def __init__(self, make: Callable[[int, float], Any], gain: float = 1.0) -> None:
        self.make, self.gain = make, gain

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.make(index, self.gain)


def row(index: int, gain: float) -> Any:
    return torch.linspace(-1, 1, 9) * (index + 1) * gain, {"mean": index / 7 * gain}


def record(index: int, gain: float) -> Any:
    return {"text": "a" * (index % 5), "tags": {f"tag {index * gain + k}" for k in range(9)}, "array": np.arange(index)}


def noise(index: int, gain: float) -> Any:
    return torch.rand(3)


class Files(Data):
    """Files that are decoded after the cache, where noise is added."""

    def read(self, index: int) -> bytes:
        return bytes([int(self.gain), index] * 50)

    def decode(self, content: bytes, index: int) -> torch.Tensor:
        return torch.tensor(list(content)) + torch.rand(1)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.decode(self.read(index), index)


class Augmented(Data):
    """Its transform is split: the gain comes before the cache, the noise after it."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__(row, gain)
        self.transform = torch.nn.Sequential(Gain(gain), torch.nn.Dropout(0.5))

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((3,), index + 1.0)), index


class Gain(torch.nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.gain


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


SOURCES: dict[str, tuple[Callable[[float], Data], dict[str, Any]]] = {
    "rows": (lambda gain: Data(row, gain), {}),
    "records": (lambda gain: Data(record, gain), {}),
    "files": (lambda gain: Files(record, gain), {"store": "encoded"}),
    "split": (Augmented, {}),
    "spec": (lambda gain: Data(row, gain), {"spec": SampleSpec.infer(row(0, 1))}),
    "a tenth": (lambda gain: Data(row, gain), {"budget": "10%"}),
}


@pytest.mark.parametrize(
    ("kind", "served", "on_disk"),
    [
        ("rows", 0, False),
        ("rows", 9, True),
        ("records", 0, True),
        ("records", 9, False),
        ("files", 0, False),
        ("split", 9, False),
        ("spec", 0, False),
        ("a tenth", 0, False),
    ],
)
def test_other_data_passes_through_and_the_same_is_joined(name, kind, served, on_disk, tmp_path, caplog) -> None:
    """Of another folder not one sample is served from the cache, however few lie there; strict, it is refused."""
    make, options = SOURCES[kind]
    options = options | {"name": name, "dir": str(tmp_path) if on_disk else None}
    with closing(CachedDataset(make(1), **options)) as first:
        for index in range(served):
            first[index]
        with closing(CachedDataset(make(1), strict=True, **options)) as second:
            assert second.cache.filled == first.cache.filled > 0
        assert said(caplog) == []
        other = make(3)
        with closing(CachedDataset(other, **options)) as third:
            assert third.cache is None
            assert third.budget_bytes == 0
            torch.manual_seed(1)
            samples = [third[index] for index in range(LENGTH)]
            torch.manual_seed(1)
            assert same_sample(samples, [other[index] for index in range(LENGTH)])
            assert third.counters.totals().bypasses == LENGTH
        [words] = said(caplog)
        assert words.count("\n") == 1
        assert "passes through uncached: there is other data under this name" in words
        assert f"another name, or remove it: python -m lightning_stocache clean {name}" in words
        with pytest.raises(FingerprintError, match="other data under this name"):
            CachedDataset(other, strict=True, **options)


def test_other_processes_join_their_own_cache(name) -> None:
    """Sets have another order there, generators other seeds, and a decoder may compute other last bits."""
    for seed, method in ((1, "fork"), (2, "spawn")):
        assert call(joins_each, name, seed, method=method) == [True, True, True]


def joins_each(name: str, seed: int) -> list[bool]:
    last_bits = 1 + seed * torch.finfo(torch.float32).eps
    sources = Data(record), Augmented(), Data(row, last_bits)
    return [joins(source, f"{name}-{number}", seed) for number, source in enumerate(sources)]


def joins(source: Data, name: str, seed: int) -> bool:
    torch.manual_seed(seed)
    with closing(CachedDataset(source, name=name, strict=True)) as dataset:
        return dataset.cache is not None and len([dataset[index] for index in range(LENGTH)]) == LENGTH


@pytest.mark.parametrize("fingerprint", ["", "v2"])
def test_random_samples_are_no_other_data(name, fingerprint, caplog) -> None:
    """They differ from themselves: the cache is joined, with a warning unless its user says what it holds."""
    options: dict[str, Any] = {"name": name, "fingerprint": fingerprint, "allow_random": True}
    with closing(CachedDataset(Data(noise), **options)) as first:
        samples = [first[index] for index in range(LENGTH)]
        with closing(CachedDataset(Data(noise), **options)) as second:
            assert all(map(torch.equal, samples, (second[index] for index in range(LENGTH))))
    assert ["fingerprint=" in words for words in said(caplog)] == [True] * (not fingerprint)


def test_random_samples_are_not_stored_for_a_spec(name, caplog) -> None:
    """With `spec=` nobody has looked for what is random: neither set-up nor training freezes a draw."""
    options: dict[str, Any] = {"name": name, "spec": SampleSpec.infer(torch.rand(3))}
    with closing(CachedDataset(Data(noise), **options)) as first:
        for index in range(LENGTH):
            first[index]
        with closing(CachedDataset(Data(noise), **options)) as second:
            assert second.cache.filled == 0
    assert ["draws random numbers" in words for words in said(caplog)] == [True]


@pytest.mark.parametrize("gains", [(1, 1, 1, 1), (1, 3, 1, 3)])
def test_jobs_that_start_at_once_on_one_name(name, gains) -> None:
    """Who comes first says what lies there; who has other data trains on its own."""
    cached = call_many(train, [(name, gain) for gain in gains])
    assert len({gain for gain, was_cached in zip(gains, cached, strict=True) if was_cached}) == 1
    assert cached.count(True) == max(gains.count(gain) for gain in gains)


def train(name: str, gain: int) -> bool:
    source = Data(row, gain)
    with closing(CachedDataset(source, name=name)) as dataset:
        for _ in range(2):
            assert all(same_sample(dataset[index], source[index]) for index in range(LENGTH))
        return dataset.cache is not None


@pytest.mark.parametrize("strict", [False, True])
def test_all_ranks_do_the_same(name, strict) -> None:
    """The leader of the node compares; no rank is left waiting."""
    with closing(CachedDataset(Data(row), name=name)):
        assert run_ranks(of_rank, 2, name, strict) == [strict or "passes through"] * 2


def of_rank(rank: int, name: str, strict: bool) -> Any:
    dataset = CachedDataset(Data(row, 3), name=name, strict=strict, defer=True)
    try:
        dataset.share()
    except (FingerprintError, RuntimeError) as error:
        return "other data under this name" in str(error)
    assert dataset.cache is None
    assert same_sample(dataset[5 + rank], row(5 + rank, 3))
    dist.barrier()
    dataset.close()
    return "passes through"
