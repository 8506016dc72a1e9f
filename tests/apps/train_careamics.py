"""Noise2Void of careamics, whose transform is called by keyword and returns a tuple."""

import numpy as np
from careamics import CAREamist
from careamics.config import create_n2v_configuration
from careamics.dataset.in_memory_dataset import InMemoryDataset
from lightning.pytorch import seed_everything
from record import count, note_losses
from seeds import seed_numpy_generators

PATCHES = 24

seed_everything(1)
seed_numpy_generators()
note_losses()
images = np.random.default_rng(1).random((PATCHES + 4, 16, 16), dtype="float32")
count(InMemoryDataset, PATCHES)
configuration = create_n2v_configuration(
    experiment_name="tiny",
    data_type="array",
    axes="SYX",
    patch_size=[16, 16],
    batch_size=4,
    num_epochs=4,
    model_params={"depth": 2, "num_channels_init": 8},
    dataloader_params={"num_workers": 0},
)
CAREamist(configuration).train(train_source=images[:PATCHES], val_source=images[PATCHES:])
