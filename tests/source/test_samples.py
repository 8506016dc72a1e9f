"""Whether two samples are the same, whatever they are made of, and the marks by which one is found."""

import copy
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pack_sequence

from lightning_stocache.source.samples import bits, digest_of, mark_of, node_at, same_sample, with_node
from tests.cache import leaves


def test_samples_are_compared_by_value() -> None:
    """Whatever they are made of."""
    for left, right, same in (
        (torch.ones(3), torch.ones(3) + torch.finfo(torch.float32).eps, True),
        (torch.ones(3), torch.ones(3) + 1e-4, False),
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
        ({"a": 1, "b": 0.1 + 0.2}, {"b": 0.3, "a": 1}, True),
        (1, True, False),
    ):
        assert same_sample(left, right) is same


def test_other_contents_have_other_marks() -> None:
    """A byte in the middle, another shape, type or key changes it. A copy has the same, also of a sample in itself."""
    for samples in (
        [torch.zeros(3, 64, 64), torch.zeros(3, 64, 64).index_fill_(2, torch.tensor(5), 1.0), torch.zeros(64, 3, 64)],
        [torch.zeros(4, dtype=torch.int32), torch.zeros(4), np.zeros(4, np.float32)],
        [b"a" * 500, b"a" * 250 + b"b" + b"a" * 249, "a" * 500],
        [{"a": 1, "b": 2}, {"a": 2, "b": 1}, [1, 2], (1, 2), [True, 2]],
        [Image.new("RGB", (9, 9)), Image.new("RGB", (9, 9), (1, 0, 0)), Image.new("L", (9, 9))],
        [torch.tensor(1), torch.tensor(True), torch.tensor([1]), 1, 1.0, None],
        [(torch.zeros(2), 1), (torch.ones(2), 1), (torch.zeros(2), 2)],
    ):
        itself: list[Any] = [torch.zeros(2)]
        itself.append(itself)
        marks = [mark_of(sample) for sample in [*samples, itself]]
        assert len(set(marks)) == len(marks)
        assert [mark_of(sample) for sample in copy.deepcopy([*samples, itself])] == marks
        assert all(0 <= mark < 2**64 for mark in marks)


def ragged(kind: str, value: float) -> torch.Tensor:
    """A tensor without dense memory of its own, whose last number is the value."""
    dense = torch.eye(4) * 7
    dense[3, 3] = value
    make: dict[str, Callable[[], Any]] = {
        "coo": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
        "nested": lambda: torch.nested.nested_tensor([dense[:2], dense]),
        "jagged": lambda: torch.nested.nested_tensor([dense[:2], dense], layout=torch.jagged),
        "quantised": lambda: torch.quantize_per_tensor(dense, 0.5, 3, torch.quint8),
        "by channel": lambda: torch.quantize_per_channel(dense, torch.ones(4), torch.zeros(4), 0, torch.qint8),
    }
    return make[kind]()


@pytest.mark.filterwarnings("ignore")  # prototypes of torch
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", "nested", "jagged", "quantised", "by channel"])
def test_content_of_tensors_without_dense_memory_is_compared(kind: str) -> None:
    """Sparse, nested, jagged and quantised ones are equal by content, and by the last bits where they hold floats."""
    ours, same, other = (ragged(kind, value) for value in (5.0, 5.0, 9.0))
    assert bits([ours]) == bits([same])
    assert same_sample([ours], [same])
    assert not same_sample([ours], [other])
    assert digest_of(ours) == digest_of(same) != digest_of(other)
    assert mark_of(ours) == mark_of(same) != mark_of(other)
    near = ragged(kind, 5.0 + 5 * torch.finfo(torch.float32).eps)
    assert same_sample([ours], [near])


class Point(tuple[Any, ...]):
    """A tuple with a constructor of two arguments, and attributes."""

    def __new__(cls, x: Any, y: Any) -> Any:
        return super().__new__(cls, (x, y))


@pytest.mark.parametrize(
    ("sample", "path"),
    [
        (pack_sequence([torch.ones(3), torch.zeros(2)]), (1,)),
        ([Point(1, {"a": torch.zeros(2)})], (0, 1, "a")),
        (time.gmtime(0), (2,)),
        ((torch.Size([2, 3]), 1), (0, 1)),
    ],
)
def test_a_part_is_replaced_in_containers_of_any_constructor(sample: Any, path: Any) -> None:
    """The containers around a part keep their class, their other items and their attributes."""
    other = with_node(sample, path, 7)
    assert node_at(other, path) == 7
    assert leaves.same(with_node(other, path, node_at(sample, path)), sample)


@pytest.mark.parametrize("column", [lambda t: t[:1, 3], lambda t: t.bfloat16()[2:3, 1:2], lambda t: t.t()[:0, 1]])
def test_the_bits_of_a_tensor_do_not_depend_on_strides_of_one_element(column: Any) -> None:
    """A tensor of one element or of none may have any stride, and is contiguous to torch."""
    table = torch.arange(24.0).reshape(4, 6)
    assert bits(column(table)) == bits(column(table).clone(memory_format=torch.contiguous_format))
    assert bits(column(table)) != bits(column(table + 1)) or not column(table).numel()


def test_masks_are_compared() -> None:
    """Two masked arrays of the same numbers differ where another number is masked."""
    ours, same, other = (np.ma.MaskedArray([1.0, 2.0], mask) for mask in ([0, 1], [0, 1], [1, 0]))
    assert same_sample(ours, same)
    assert not same_sample(ours, other)
    assert digest_of(ours) == digest_of(same) != digest_of(other)
