"""What the source gives is put at its place of a batch, checked, and handed on as the bytes that lie there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_stocache.cache.spec import SampleMismatchError, SampleSpec
from lightning_stocache.loading.landing import Landing

SAMPLE = {"image": torch.zeros(3, 4, 5, dtype=torch.uint8), "weights": np.zeros((2, 3), np.float32), "label": 0}
SPEC = SampleSpec.infer(SAMPLE)


def rows_of(samples: int) -> list[torch.Tensor]:
    return [torch.full((samples * nbytes,), 9, dtype=torch.uint8) for nbytes in SPEC.row_bytes]


def test_samples_land_at_their_places_in_row_order() -> None:
    """The rows are those that `flatten` gives, whatever the strides; the others stay as they were."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (4, 5, 3), dtype=torch.uint8, generator=generator).permute(2, 0, 1)
    sample = {"image": image, "weights": np.arange(6, dtype=np.float32).reshape(3, 2).T, "label": -5}
    rows = rows_of(3)
    contents = Landing(SPEC, lambda: rows, 3).put(1, sample, 7)
    for row, content, expected in zip(rows, contents, SPEC.flatten(sample), strict=True):
        column = row.view(3, -1)
        assert torch.equal(column[1], expected)
        assert bytes(content) == bytes(expected.numpy().data)
        assert column[[0, 2]].eq(9).all()


def test_a_sample_that_differs_does_not_land() -> None:
    """It is named, and nothing of it is copied."""
    rows = rows_of(2)
    with pytest.raises(SampleMismatchError, match=r"sample 7: field \['image'\] must be .* got .*float32"):
        Landing(SPEC, lambda: rows, 2).put(0, SAMPLE | {"image": torch.zeros(3, 4, 5)}, 7)
    assert all(row.eq(9).all() for row in rows)
