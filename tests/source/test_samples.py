"""Whether two samples are the same, whatever they are made of, and the marks by which one is found."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lightning_stocache.source.samples import mark_of, same_sample

LEAVES = st.one_of(st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), st.booleans(), st.none())
SAMPLES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


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
        (SimpleNamespace(a=1), SimpleNamespace(a=1.0), False),
        (SimpleNamespace(a=[0.3]), SimpleNamespace(a=[0.3]), True),
        ({"a": 1, "b": 0.1 + 0.2}, {"b": 0.3, "a": 1}, True),
        ("a", "b", False),
        (1, True, False),
    ],
)
def test_samples_are_compared_by_value(left: Any, right: Any, same: bool) -> None:
    """Whatever they are made of."""
    assert same_sample(left, right) is same


@given(SAMPLES)
def test_a_mark_follows_from_the_content(sample: Any) -> None:
    """A copy has the same mark, whatever objects it is made of."""
    assert mark_of(copied(sample)) == mark_of(sample)
    assert 0 <= mark_of(sample) < 2**64


def copied(sample: Any) -> Any:
    if isinstance(sample, dict):
        return {key: copied(value) for key, value in sample.items()}
    return [copied(item) for item in sample] if isinstance(sample, list) else sample


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(3, 64, 64), torch.zeros(3, 64, 64).index_fill_(2, torch.tensor(5), 1.0), torch.zeros(64, 3, 64)],
        [torch.zeros(4, dtype=torch.int32), torch.zeros(4), np.zeros(4, np.float32)],
        [b"a" * 500, b"a" * 250 + b"b" + b"a" * 249, "a" * 500],
        [{"a": 1, "b": 2}, {"a": 2, "b": 1}, [1, 2], (1, 2), [True, 2]],
        [Image.new("RGB", (9, 9)), Image.new("RGB", (9, 9), (1, 0, 0)), Image.new("L", (9, 9))],
        [torch.tensor(1), torch.tensor(True), torch.tensor([1]), 1, 1.0, None],
    ],
)
def test_other_contents_have_other_marks(samples: list[Any]) -> None:
    """A byte in the middle, another shape, type or key changes it."""
    assert len({mark_of(sample) for sample in samples}) == len(samples)


def test_a_sample_inside_itself_has_a_mark() -> None:
    """It is not gone into for ever."""
    sample: list[Any] = [torch.zeros(2)]
    sample.append(sample)
    assert mark_of(sample) == mark_of(sample)
