"""Whether two samples are the same, whatever they are made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.source.same_sample import same_sample


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (torch.ones(3), torch.ones(3) + torch.finfo(torch.float32).eps, True),
        (torch.ones(3), torch.ones(3) + 1e-4, False),
        (torch.ones(3, dtype=torch.uint8), torch.tensor([1, 1, 2], dtype=torch.uint8), False),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), False),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16) * 1.5, False),
        (torch.tensor([1.0, np.nan, np.inf]), torch.tensor([1.0, np.nan, np.inf]), True),
        (torch.tensor([1.0, np.nan]), torch.tensor([1.0, 2.0]), False),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64) * 2j, False),
        (np.float32(0.3), np.nextafter(np.float32(0.3), np.float32(1)), True),
        ([1, {"a": 0.1 + 0.2}], [1, {"a": 0.3}], True),
        ([1, {"a": 1}], [1, {"b": 1}], False),
        ({"a", "b"}, {"b", "a"}, True),
        ({"a", "b"}, {"b"}, False),
        (np.array(["a", None], dtype=object), np.array(["a", "b"], dtype=object), False),
        (SimpleNamespace(a={"x", "y"}), SimpleNamespace(a={"y", "x"}), True),
        (SimpleNamespace(a=1), SimpleNamespace(a=1.0), False),
        (SimpleNamespace(a=[0.3]), SimpleNamespace(a=[0.1 + 0.2]), True),
        (SimpleNamespace(a=[0.3]), SimpleNamespace(a=[0.4]), False),
        ("a", "b", False),
        (1, True, False),
    ],
)
def test_samples_are_compared_by_value(left: Any, right: Any, same: bool) -> None:
    """Whatever they are made of."""
    assert same_sample(left, right) is same
