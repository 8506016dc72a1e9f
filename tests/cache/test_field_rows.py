"""Samples at their places of a batch: put, or written as bytes."""

from __future__ import annotations

import numpy as np
import torch

from lightning_stocache.cache.spec import SampleSpec, contents_of

SAMPLE = {"image": torch.zeros(3, 4, 5, dtype=torch.uint8), "weights": np.zeros((2, 3), np.float32), "label": 0}
SPEC = SampleSpec.infer(SAMPLE)


def rows_of(samples: int) -> list[torch.Tensor]:
    return [torch.full((size,), 9, dtype=torch.uint8) for size in SPEC.sizes(samples)]


def test_samples_land_at_their_places_in_row_order() -> None:
    """The rows are those that `flatten` gives, whatever the strides; the others stay as they were."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (4, 5, 3), dtype=torch.uint8, generator=generator).permute(2, 0, 1)
    sample = {"image": image, "weights": np.arange(6, dtype=np.float32).reshape(3, 2).T, "label": -5}
    rows = rows_of(3)
    contents = SPEC.rows(lambda: rows, 3).put(1, SPEC.encode(sample))
    for row, content, expected in zip(rows, contents, SPEC.flatten(sample), strict=True):
        column = row.view(3, -1)
        assert torch.equal(column[1], expected)
        assert bytes(content) == bytes(expected.numpy().data)
        assert column[[0, 2]].eq(9).all()


def test_bytes_are_the_same_sample() -> None:
    """However it comes to its place; the others stay as they were."""
    image = torch.randint(0, 256, (3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sample = SAMPLE | {"image": image, "label": 7}
    memory = rows_of(3)
    SPEC.rows(lambda: memory, 3).write(2, contents_of(SPEC.encode(sample)))
    got = SPEC.split(memory, 3)[2]
    assert torch.equal(got["image"], image)
    assert (got["label"], got["weights"].tolist()) == (7, sample["weights"].tolist())
    assert all(row.view(3, -1)[:2].eq(9).all() for row in memory)


def test_memory_is_asked_for_when_the_first_sample_comes() -> None:
    """Once."""
    asked = []
    batch = SPEC.rows(lambda: asked.append(1) or rows_of(2), 2)  # type: ignore[func-returns-value]
    assert asked == []
    batch.put(0, SPEC.encode(SAMPLE))
    batch.put(1, SPEC.encode(SAMPLE))
    assert asked == [1]
