"""Samples and datasets of tensordict."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.interop.sources.files import SAMPLES

tensordict = pytest.importorskip("tensordict")


def _table() -> Any:
    columns = {"image": torch.arange(SAMPLES * 12).reshape(SAMPLES, 3, 4), "label": torch.arange(SAMPLES)}
    return tensordict.TensorDict(columns, batch_size=[SAMPLES])


class _Rows(Dataset[Any]):
    """Rows of a table, as they are or made into something else."""

    def __init__(self, change: Any = None) -> None:
        self.table, self.change = _table(), change

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        row = self.table[index]
        return row if self.change is None else self.change(row)


@tensordict.tensorclass
class _Record:
    image: torch.Tensor
    label: torch.Tensor


def _record(row: Any) -> Any:
    return _Record(image=row["image"], label=row["label"], batch_size=[])


WAYS = {
    "samples_stacked_in_collate": lambda setting: setting.loader(_Rows(), collate_fn=torch.stack),
    # Its `__getitems__` gives a whole batch, so the collate_fn has nothing to do. A TensorDict cannot be counted.
    "as_dataset": lambda setting: DataLoader(_table(), collate_fn=lambda batch: batch, **setting.options),
    "tensor_class": lambda setting: setting.loader(_Rows(_record), collate_fn=torch.stack),
    "turned_into_dicts": lambda setting: setting.loader(_Rows(lambda row: row.to_dict())),
}
