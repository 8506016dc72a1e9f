"""Samples and datasets of tensordict."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.interop.setting import SAMPLES, held

tensordict = pytest.importorskip("tensordict")


def _table() -> Any:
    columns = {"image": torch.arange(SAMPLES * 12).reshape(SAMPLES, 3, 4), "label": torch.arange(SAMPLES)}
    return tensordict.TensorDict(columns, batch_size=[SAMPLES])


def _rows(change: Callable[[Any], Any] = lambda row: row) -> Any:
    """Rows of a table, as they are or made into something else."""
    return held(lambda self, index: change(self.table[index]), table=_table())


@tensordict.tensorclass
class _Record:
    image: torch.Tensor
    label: torch.Tensor


def _record(row: Any) -> Any:
    return _Record(image=row["image"], label=row["label"], batch_size=[])


TENSORDICT = {
    "samples_stacked_in_collate": lambda setting: setting.loader(_rows(), collate_fn=torch.stack),
    # Its `__getitems__` gives a whole batch, so the collate_fn has nothing to do. A TensorDict cannot be counted.
    "as_dataset": lambda setting: DataLoader(_table(), collate_fn=lambda batch: batch, **setting.options),
    "tensor_class": lambda setting: setting.loader(_rows(_record), collate_fn=torch.stack),
    "turned_into_dicts": lambda setting: setting.loader(_rows(lambda row: row.to_dict())),
}
