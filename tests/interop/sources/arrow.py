"""Tables of Arrow: rows, columns, slices as samples, Parquet files by row group, and Hugging Face's format of it."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.interop.setting import SAMPLES, Setting, held

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = 8  # of a slice or a row group


def _table() -> Any:
    values = np.random.default_rng(4).random((SAMPLES * ROWS, 3), dtype=np.float32)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 3)
    words = [f"word {number % 11}" for number in range(len(values))]
    return pa.table({"vector": vectors, "label": np.arange(len(values)) % 5, "word": words})


def _row(self: Any, index: int) -> tuple[torch.Tensor, int, str]:
    table = self.table
    return torch.tensor(table["vector"][index].as_py()), table["label"][index].as_py(), table["word"][index].as_py()


def _columns(self: Any, index: int) -> dict[str, torch.Tensor]:
    """The rows of a slice, as one tensor for each column."""
    rows = self.table.slice(index * ROWS, ROWS).combine_chunks()
    vectors = torch.from_numpy(rows["vector"].chunk(0).flatten().to_numpy().copy()).reshape(ROWS, 3)
    return {"vector": vectors, "label": torch.from_numpy(rows["label"].to_numpy().copy())}


def _row_groups(setting: Setting) -> Any:
    """A Parquet file that is opened on first use, of which each sample is a row group."""
    path = setting.folder / "table.parquet"
    if not path.exists():
        parquet.write_table(_table(), path, row_group_size=ROWS)

    def load(self: Any, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = parquet.ParquetFile(path)
        return torch.from_numpy(self.file.read_row_group(index, ["label"])["label"].to_numpy().copy())

    return setting.loader(held(load, file=None))


def _labels(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([sample["label"].to_pylist() for sample in samples])


def _huggingface() -> Any:
    """Rows of a dataset in the format `arrow`, whose own `__getitems__` a DataLoader cannot use."""
    rows = pytest.importorskip("datasets").Dataset(_table().slice(0, SAMPLES)).with_format("arrow")
    return held(lambda self, index: self.rows[index], rows=rows)


ARROW = {
    "columns_of_a_slice": lambda setting: setting.loader(held(_columns, table=_table())),
    "row_of_a_table": lambda setting: setting.loader(held(_row, table=_table())),
    "row_groups_of_a_parquet_file": _row_groups,
    "record_batches_as_samples": lambda setting: setting.loader(
        held(lambda self, index: self.batches[index], batches=_table().to_batches(max_chunksize=ROWS)),
        collate_fn=_labels,
    ),
    "slices_of_a_table": lambda setting: setting.loader(
        held(lambda self, index: self.table.slice(index * ROWS, ROWS), table=_table()), collate_fn=_labels
    ),
    "datasets_in_arrow_format": lambda setting: setting.loader(_huggingface(), collate_fn=_labels),
}
