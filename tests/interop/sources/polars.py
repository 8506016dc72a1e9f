"""Frames of polars, whose own threads a fork does not inherit: rows, groups, queries, and a frame on a disk."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.interop.setting import SAMPLES, Setting, held

pl = pytest.importorskip("polars")

EVENTS = 6  # of each user


def _histories() -> Any:
    """Six events of each user, in no order, as a log has them."""
    numbers = np.random.default_rng(2).permutation(SAMPLES * EVENTS)
    return pl.DataFrame({"user": numbers % SAMPLES, "item": numbers // SAMPLES, "rating": numbers / 7})


def _history(self: Any, index: int) -> dict[str, torch.Tensor]:
    """The events of a user: a query that polars runs in its threads."""
    rows = self.frame.lazy().filter(pl.col("user") == index).sort("item").collect()
    return {"items": rows["item"].to_torch(), "ratings": torch.from_numpy(rows["rating"].to_numpy().copy())}


def _row(self: Any, index: int) -> tuple[torch.Tensor, str]:
    row = self.frame.row(index, named=True)
    return torch.tensor([row["item"], row["rating"]]), f"user {row['user']}"


def _parquet(setting: Setting) -> Any:
    """A file whose rows are looked up by a lazy query, with some columns alone."""
    path = setting.folder / "histories.parquet"
    if not path.exists():
        _histories().write_parquet(path)

    def load(self: Any, index: int) -> torch.Tensor:
        row = pl.scan_parquet(path).slice(index, 1).select("item", "rating").collect()
        return torch.from_numpy(row.cast(pl.Float64).to_numpy().copy())[0]

    return setting.loader(held(load))


def _jittered(self: Any, index: int) -> torch.Tensor:
    """Two ratings of a user, drawn by polars under a seed of torch's."""
    rows = self.frame.filter(pl.col("user") == index)
    return rows["rating"].sample(2, seed=int(torch.randint(1 << 30, ()))).to_torch()


POLARS = {
    "query_for_each_user": lambda setting: setting.loader(held(_history, frame=_histories())),
    "row_of_a_frame": lambda setting: setting.loader(held(_row, frame=_histories())),
    "slices_as_samples": lambda setting: setting.loader(
        held(lambda self, index: self.frame[index * EVENTS : (index + 1) * EVENTS], frame=_histories()),
        collate_fn=lambda samples: pl.concat(samples)["item"].to_list(),
    ),
    "rows_of_a_parquet_file": _parquet,
    "random_events": lambda setting: setting.loader(held(_jittered, frame=_histories())),
}
