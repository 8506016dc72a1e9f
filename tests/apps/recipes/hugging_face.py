"""The recipe of the Hugging Face Trainer: equal losses, also after resuming; each sample is loaded once."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments, set_seed

from tests.apps.recipes.guide import run
from tests.loading.twins import looked
from tests.sources import Made

SAMPLES = 90


class Model(torch.nn.Module):
    """One layer on the bytes of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(48, 10)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(pixels.flatten(1) / 255)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Losses(TrainerCallback):
    """Notes the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        self.values += [logs["loss"]] if "loss" in logs else []


def make(index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    return {"pixels": torch.randint(0, 256, (3, 4, 4), dtype=torch.uint8, generator=generator), "labels": index % 10}


def train(cached: bool, workers: int) -> list[float]:
    """The losses of three epochs, and of those from step 17 on, resumed from its checkpoint."""
    folder = Path(f"trainer-{cached}-{workers}")
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=3,
        per_device_train_batch_size=8,
        dataloader_num_workers=workers,
        logging_steps=1,
        save_steps=17,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    source = Made(make, SAMPLES, folder.with_suffix(".loads").absolute())
    losses = Losses()
    set_seed(1)
    names = run(
        "Hugging Face Trainer", cached=cached, photos=source, model=Model(), arguments=arguments, callbacks=[losses]
    )
    trainer = names["trainer"]
    if cached:
        dataset = names["dataset"]
        counts = dataset.counters.totals()
        assert counts.misses + counts.setup_fills == SAMPLES
        assert source.loads <= SAMPLES + 32 + looked(dataset), source.loads
    steps = len(losses.values)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-17"))
    assert losses.values[steps:] == losses.values[17:steps]
    return losses.values


for number in map(int, sys.argv[1:] or ["0", "2"]):
    assert train(cached=True, workers=number) == train(cached=False, workers=number)
print("equal")
