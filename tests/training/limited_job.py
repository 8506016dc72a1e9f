"""A training on the CPU whose memory is all of its own, which `test_doors` runs in a cgroup.

    python -m tests.training.limited_job '{"door": "callback", "budget": "auto", "workers": 2, "samples": 7000}'

The last line of stdout has the metrics of the last epoch.
"""

import json
import sys
from typing import Any

import torch

from tests.sources import Made
from tests.training.tiny import Data, Model, behind, make_trainer


def image(index: int) -> tuple[torch.Tensor, int]:
    """A sample of 147 KiB."""
    return torch.full((3, 224, 224), index % 256, dtype=torch.uint8), index % 10


class Classifier(Model):
    """Two million parameters: 9 MB, and three times that besides once Adam has stepped. Every tenth batch is turned
    into floats as a whole, 38 MB: memory that comes and goes. With 16 to 32 MB this would be a test of glibc, whose
    heap then grows by up to a GB within two epochs, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(2352, 1000), torch.nn.Linear(1000, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        thumbnails = (images.float() if batch_idx % 10 == 0 else images)[:, :, ::8, ::8]
        return self.loss((thumbnails, labels))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-4)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)  # on a busy machine threads that wait for each other take ten times as long
    data = Data(
        Made(image, job["samples"]), Made(image, job["samples"] // 20), batch_size=64, num_workers=job["workers"]
    )
    callbacks, data = behind(job["door"], data, budget=job["budget"])
    trainer = make_trainer(".", callbacks, epochs=2, logger=False)
    trainer.fit(Classifier(), data)
    print({key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("stocache/")})
