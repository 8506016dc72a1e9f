"""Leaves of a sample that have bytes in common are views of each other when they come from the cache, too."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache import CachedDataset
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from tests.cache.leaves import same
from tests.sources import Made

SAMPLES = 12


def trajectory(index: int) -> Any:
    steps = torch.arange(40.0).reshape(10, 4) + index
    return {"now": steps[:-1], "next": steps[1:], "reward": index}


def of_numpy(index: int) -> Any:
    array = np.arange(24, dtype=np.int16).reshape(4, 6) + index
    return array[::-1, 1:4], torch.from_numpy(array), [array[:, ::2]]


def large(index: int) -> Any:
    image = torch.full((3, 40, 40), index, dtype=torch.uint8)
    return [image, image[:, 4:20, 4:20], image.view(torch.int32)]


def half(index: int) -> Any:
    whole = torch.full((9, 3), float(index), dtype=torch.bfloat16)
    return whole.t(), {"part": whole[2:5], "row": whole[3]}


def itself(index: int) -> Any:
    image = torch.full((3, 4), float(index))
    return image, image


def grown(index: int) -> Any:
    """Only some of the samples have leaves in common."""
    image = torch.full((3, 4), float(index))
    return image, image[:] if index % 3 == 2 else image.clone()


def add_one(sample: Any, every: list[Any]) -> Any:
    """The sample after its first leaf has been changed in place."""
    leaves = sample.values() if isinstance(sample, dict) else sample
    first = next(iter(leaves))
    first += 1
    return every.append(sample) or sample


@pytest.mark.parametrize("make", [trajectory, of_numpy, large, half, itself, grown])
@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
def test_leaves_with_bytes_in_common_stay_views(make: Callable[[int], Any]) -> None:
    """What is changed in place in one of them is changed in the others, as without a cache."""
    source = Made(make, SAMPLES)
    with closing(CachedDataset(source)) as dataset:
        for _ in range(3):
            for index in range(SAMPLES):
                got, expected = dataset[index], make(index)
                assert same(got, expected)
                assert same(add_one(got, []), add_one(expected, []))
        assert dataset.counters is not None
        assert dataset.counters.totals().hits >= 2 * SAMPLES - (make is grown) * 2 * SAMPLES


def columns(index: int) -> Any:
    """Columns of one table: they share a storage, but no byte."""
    table = torch.arange(20).reshape(4, 5) + index
    return table[:, :2], table[:, 2:], table.numpy()[:1, :0]


def halves(index: int) -> Any:
    whole = np.arange(6) + index
    return whole[:3], whole[3:]


def every_second(index: int) -> Any:
    whole = np.arange(6.0) + index
    return {"even": whole[::2], "odd": whole[1::2]}


@pytest.mark.parametrize("make", [columns, halves, every_second])
def test_leaves_that_share_a_storage_alone_are_rows(make: Callable[[int], Any]) -> None:
    """They have no byte in common."""
    spec = SampleSpec.infer(make(0))
    assert same(spec.decoded(spec.contents(spec.encode(make(3)))), make(3))


def test_a_record_holds_bytes_that_are_in_common_once() -> None:
    """So two views of a trajectory take the memory of one."""
    alone, both = torch.zeros(1000), torch.zeros(1001)
    codec = RecordCodec(0)
    sizes = [sum(part.nbytes for part in codec.encode(sample)) for sample in (alone, [both[:-1], both[1:]])]
    assert sizes[1] < 1.2 * sizes[0]
