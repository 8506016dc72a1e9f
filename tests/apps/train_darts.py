"""NBEATS of darts on windows of one series."""

import numpy as np
from darts import TimeSeries
from darts.models import NBEATSModel
from darts.utils.data import ShiftedTorchTrainingDataset
from lightning.pytorch import seed_everything
from record import count, note_losses

STEPS, INPUT, OUTPUT = 120, 10, 3

seed_everything(1)
note_losses()
count(ShiftedTorchTrainingDataset, STEPS - INPUT - OUTPUT + 1)
series = TimeSeries.from_values(np.sin(np.arange(STEPS) / 5).astype("float32"))
model = NBEATSModel(
    input_chunk_length=INPUT,
    output_chunk_length=OUTPUT,
    num_stacks=2,
    num_blocks=1,
    num_layers=1,
    layer_widths=8,
    n_epochs=4,
    batch_size=16,
    random_state=1,
    pl_trainer_kwargs={"accelerator": "cpu", "enable_progress_bar": False},
)
model.fit(series)
