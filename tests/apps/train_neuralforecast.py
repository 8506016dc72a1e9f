"""NHITS of neuralforecast on 64 series."""

import numpy as np
import pandas as pd
from lightning.pytorch import seed_everything
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS
from neuralforecast.tsdataset import TimeSeriesDataset
from record import count, note_losses

SERIES = 64

seed_everything(1)
note_losses()
count(TimeSeriesDataset, SERIES)
days = pd.date_range("2020-01-01", periods=40)
waves = [np.sin(np.arange(40.0) / 3 + number) for number in range(SERIES)]
frames = [pd.DataFrame({"unique_id": f"{number:02}", "ds": days, "y": wave}) for number, wave in enumerate(waves)]
sizes = {"n_freq_downsample": [1, 1, 1], "mlp_units": 3 * [[8, 8]]}
options = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}
model = NHITS(h=4, input_size=8, batch_size=16, max_steps=20, **sizes, **options)
NeuralForecast([model], freq="D").fit(pd.concat(frames))
