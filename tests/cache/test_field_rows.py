"""Samples at their places of a batch: put, or written as bytes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torchvision import tv_tensors

from lightning_stocache.cache.rows import SampleSpec

SAMPLE = {"image": torch.zeros(3, 4, 5, dtype=torch.uint8), "weights": np.zeros((2, 3), np.float32), "label": 0}
SPEC = SampleSpec.infer(SAMPLE)


def rows_of(samples: int) -> list[npt.NDArray[np.uint8]]:
    return [np.full(size, 9, dtype=np.uint8) for size in SPEC.sizes(samples)]


def test_samples_land_at_their_places_in_row_order() -> None:
    """The rows are those that `flatten` gives, whatever the strides; the others stay as they were."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (4, 5, 3), dtype=torch.uint8, generator=generator).permute(2, 0, 1)
    sample = {"image": image, "weights": np.arange(6, dtype=np.float32).reshape(3, 2).T, "label": -5}
    rows = rows_of(3)
    contents = SPEC.rows(lambda: rows, 3).put_many([1], [SPEC.encode(sample)])[0]
    for row, content, expected in zip(rows, contents, SPEC.flatten(sample), strict=True):
        column = row.reshape(3, -1)
        assert column[1].tolist() == expected.tolist()
        assert bytes(content) == bytes(expected.numpy().data)
        assert (column[[0, 2]] == 9).all()


def test_bytes_are_the_same_sample() -> None:
    """However it comes to its place; the others stay as they were."""
    image = torch.randint(0, 256, (3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sample = SAMPLE | {"image": image, "label": 7}
    memory = rows_of(3)
    SPEC.rows(lambda: memory, 3).write(2, SPEC.contents(SPEC.encode(sample)))
    got = SPEC.split(memory, 3)[2]
    assert torch.equal(got["image"], image)
    assert (got["label"], got["weights"].tolist()) == (7, sample["weights"].tolist())
    assert all((row.reshape(3, -1)[:2] == 9).all() for row in memory)


def test_memory_is_asked_for_when_the_first_sample_comes() -> None:
    """Once."""
    asked = []
    batch = SPEC.rows(lambda: asked.append(1) or rows_of(2), 2)  # type: ignore[func-returns-value]
    assert asked == []
    batch.put_many([0], [SPEC.encode(SAMPLE)])
    batch.put_many([1], [SPEC.encode(SAMPLE)])
    assert asked == [1]


def leaves_of(kind: str, number: int) -> Any:
    """A leaf of every sort that a sample may have, another for each number."""
    generator = torch.Generator().manual_seed(number)
    bits = torch.randint(0, 256, (4, 6, 16), dtype=torch.uint8, generator=generator)
    if kind.startswith("torch."):
        dtype = getattr(torch, kind.removeprefix("torch."))
        return bits.bool() if dtype == torch.bool else bits.view(dtype)
    made = {
        "strided": lambda: bits.permute(2, 0, 1)[:, ::2],
        "conjugate": lambda: bits.to(torch.float32).view(torch.complex64).conj(),
        "negative": lambda: bits.to(torch.float32).view(torch.complex64).conj().imag,
        "subclass": lambda: tv_tensors.Image(bits[..., :3].permute(2, 0, 1)),
        "scalar": lambda: torch.tensor(number, dtype=torch.int16),
        "nothing": lambda: torch.zeros(3, 0),
        "array": lambda: bits.numpy().view(np.float32).T,
        "foreign": lambda: bits.numpy().view(">i2"),
        "date": lambda: np.array([number, 5], "M8[s]"),
        "scalar array": lambda: np.array(number),
        "number of NumPy's": lambda: np.float32(number),
        "empty array": lambda: np.zeros((0, 3)),
        "int": lambda: 2**63 - 1 - number,
        "float": lambda: float("nan") if number == 1 else number / 3,
        "complex": lambda: complex(number, -0.0),
        "bool": lambda: bool(number % 2),
        "None": lambda: None,
    }
    return made[kind]()


DTYPES = ["uint8", "bool", "int16", "uint16", "uint64", "float16", "bfloat16", "float32", "float64", "complex64"]
KINDS = [
    *(f"torch.{dtype}" for dtype in [*DTYPES, "float8_e5m2", "complex32"]),
    *("strided", "conjugate", "negative", "subclass", "scalar", "nothing", "array", "foreign", "date"),
    *("scalar array", "number of NumPy's", "empty array", "int", "float", "complex", "bool", "None"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("places", [[2, 3, 4, 5], [0, 2, 3, 5], [2, 4, 3, 5]], ids=["in a row", "apart", "in disorder"])
def test_many_samples_land_as_single_ones_do(kind: str, places: list[int]) -> None:
    """The same bytes at the same places, for leaves of every sort; the others stay as they were."""
    samples = [{"a": leaves_of(kind, number), "b": [number]} for number in range(4)]
    spec = SampleSpec.infer(samples[0])
    memory = [np.full(size, 9, dtype=np.uint8) for size in spec.sizes(6)]
    single = copy.deepcopy(memory)
    parts = [spec.encode(sample) for sample in samples]
    contents = spec.rows(lambda: memory, 6).put_many(places, parts)
    for place, sample, content in zip(places, samples, contents, strict=True):
        expected = [bytes(row.numpy().data) for row in spec.flatten(sample)]
        assert [bytes(field) for field in content] == expected
        assert [bytes(field) for field in spec.contents(spec.encode(sample))] == expected
        assert [
            bytes(field) for field in spec.rows(lambda: single, 6).put_many([place], [spec.encode(sample)])[0]
        ] == expected
    assert all(map(np.array_equal, memory, single))
