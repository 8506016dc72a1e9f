"""Two sources are the same if all that they consist of is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_stocache.source.identity import UnknownSourceError, source_digest
from tests.sources import CountedSource


class Photos(Dataset[Any]):
    """A source of a user's."""

    def __init__(self, root: str, size: int = 8, **more: Any) -> None:
        self.root, self.size, self.files = root, size, [f"{root}/{number}.jpg" for number in range(5)]
        vars(self).update(more)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> str:
        return self.files[index]


@pytest.mark.parametrize(
    "make",
    [
        lambda: CountedSource(5),
        lambda: Photos("train" + "/256"),
        lambda: [torch.arange(4) * number for number in range(3)],
        lambda: TensorDataset(torch.eye(3), torch.arange(3)[::2].repeat(2)[:3]),
        lambda: ConcatDataset([Subset(Photos("a"), np.arange(3)), Photos("b")]),
        lambda: list(torch.zeros(2000, 50)),  # views of one memory
    ],
)
def test_what_is_made_alike_is_the_same(make):
    """Another object of the same class with the same values in it; views are told by what they show."""
    assert source_digest(make()) == source_digest(make())


@pytest.mark.parametrize(
    "other",
    [
        Photos("val"),
        Photos("train", 16),
        Photos("train", transform=torch.nn.ReLU),
        Photos("train", weights=torch.zeros(3)),
        Photos("train", weights=torch.zeros(3, dtype=torch.float64)),
        Subset(Photos("train"), [0]),
        CountedSource(5),
    ],
)
def test_what_differs_anywhere_is_another_one(other):
    """Also where one attribute more is there, or a tensor has another dtype."""
    assert source_digest(other) != source_digest(Photos("train"))
    assert source_digest(other) == source_digest(other)


def test_equal_strings_are_equal_whoever_has_made_them():
    """Whether two equal strings are one object makes no difference."""
    name = "".join(["tra", "in"])
    assert source_digest(Photos("a", first=name, second=name)) == source_digest(
        Photos("a", first=name, second="".join(["t", "rain"]))
    )


def test_what_refers_to_itself_is_known(tmp_path):
    """A cycle needs the memo of a pickle."""
    first, second = Photos("a"), Photos("a")
    for source in (first, second):
        source.me = source  # type: ignore[attr-defined]
    assert source_digest(first) == source_digest(second)


def test_what_cannot_be_pickled_is_unknown(tmp_path):
    """An open file, or a function without a name."""
    with open(tmp_path / "file", "w") as file:
        for value in (file, lambda: 0):
            with pytest.raises(UnknownSourceError, match="cannot be pickled"):
                source_digest(Photos("a", value=value))
