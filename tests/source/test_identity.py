"""Sources with other data have another digest."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_stocache.source.identity import data_digest


class Files(Dataset[Any]):
    """Holds something."""

    def __init__(self, files: Any, rank: int = 0) -> None:
        self.files, self.rank, self.path = files, rank, f"/tmp/{rank}"

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


def framed(value: float) -> torch.Tensor:
    """Images with a black frame, whose middle has this value."""
    images = torch.zeros(40, 1, 28, 28)
    images[:, :, 8:20, 8:20] = value
    return images


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Subset(range(10), range(0, 10, 2)), Subset(range(10), range(1, 10, 2))),
        (Files(["a", "b"]), Files(["a", "c"])),
        (Files(torch.arange(3)), Files(torch.arange(3) + 1)),
        (Files(np.arange(3)), Files(np.arange(4))),
        (Files(np.array(3)), Files(np.array(4))),
        (Files(np.arange(40).reshape(2, 20).T), Files(np.arange(1, 41).reshape(2, 20).T)),
        (Files(framed(1.0)), Files(framed(1.00001))),
        (Files(framed(1.0).numpy()), Files(framed(1.00001).numpy())),
        (Subset(Files(["a", "b"]), [0]), Subset(Files(["a", "c"]), [0])),
        (ConcatDataset([Files(["a"])]), ConcatDataset([Files(["b"])])),
        ([1, 2], (1, 2)),
    ],
)
def test_other_data_has_another_digest(one: Any, other: Any) -> None:
    """Subsets, lists of files, tensors and arrays, inside other datasets too."""
    assert data_digest(one) == data_digest(one)
    assert data_digest(one) != data_digest(other)


def test_what_ranks_have_of_their_own_is_no_difference() -> None:
    """Numbers and strings: a rank, a folder of its own."""
    assert data_digest(Files(["a"], rank=0)) == data_digest(Files(["a"], rank=1))
