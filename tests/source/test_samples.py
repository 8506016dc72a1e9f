"""Whether two samples or two sources are the same, whatever they are made of, and the marks by which one is found."""

import copy
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_stocache.source.identity import data_digest
from lightning_stocache.source.samples import bits, mark_of, part_at, same_sample, with_part
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


class Files(Dataset[Any]):
    def __init__(self, files: Any, rank: int = 0) -> None:
        self.files, self.rank, self.path = files, rank, f"/tmp/{rank}"

    def __len__(self) -> int:
        return len(self.files)


def framed(value: float) -> torch.Tensor:
    """Images with a black frame, whose middle has this value."""
    images = torch.zeros(40, 1, 28, 28)
    images[:, :, 8:20, 8:20] = value
    return images


def test_other_data_has_another_digest() -> None:
    """Subsets, lists of files, tensors and arrays, inside other datasets too. What ranks have of their own is none."""
    for left, right in (
        (Subset(range(10), range(0, 10, 2)), Subset(range(10), range(1, 10, 2))),
        (Files(["a", "b"]), Files(["a", "c"])),
        (Files(torch.arange(3)), Files(torch.arange(3) + 1)),
        (Files(np.array(3)), Files(np.array(4))),
        (Files(np.arange(40).reshape(2, 20).T), Files(np.arange(1, 41).reshape(2, 20).T)),
        (Files(framed(1.0)), Files(framed(1.00001))),
        (Subset(Subset(Files(["a", "b"]), [0]), [0]), Subset(Subset(Files(["a", "c"]), [0]), [0])),
        (ConcatDataset([Files(["a"])]), ConcatDataset([Files(["b"])])),
        ([1, 2], (1, 2)),
    ):
        assert data_digest(left) == data_digest(left)
        assert data_digest(left) != data_digest(right)
    assert data_digest(Files(["a"], rank=0)) == data_digest(Files(["a"], rank=1))


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
    other = with_part(sample, path, 7)
    assert part_at(other, path) == 7
    assert leaves.same(with_part(other, path, part_at(sample, path)), sample)


@pytest.mark.parametrize("column", [lambda t: t[:1, 3], lambda t: t.bfloat16()[2:3, 1:2], lambda t: t.t()[:0, 1]])
def test_the_bits_of_a_tensor_do_not_depend_on_strides_of_one_element(column: Any) -> None:
    """A tensor of one element or of none may have any stride, and is contiguous to torch."""
    table = torch.arange(24.0).reshape(4, 6)
    assert bits(column(table)) == bits(column(table).clone(memory_format=torch.contiguous_format))
    assert bits(column(table)) != bits(column(table + 1)) or not column(table).numel()
