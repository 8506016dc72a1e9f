"""SCVI of scvi-tools, whose sampler draws lists of indices."""

import numpy as np
from anndata import AnnData
from record import count, note_losses
from scvi import settings
from scvi.data._anntorchdataset import AnnTorchDataset  # noqa: PLC2701
from scvi.model import SCVI

CELLS = 96

settings.seed = 1
note_losses()
cells = AnnData(np.random.default_rng(1).poisson(2.0, (CELLS, 20)).astype("float32"))
count(AnnTorchDataset, CELLS)
SCVI.setup_anndata(cells)
model = SCVI(cells, n_hidden=8, n_latent=2)
model.train(max_epochs=4, batch_size=16, train_size=1.0, accelerator="cpu", enable_progress_bar=False)
