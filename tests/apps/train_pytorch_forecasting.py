"""A Temporal Fusion Transformer of pytorch-forecasting, as its tutorial trains it."""

import numpy as np
import pandas as pd
from lightning.pytorch import Trainer, seed_everything
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from record import count, note_losses

seed_everything(1)
note_losses()
rows = [(name, step, np.sin(step / 3 + number) + 2) for number, name in enumerate("abcd") for step in range(34)]
frame = pd.DataFrame(rows, columns=["series", "step", "value"]).astype({"value": "float32", "series": "object"})
training = TimeSeriesDataSet(
    frame[frame.step < 30],
    time_idx="step",
    target="value",
    group_ids=["series"],
    max_encoder_length=5,
    max_prediction_length=2,
    static_categoricals=["series"],
    time_varying_known_reals=["step"],
    time_varying_unknown_reals=["value"],
    target_normalizer=GroupNormalizer(groups=["series"]),
)
validation = TimeSeriesDataSet.from_dataset(training, frame, predict=True, stop_randomization=True)
count(TimeSeriesDataSet, len(training))
model = TemporalFusionTransformer.from_dataset(training, hidden_size=8, attention_head_size=1, dropout=0.1)
trainer = Trainer(max_epochs=4, accelerator="cpu", enable_progress_bar=False, logger=False)
trainer.fit(
    model,
    train_dataloaders=training.to_dataloader(train=True, batch_size=8, num_workers=0),
    val_dataloaders=validation.to_dataloader(train=False, batch_size=8, num_workers=0),
)
