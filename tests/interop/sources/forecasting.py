"""Windows of time series from pytorch-forecasting, in the loader that its `to_dataloader` makes."""

from typing import Any

import numpy as np
import pytest

from tests.interop.setting import Setting

pd = pytest.importorskip("pandas")
forecasting = pytest.importorskip("pytorch_forecasting")


def _series() -> Any:
    rows = [(name, step, np.sin(step + number)) for number, name in enumerate("abc") for step in range(14)]
    frame = pd.DataFrame(rows, columns=["series", "step", "value"])
    return frame.assign(value=frame.value.astype("float32"), series=frame.series.astype("object"))


def _windows(setting: Setting, **options: Any) -> Any:
    columns = {"time_idx": "step", "target": "value", "group_ids": ["series"], "static_categoricals": ["series"]}
    reals = {"time_varying_unknown_reals": ["value"], "time_varying_known_reals": ["step"]}
    lengths = {"max_encoder_length": 5, "max_prediction_length": 2}
    dataset = forecasting.TimeSeriesDataSet(_series(), **columns | reals | lengths | options)
    return setting.counted(dataset).to_dataloader(train=True, batch_size=6, num_workers=setting.workers)


FORECASTING = {
    "windows_of_one_length": _windows,
    "one_step_ahead": lambda setting: _windows(setting, max_prediction_length=1),
    "windows_of_many_lengths": lambda setting: _windows(setting, min_encoder_length=2, min_prediction_length=1),
    "random_lengths": lambda setting: _windows(setting, min_encoder_length=2, randomize_length=True),
}
